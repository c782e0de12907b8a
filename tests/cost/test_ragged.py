"""Raggedness as data equals what the kernels build: schedules, bounds, the order of programs."""

import itertools

import pytest
import torch
import triton
import triton.language as tl

from piper_kernels.cost.ragged import RaggedRows, max_chunks, max_tiles, program_order
from piper_kernels.permutation import Permutation
from piper_kernels.testing import ROUTING_KINDS, RoutingKind, make_routing
from piper_kernels.triton.ragged import deal_to_xcds, grouped_order
from piper_kernels.triton.tile_schedule import tile_schedule_torch


@pytest.mark.parametrize("kind", ROUTING_KINDS)
def test_ragged_rows_agree_with_the_permutation(kind: RoutingKind) -> None:
    ids, _ = make_routing(kind, 23, 5, 3)
    rows = RaggedRows.from_expert_ids(ids.numpy(), 5)
    permutation = Permutation.from_expert_ids(ids, 5)
    num_valid = int(permutation.expert_offsets[-1])
    assert rows.num_valid == num_valid
    assert rows.expert_counts.tolist() == permutation.expert_counts.tolist()
    assert rows.expert_offsets.tolist() == permutation.expert_offsets.tolist()
    assert rows.row_to_token.tolist() == permutation.row_to_token[:num_valid].tolist()
    assert rows.num_hit_tokens == int((ids < 5).any(1).sum())
    for block in (1, 4, 16):
        schedule = tile_schedule_torch(permutation.expert_offsets, block)
        experts, firsts, ends = rows.tiles(block)
        assert [experts.tolist(), firsts.tolist()] == schedule.T.tolist()
        assert int((ends - firsts).sum()) == num_valid
        assert rows.num_tiles(block) == len(schedule) <= rows.schedule_length(block)


def test_max_tiles_and_max_chunks_are_reached() -> None:
    for num_rows, num_experts, block in itertools.product((0, 1, 5, 9), (1, 3, 4), (2, 4)):
        splits = [
            counts
            for counts in itertools.product(range(num_rows + 1), repeat=num_experts)
            if sum(counts) == num_rows
        ]
        most_tiles = max(sum(-(-c // block) for c in counts) for counts in splits)
        assert max_tiles(num_rows, num_experts, block) == most_tiles
        most_chunks = max(sum(-(-c // block) for c in counts if c > block) for counts in splits)
        assert max_chunks(num_rows, block) >= most_chunks


@triton.jit
def _order_kernel(
    out_ptr, num_row_tiles, num_col_tiles, GROUP_M: tl.constexpr, NUM_XCDS: tl.constexpr
):
    """Program p stores its row and column tile."""
    pid = deal_to_xcds(tl.program_id(0), tl.num_programs(0), NUM_XCDS)
    row_tile, col_tile = grouped_order(pid, num_row_tiles, num_col_tiles, GROUP_M)
    tl.store(out_ptr + 2 * tl.program_id(0), row_tile)
    tl.store(out_ptr + 2 * tl.program_id(0) + 1, col_tile)


@pytest.mark.parametrize(("group_m", "num_xcds"), [(1, 1), (2, 1), (4, 3)])
def test_program_order_is_the_kernels(group_m: int, num_xcds: int) -> None:
    found = torch.zeros(35, 2, dtype=torch.int32)
    _order_kernel[(35,)](found, 7, 5, GROUP_M=group_m, NUM_XCDS=num_xcds)
    expected = program_order(7, 5, group_m=group_m, num_xcds=num_xcds)
    assert found.T.tolist() == [tiles.tolist() for tiles in expected]
    assert len({tuple(pair) for pair in found.tolist()}) == 35
