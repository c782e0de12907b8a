"""Tile and chunk schedules equal their plain torch twins and stay inside their bounds."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from piper_kernels.triton.tile_schedule import (
    chunk_schedule,
    max_chunks,
    max_tiles,
    tile_schedule_torch,
    tile_schedules,
)
from piper_kernels.triton.tiles import BLOCK_ROWS

COUNTS = [
    [0],
    [5],
    [0, 0, 7],
    [3, 0, 17],
    [1, 1, 1, 1],
    [256, 257, 255, 0],
    [0, 4000],
    [1] * 7 + [290] + [0] * 60,
]


def offsets_of(counts: list[int]) -> torch.Tensor:
    return torch.tensor([0, *counts]).cumsum(0).to(torch.int32)


def assert_padded(entries: torch.Tensor, expected: torch.Tensor) -> None:
    assert torch.equal(entries[: len(expected)], expected)
    assert (entries[len(expected) :] == -1).all()


@pytest.mark.parametrize("counts", COUNTS, ids=str)
@pytest.mark.parametrize("num_sentinel_rows", [0, 21])
def test_tile_schedules_equal_twin(counts: list[int], num_sentinel_rows: int) -> None:
    offsets = offsets_of(counts)
    schedules = tile_schedules(offsets, sum(counts) + num_sentinel_rows)
    for block in BLOCK_ROWS:
        entries = schedules.of(block)
        expected = tile_schedule_torch(offsets, block)
        assert_padded(entries, expected)
        per_expert = torch.bincount(expected[:, 0].long(), minlength=len(counts))
        assert torch.equal(schedules.offsets_of(block).diff(), per_expert.to(torch.int32))
        assert int(schedules.offsets_of(block)[0]) == 0


def test_tile_schedules_example() -> None:
    entries = tile_schedules(offsets_of([3, 0, 17]), 20).of(16)
    assert entries.tolist() == [[0, 0], [2, 3], [2, 19], [-1, -1]]


@pytest.mark.parametrize("counts", COUNTS, ids=str)
@pytest.mark.parametrize("chunk_rows", [16, 100])
def test_chunk_schedule_equals_twin(counts: list[int], chunk_rows: int) -> None:
    offsets = offsets_of(counts)
    entries, chunk_offsets = chunk_schedule(offsets, sum(counts), chunk_rows)
    expected = tile_schedule_torch(offsets, chunk_rows, min_rows=chunk_rows)
    assert_padded(entries, expected)
    per_expert = torch.bincount(expected[:, 0].long(), minlength=len(counts))
    assert torch.equal(chunk_offsets.diff(), per_expert.to(torch.int32))


@given(counts=st.lists(st.integers(0, 300), min_size=1, max_size=40), block=st.integers(1, 90))
def test_bounds_hold_for_any_counts(counts: list[int], block: int) -> None:
    num_rows = sum(counts)
    assert sum(-(-count // block) for count in counts) <= max_tiles(num_rows, len(counts), block)
    num_chunks = sum(-(-count // block) for count in counts if count > block)
    assert num_chunks <= max_chunks(num_rows, block)


def test_bounds_are_reached() -> None:
    assert max_tiles(4 + 17, 5, 16) == 4 + 2  # four single rows and one expert of 17
    assert max_chunks(34, 16) == 4  # two experts of 17
