"""Replicas: balance beyond swaps, EPLB's example, and valid placements whatever the loads."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from piper_kernels.dist.placement_map import PlacementMap
from piper_kernels.errors import ConfigError, PlanError
from piper_kernels.pipeline.expert_costs import ExpertCosts, imbalance
from piper_kernels.pipeline.placement_replicate import (
    copies_by_load,
    replicate_by_node,
    replicate_experts,
    slots_within,
)


@pytest.mark.parametrize("seed", range(5))
@pytest.mark.parametrize(
    ("num_experts", "exponent", "bound"), [(128, 0.6, 1.02), (128, 1.0, 1.02), (16, 1.0, 1.05)]
)
def test_one_replica_slot_per_rank_evens_out(num_experts, exponent, bound, seed) -> None:
    loads = 1e5 / np.arange(1, num_experts + 1) ** exponent
    costs = ExpertCosts.from_loads(np.random.default_rng(seed).permutation(loads), 8)
    before = PlacementMap.contiguous(num_experts, 8)
    after = replicate_experts(before, costs, [num_experts // 8 + 1] * 8)
    assert imbalance(costs.of_ranks(after)) <= bound
    assert after.num_slots == num_experts + 8


# the README of deepseek-ai/EPLB: two layers, 12 experts, 16 slots, 4 groups, 2 nodes, 8 ranks
EPLB_LOADS = [
    [90, 132, 40, 61, 104, 165, 39, 4, 73, 56, 183, 86],
    [20, 107, 104, 64, 19, 197, 187, 157, 172, 86, 16, 27],
]
EPLB_SLOTS = [
    [5, 6, 5, 7, 8, 4, 3, 4, 10, 9, 10, 2, 0, 1, 11, 1],
    [7, 10, 6, 8, 6, 11, 8, 9, 2, 4, 5, 1, 5, 0, 3, 1],
]


@pytest.mark.parametrize(("loads", "slots"), list(zip(EPLB_LOADS, EPLB_SLOTS, strict=True)))
def test_replicate_by_node_is_the_published_example(loads, slots) -> None:
    placement = replicate_by_node(loads, num_groups=4, num_nodes=2, num_ranks=8, num_slots=16)
    assert [expert for held in placement.slots for expert in held] == slots


HOT = [10.0 if expert == 7 else 1.0 for expert in range(256)]
UNKNOWN = [float("nan") if expert == 7 else 1.0 for expert in range(256)]


@pytest.mark.parametrize("loads", [HOT, [0.0] * 256, UNKNOWN], ids=["hot", "zero", "nan"])
def test_replicas_are_valid_whatever_the_loads(loads: list[float]) -> None:
    # field report A84
    before = PlacementMap.contiguous(256, 32)
    after = replicate_experts(before, ExpertCosts.from_loads(loads, 32), [9] * 32)
    assert after.num_slots == 256 + 32
    assert all(len(set(held)) == len(held) for held in after.slots)
    assert {expert for held in after.slots for expert in held} == set(range(256))


@given(
    loads=st.lists(st.integers(0, 50), min_size=1, max_size=10),
    num_ranks=st.integers(1, 5),
    data=st.data(),
)
def test_replicate_experts_fills_every_slot(loads, num_ranks: int, data: st.DataObject) -> None:
    num_experts = len(loads)
    num_ranks = min(num_ranks, num_experts)
    sizes = st.integers(0, num_experts)
    slots = data.draw(st.lists(sizes, min_size=num_ranks, max_size=num_ranks))
    before = PlacementMap.contiguous(num_experts, num_ranks)
    costs = ExpertCosts.from_loads(loads, num_ranks)
    if sum(slots) < num_experts:
        with pytest.raises(PlanError, match="num_slots must lie in"):
            replicate_experts(before, costs, slots)
        return
    after = replicate_experts(before, costs, slots)
    assert [len(held) for held in after.slots] == slots


def test_replicas_stay_where_they_are_without_gain() -> None:
    before = PlacementMap(num_experts=4, slots=((0, 3), (1, 2), (0, 1)))
    even = ExpertCosts.from_loads([4, 4, 2, 2], 3)
    assert replicate_experts(before, even, [2, 2, 2]) == before


def test_copies_by_load_matches_a_plain_search() -> None:
    loads, counts = [8.0, 3.0, 3.0, 0.0], [1, 1, 1, 1]
    for _ in range(5):
        load_of_copy = [load / n if n < 4 else -1 for load, n in zip(loads, counts, strict=True)]
        counts[load_of_copy.index(max(load_of_copy))] += 1
    copies = copies_by_load(loads, 9, 4)
    assert np.bincount(copies).tolist() == counts
    assert copies[:4] == [0, 1, 2, 3]


def test_replicate_refuses() -> None:
    before = PlacementMap.contiguous(4, 2)
    costs = ExpertCosts.from_loads([1] * 4, 2)
    with pytest.raises(ConfigError, match=r"slots of each of the 2 ranks, each in 0 .. E, got"):
        replicate_experts(before, costs, [2])
    with pytest.raises(PlanError, match=r"num_slots must lie in 4 .. 8, E .. E \* ranks, got 3"):
        replicate_experts(before, costs, [2, 1])
    with pytest.raises(PlanError, match="num_nodes must divide num_groups = 2, got 3"):
        replicate_by_node([1.0] * 4, num_groups=2, num_nodes=3, num_ranks=3, num_slots=6)


def test_slots_within_a_budget() -> None:
    assert slots_within(10_000, 3_000) == 3
    with pytest.raises(ConfigError, match="bytes_per_expert must be positive, got 0"):
        slots_within(1, 0)
    with pytest.raises(ConfigError, match="budget_bytes must be at least 0, got -1"):
        slots_within(-1, 5)
