from itertools import pairwise

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from piper_kernels.errors import DataError
from piper_kernels.train.sampler import WindowSampler

SEGMENTS = [np.arange(50, dtype=np.int32), np.arange(100, 118, dtype=np.int32)]


@given(first=st.integers(0, 60), cuts=st.lists(st.integers(1, 5), min_size=1, max_size=6))
def test_window_sampler_depends_on_numbers_not_on_batches(first: int, cuts: list[int]) -> None:
    whole = WindowSampler(SEGMENTS, sequence_length=7, seed=3).windows(first, sum(cuts))
    fresh = WindowSampler(SEGMENTS, sequence_length=7, seed=3)
    parts, position = [], first
    for count in cuts:
        parts.append(fresh.windows(position, count))
        position += count
    assert torch.equal(torch.cat(parts), whole)
    assert whole.dtype == torch.int64


def test_window_sampler_shows_each_window_once_per_epoch() -> None:
    sampler = WindowSampler(SEGMENTS, sequence_length=7, seed=0)
    # 7 windows fit in 50 tokens, 2 in 18; one less each, so that epochs start anywhere
    assert sampler.windows_per_epoch == 7
    firsts = set()
    for epoch in range(20):
        windows = sampler.windows(epoch * 7, 7)
        # consecutive tokens of one segment, and no overlap but a shared end
        assert torch.equal(windows.diff(), torch.ones(7, 7, dtype=torch.int64))
        starts = sorted(windows[:, 0].tolist())
        assert all(late - early >= 7 for early, late in pairwise(starts))
        firsts.add(tuple(windows[:, 0].tolist()))
    assert len(firsts) == 20
    starts = {start % 7 for order in firsts for start in order if start < 50}
    assert starts == set(range(7))


def test_window_sampler_depends_on_the_seed() -> None:
    one, other = (WindowSampler(SEGMENTS, sequence_length=7, seed=s).windows(0, 7) for s in (0, 1))
    assert not torch.equal(one, other)


def test_window_sampler_leaves_short_segments_out() -> None:
    short = np.arange(200, 207, dtype=np.int32)
    sampler = WindowSampler([short, SEGMENTS[1]], sequence_length=7, seed=0)
    assert sampler.windows(0, 30).max() < 200
    message = "segments must hold one of more than 7 tokens, got at most 7. Give more text"
    with pytest.raises(DataError, match=message):
        WindowSampler([short], sequence_length=7, seed=0)
