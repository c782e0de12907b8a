"""The switch's clockwork: rates, gaps, delays, fairness of order, against sums by hand."""

import hypothesis
import pytest
from hypothesis import strategies as st

from piper_kernels.testing.cluster.packet_queue import PacketQueue, QueuedLink


def arrivals(queue: PacketQueue[str]) -> dict[str, float]:
    """When each packet comes through, found by asking at every event."""
    found: dict[str, float] = {}
    while (at_s := queue.next_s()) < float("inf"):
        found.update(dict.fromkeys(queue.due(at_s), at_s))
    return found


def test_packet_queue_serves_at_the_rate_and_counts() -> None:
    link, queue = QueuedLink(rate_bytes_per_s=1e6), PacketQueue[str]()
    for name in "abc":
        queue.accept(0.0, name, 2000, True, [link])
    assert arrivals(queue) == pytest.approx({"a": 0.002, "b": 0.004, "c": 0.006})
    assert link.num_bytes == 6000


def test_packet_queue_charges_the_gap_to_packets_with_data_only() -> None:
    link, queue = QueuedLink(rate_bytes_per_s=1e6, gap_s=0.01), PacketQueue[str]()
    queue.accept(0.0, "data", 1000, True, [link])
    queue.accept(0.0, "ack", 1000, False, [link])
    assert arrivals(queue) == pytest.approx({"data": 0.011, "ack": 0.012})


def test_packet_queue_cuts_through_equal_links() -> None:
    """Two links in a row take no longer than one, but for the delay."""
    path = [QueuedLink(rate_bytes_per_s=1e6), QueuedLink(rate_bytes_per_s=1e6, delay_s=0.5)]
    queue = PacketQueue[str]()
    queue.accept(1.0, "a", 1000, True, path)
    assert arrivals(queue) == pytest.approx({"a": 1.501})


def test_packet_queue_slowest_link_decides() -> None:
    for rates in ((1e6, 1e5), (1e5, 1e6)):
        path = [QueuedLink(rate_bytes_per_s=rate) for rate in rates]
        queue = PacketQueue[str]()
        for name in "ab":
            queue.accept(0.0, name, 1000, True, path)
        assert arrivals(queue) == pytest.approx({"a": 0.01, "b": 0.02})


def test_packet_queue_late_sender_is_not_held_up_by_a_backlog_elsewhere() -> None:
    """Packets that still wait on their own link take no place in the receiver's queue."""
    slow, fast, shared = (QueuedLink(rate_bytes_per_s=rate) for rate in (1e5, 1e6, 1e6))
    queue = PacketQueue[str]()
    for name in ("a0", "a1", "a2"):
        queue.accept(0.0, name, 1000, True, [slow, shared])
    assert not list(queue.due(0.001))
    queue.accept(0.001, "b", 1000, True, [fast, shared])
    found = arrivals(queue)
    assert found["b"] == pytest.approx(0.011)
    assert found["a2"] == pytest.approx(0.03)


@hypothesis.given(
    sizes=st.lists(st.integers(1, 65000), min_size=1, max_size=30),
    rates=st.lists(st.floats(1e4, 1e9), min_size=1, max_size=4),
    gap_s=st.floats(0, 0.01),
)
def test_packet_queue_keeps_order_and_never_beats_a_link(
    sizes: list[int], rates: list[float], gap_s: float
) -> None:
    path = [QueuedLink(rate_bytes_per_s=rate, gap_s=gap_s) for rate in rates]
    queue = PacketQueue[str]()
    for number, size in enumerate(sizes):
        queue.accept(0.0, str(number), size, True, path)
    found = arrivals(queue)
    assert list(found) == [str(number) for number in range(len(sizes))]
    total_s = max(sum(sizes) / rate + gap_s * len(sizes) for rate in rates)
    assert max(found.values()) >= total_s * (1 - 1e-9)
    # the slowest link, and one packet's way through the others
    most_s = sum(max(sizes) / rate + gap_s for rate in rates)
    assert max(found.values()) <= (total_s + most_s) * (1 + 1e-9)
    assert all(link.num_bytes == sum(sizes) for link in path)
