"""How a gradient reduction is cut, so that whatever is more urgent waits for one chunk at most.

Pure: no torch, no process group.
"""

from collections.abc import Sequence
from dataclasses import dataclass

from piper_kernels.dist.links import Link
from piper_kernels.errors import require


@dataclass(frozen=True, slots=True, order=True)
class Piece:
    """Elements ``start:end`` of the flattened tensor ``index``."""

    index: int
    start: int
    end: int

    @property
    def num_elements(self) -> int:
        """How many."""
        return self.end - self.start


def cut_into_chunks(
    num_elements: Sequence[int], element_bytes: int, chunk_bytes: int
) -> list[list[Piece]]:
    """Cut tensors of one dtype into chunks; small tensors share one, large ones fill several.

    Args:
        num_elements: of each tensor.
        element_bytes: of their dtype.
        chunk_bytes: the most that a chunk holds; at least one element goes into each.

    Returns:
        Chunks in the order of the tensors; each element is in exactly one.

    Raises:
        ConfigError: ``chunk_bytes`` is below 1.

    Example:
        >>> [[(p.index, p.start, p.end) for p in chunk] for chunk in cut_into_chunks([5, 1], 4, 16)]
        [[(0, 0, 4)], [(0, 4, 5), (1, 0, 1)]]
    """
    require(chunk_bytes >= 1, "cut_into_chunks", "chunk_bytes", "be at least 1", chunk_bytes)
    capacity = max(chunk_bytes // element_bytes, 1)
    chunks: list[list[Piece]] = []
    room = 0
    for index, size in enumerate(num_elements):
        start = 0
        while start < size:
            if room == 0:
                chunks.append([])
                room = capacity
            piece = Piece(index, start, min(start + room, size))
            chunks[-1].append(piece)
            room -= piece.num_elements
            start = piece.end
    return chunks


def chunk_bytes_for(link: Link, num_ranks: int, most_wait_s: float) -> int:
    """The largest chunk of an all-reduce that occupies a port for ``most_wait_s`` at most.

    In a ring each rank sends and receives ``2 (n - 1) / n`` of the bytes in ``2 (n - 1)``
    messages.

    Args:
        link: of the slowest level between the ranks.
        num_ranks: n, of the reduction.
        most_wait_s: how long an urgent message may wait, in seconds.

    Returns:
        Bytes, at least 1: where the messages alone take longer, no chunk is small enough.

    Raises:
        ConfigError: fewer than 2 ranks, or a wait that is not positive.

    Example:
        >>> link = Link(latency_s=0.0, bandwidth_bytes_per_s=1e9)
        >>> chunk_bytes_for(link, 2, 1e-3)
        1000000
    """
    name = "chunk_bytes_for"
    require(num_ranks >= 2, name, "num_ranks", "be at least 2", num_ranks)
    require(most_wait_s > 0, name, "most_wait_s", "be positive", most_wait_s)
    num_messages = 2 * (num_ranks - 1)

    def busy_s(chunk_bytes: int) -> float:
        return num_messages * float(link.busy_s(chunk_bytes / num_ranks))

    largest = 1
    while busy_s(2 * largest) <= most_wait_s:
        largest *= 2
    step = largest // 2
    while step:
        if busy_s(largest + step) <= most_wait_s:
            largest += step
        step //= 2
    return largest
