"""Cutting a reduction: every element once, no chunk too large."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from piper_kernels.dist.links import Link
from piper_kernels.dist.reduction_chunks import chunk_bytes_for, cut_into_chunks
from piper_kernels.errors import ConfigError


@given(
    sizes=st.lists(st.integers(0, 40), max_size=6),
    element_bytes=st.sampled_from([2, 4, 8]),
    chunk_bytes=st.integers(1, 100),
)
def test_cut_into_chunks_covers_each_element_once(sizes, element_bytes, chunk_bytes) -> None:
    chunks = cut_into_chunks(sizes, element_bytes, chunk_bytes)
    seen = [(p.index, i) for chunk in chunks for p in chunk for i in range(p.start, p.end)]
    assert seen == [(index, i) for index, size in enumerate(sizes) for i in range(size)]
    most = max(chunk_bytes // element_bytes, 1)
    filled = [sum(piece.num_elements for piece in chunk) for chunk in chunks]
    assert all(size == most for size in filled[:-1])
    assert all(0 < size <= most for size in filled[-1:])


def test_cut_into_chunks_refuses() -> None:
    with pytest.raises(ConfigError, match="chunk_bytes must be at least 1, got 0"):
        cut_into_chunks([4], 4, 0)


@pytest.mark.parametrize("num_ranks", [2, 3, 8])
def test_chunk_bytes_for_is_the_largest_that_fits(num_ranks: int) -> None:
    link = Link(
        latency_s=1e-5,
        bandwidth_bytes_per_s=1e9,
        message_gap_s=2e-6,
        efficiency=((1e3, 0.3), (1e6, 1.0)),
    )

    def busy_s(size: int) -> float:
        return 2 * (num_ranks - 1) * float(link.busy_s(size / num_ranks))

    size = chunk_bytes_for(link, num_ranks, 1e-3)
    assert busy_s(size) <= 1e-3 < busy_s(size + 16)


def test_chunk_bytes_for_refuses_and_ends_at_one_byte() -> None:
    slow = Link(latency_s=0.0, bandwidth_bytes_per_s=1.0, message_gap_s=1.0)
    assert chunk_bytes_for(slow, 2, 1e-3) == 1
    with pytest.raises(ConfigError, match="num_ranks must be at least 2, got 1"):
        chunk_bytes_for(slow, 1, 1e-3)
    with pytest.raises(ConfigError, match="most_wait_s must be positive, got 0"):
        chunk_bytes_for(slow, 2, 0)
