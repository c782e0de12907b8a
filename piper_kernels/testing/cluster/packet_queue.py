"""The clockwork of the user-space switch: when does each packet get through which link?

A packet crosses some links, one after the other. Each link is a queue: it serves packets in the
order in which their heads arrive, each for ``gap + bytes / rate``. A link begins with a packet as
soon as its head is there (cut-through), and is not done before the link in front of it.

Pure: times are arguments, packets are anything.
"""

import heapq
import itertools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Generic, TypeVar

P = TypeVar("P")


@dataclass(kw_only=True, slots=True, eq=False)
class QueuedLink:
    """One direction of one link.

    Attributes:
        rate_bytes_per_s: of its bytes.
        delay_s: that a packet's head needs to reach it.
        gap_s: for which a packet with data occupies it, apart from its bytes.
        free_s: when it will have served all that is queued.
        num_bytes: served or queued so far.
    """

    rate_bytes_per_s: float
    delay_s: float = 0.0
    gap_s: float = 0.0
    free_s: float = 0.0
    num_bytes: int = 0


@dataclass(slots=True)
class _Flight(Generic[P]):
    packet: P
    num_bytes: int
    has_data: bool
    path: Sequence[QueuedLink]
    hop: int = 0
    end_s: float = 0.0


@dataclass(slots=True)
class PacketQueue(Generic[P]):
    """All packets under way.

    Example:
        Two packets of 1000 bytes at 1 MB/s: they take turns on the link.

        >>> link, queue = QueuedLink(rate_bytes_per_s=1e6), PacketQueue()
        >>> queue.accept(0.0, "a", 1000, True, [link])
        >>> queue.accept(0.0, "b", 1000, True, [link])
        >>> list(queue.due(0.0015)), list(queue.due(0.002))
        (['a'], ['b'])
    """

    _events: list[tuple[float, int, _Flight[P]]] = field(default_factory=list)
    _numbers: Iterator[int] = field(default_factory=itertools.count)

    def accept(
        self, now_s: float, packet: P, num_bytes: int, has_data: bool, path: Sequence[QueuedLink]
    ) -> None:
        """Take a packet that enters the first link of its path now."""
        self._push(now_s + path[0].delay_s, _Flight(packet, num_bytes, has_data, path))

    def due(self, now_s: float) -> Iterator[P]:
        """Packets that have come through by now, in order of arrival."""
        while self._events and self._events[0][0] <= now_s:
            at_s, _, flight = heapq.heappop(self._events)
            if flight.hop == len(flight.path):
                yield flight.packet
                continue
            self._serve(at_s, flight)

    def next_s(self) -> float:
        """When something will happen next; infinite if nothing is under way."""
        return self._events[0][0] if self._events else float("inf")

    def _serve(self, at_s: float, flight: _Flight[P]) -> None:
        """A head reaches a link: queue it there, and send it on."""
        link = flight.path[flight.hop]
        start_s = max(at_s, link.free_s)
        takes_s = flight.num_bytes / link.rate_bytes_per_s
        takes_s += link.gap_s if flight.has_data else 0.0
        # the tail cannot leave before it has come
        flight.end_s = link.free_s = max(start_s + takes_s, flight.end_s + link.delay_s)
        link.num_bytes += flight.num_bytes
        flight.hop += 1
        is_last = flight.hop == len(flight.path)
        self._push(flight.end_s if is_last else start_s + flight.path[flight.hop].delay_s, flight)

    def _push(self, at_s: float, flight: _Flight[P]) -> None:
        heapq.heappush(self._events, (at_s, next(self._numbers), flight))
