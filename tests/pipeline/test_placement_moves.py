"""Moves between placements: what they say happens, from near, and what the paper's table says."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from piper_kernels.dist.placement_map import PlacementMap
from piper_kernels.dist.topology_presets import dgx_h100_like
from piper_kernels.errors import PlanError
from piper_kernels.pipeline.placement_moves import (
    expert_state_bytes,
    move_cost,
    place_sets,
    placement_moves,
)


@st.composite
def placements(draw: st.DrawFn) -> PlacementMap:
    """Six experts on three ranks, some with copies."""
    order = draw(st.permutations(range(6)))
    slots = []
    for part in (order[:2], order[2:4], order[4:]):
        extra = draw(st.sets(st.integers(0, 5), max_size=2))
        slots.append((*part, *sorted(extra - set(part))))
    return PlacementMap(num_experts=6, slots=tuple(slots))


@given(before=placements(), after=placements())
def test_moves_lead_from_one_placement_to_the_other(
    before: PlacementMap, after: PlacementMap
) -> None:
    slots = []
    for old, new in zip(before.slots, after.slots, strict=True):
        slots.append([*old[: len(new)], *[-1] * (len(new) - len(old))])
    for move in placement_moves(before, after):
        # every move reads what lay there before any was made
        assert before.slots[move.source_rank][move.source_slot] == move.expert
        slots[move.target_rank][move.target_slot] = move.expert
        # nothing is sent to a rank that has the expert
        if move.expert in before.slots[move.target_rank]:
            assert move.source_rank == move.target_rank
    assert tuple(map(tuple, slots)) == after.slots


def test_moves_come_from_near_and_from_whoever_sends_least() -> None:
    slots = [(expert,) for expert in range(16)]
    slots[5], slots[12] = (5, 0), (12, 0, 1)
    before = PlacementMap(num_experts=16, slots=tuple(slots))
    slots[6], slots[7], slots[15], slots[9] = (6, 0), (7, 0), (15, 0), (9, 1)
    after = before.replace(slots=tuple(slots))
    moves = placement_moves(before, after, dgx_h100_like(2))
    found = {(move.expert, move.target_rank): move.source_rank for move in moves}
    assert found == {(0, 6): 0, (0, 7): 5, (0, 15): 12, (1, 9): 12}


def test_placement_moves_refuses_other_sizes() -> None:
    before = PlacementMap.contiguous(4, 2)
    message = "after must have the 4 experts and 2 ranks of before, got 4 experts and 4 ranks"
    with pytest.raises(PlanError, match=message):
        placement_moves(before, PlacementMap.contiguous(4, 4))


def test_place_sets_leaves_those_who_stay() -> None:
    before = PlacementMap(num_experts=6, slots=((0, 1, 2), (3, 4, 5)))
    assert place_sets(before, [{2, 3, 0}, {1, 4, 5}]).slots == ((0, 3, 2), (1, 4, 5))
    # with fewer slots, what lay beyond the end comes forward
    assert place_sets(before, [{2}, {0, 1, 3, 4, 5}]).slots == ((2,), (3, 4, 5, 0, 1))


# Table IV of the Piper paper (papers.md 1.9): one layer reassigned over 8 GPUs at 50 GB/s. Its
# units are mixed: Switch-Base and GLaM are decimal GB, the others GiB.
GB, GIB = 1e9, float(2**30)
TABLE_IV = {
    "Switch-Base": (128, 768, 2048, 1.21, 24.2, GB),
    "Mixtral 8x7B": (8, 4096, 14336, 2.63, 52.6, GIB),
    "Mixtral 8x22B": (8, 6144, 16384, 4.50, 90.0, GIB),
    "Grok-1": (8, 6144, 32768, 9.00, 180.0, GIB),
    "GLaM": (64, 8192, 32768, 102.88, 2057.6, GB),
    "DeepSeek-V2": (160, 5120, 1536, 7.04, 140.8, GIB),
    "DeepSeek-V3": (256, 7168, 2048, 21.00, 420.0, GIB),
}


@pytest.mark.parametrize("model", TABLE_IV)
def test_table_iv_of_the_paper(model: str) -> None:
    num_experts, hidden_size, intermediate_size, size, milliseconds, unit = TABLE_IV[model]
    per_rank = num_experts / 8 * expert_state_bytes(hidden_size, intermediate_size)
    assert per_rank / unit == pytest.approx(size, rel=0.0025)
    assert per_rank / (50 * unit) * 1e3 == pytest.approx(milliseconds, rel=0.0025)


def test_move_cost_is_the_busiest_port() -> None:
    topology = dgx_h100_like(2)
    before = PlacementMap.contiguous(16, 16)
    slots = list(before.slots)
    slots[0], slots[3], slots[9] = (0, 1), (3, 1), (9, 1)
    moves = placement_moves(before, before.replace(slots=tuple(slots)))
    cost = move_cost(moves, 450_000, topology)
    assert (cost.num_moves, cost.num_bytes, cost.busiest_bytes) == (3, 1_350_000, 1_350_000)
    # rank 1 sends two copies at 450 GB/s and one at 50 GB/s; 20 us of latency
    assert cost.seconds == pytest.approx(2 * 1e-6 + 9e-6 + 20e-6)
    assert move_cost([], 450_000, topology).seconds == 0.0


def test_expert_state_bytes_of_a_plain_expert() -> None:
    assert expert_state_bytes(10, 20, num_matrices=2, bytes_per_parameter=4) == 1600
    assert np.isclose(expert_state_bytes(10, 20), 48 * 200)
