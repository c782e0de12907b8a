"""Packing: as even as swaps and better, valid with copies, and no move more than needed."""

import itertools

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from piper_kernels.dist.placement_map import PlacementMap
from piper_kernels.dist.topology_presets import dgx_h100_like
from piper_kernels.errors import PlanError
from piper_kernels.pipeline.expert_costs import ExpertCosts, imbalance
from piper_kernels.pipeline.placement_moves import place_sets, placement_moves
from piper_kernels.pipeline.placement_pack import keep_homes, pack, pack_experts


@pytest.mark.parametrize("exponent", [0.6, 1.0])
def test_pack_reaches_the_bound(exponent: float) -> None:
    loads = np.random.default_rng(0).permutation(1e5 / np.arange(1, 129) ** exponent)
    costs = ExpertCosts.from_loads(loads, 8)
    after = pack_experts(PlacementMap.contiguous(128, 8), costs)
    bound = max(1.0, (loads.max() + np.sort(loads)[:15].sum()) / loads.sum() * 8)
    assert imbalance(costs.of_ranks(after)) <= 1.01 * bound


@given(
    loads=st.lists(st.integers(0, 100), min_size=4, max_size=12),
    num_ranks=st.integers(1, 4),
    seed=st.integers(0, 5),
)
def test_pack_moves_no_more_than_it_must(loads: list[int], num_ranks: int, seed: int) -> None:
    order = np.random.default_rng(seed).permutation(len(loads))
    slots = tuple(tuple(part.tolist()) for part in np.array_split(order, num_ranks))
    before = PlacementMap(num_experts=len(loads), slots=slots)
    costs = ExpertCosts.from_loads(loads, num_ranks)
    after = pack_experts(before, costs)
    num_moves = fewest = len(placement_moves(before, after))
    sizes = [len(held) for held in before.slots]
    for order_of_sets in itertools.permutations(after.slots):
        if [len(held) for held in order_of_sets] == sizes:
            fewest = min(fewest, len(placement_moves(before, place_sets(before, order_of_sets))))
    assert num_moves == fewest
    assert float(costs.of_ranks(after).max()) <= float(costs.of_ranks(before).max())


def test_pack_moves_nothing_without_gain() -> None:
    before = PlacementMap(num_experts=4, slots=((0, 3), (2, 1)))
    for loads in ([0, 0, 0, 0], [5, 5, 5, 5], [float("nan")] * 4, [9, 7, 2, 1]):
        assert pack_experts(before, ExpertCosts.from_loads(loads, 2)) == before


def test_pack_refuses_copies() -> None:
    before = PlacementMap(num_experts=2, slots=((0, 1), (0,)))
    costs = ExpertCosts.from_loads([1, 1], 2)
    with pytest.raises(PlanError, match=r"one copy of each expert, got 3. Use replicate_experts"):
        pack_experts(before, costs)


@given(data=st.data())
def test_pack_never_doubles_an_expert(data: st.DataObject) -> None:
    # field report A84; costs that are even over ranks take another path than uneven ones
    num_ranks = data.draw(st.integers(1, 5))
    num_copies = data.draw(st.lists(st.integers(1, num_ranks), min_size=1, max_size=9))
    copies = [expert for expert, count in enumerate(num_copies) for _ in range(count)]
    capacities = [len(part) for part in np.array_split(copies, num_ranks)]
    capacities = data.draw(st.permutations(capacities))
    num_columns = data.draw(st.sampled_from([1, num_ranks]))
    random = np.random.default_rng(data.draw(st.integers(0, 99)))
    share = random.integers(0, 9, (len(num_copies), num_columns)) * np.ones((1, num_ranks))
    packs = pack(copies, share, capacities)
    assert [len(held) for held in packs] == capacities
    assert sorted(expert for held in packs for expert in held) == copies
    assert all(len(set(held)) == len(held) for held in packs)


def test_pack_refuses_more_copies_than_ranks() -> None:
    with pytest.raises(PlanError, match="expert 0 must have at most one copy on each of the 2"):
        pack([0, 0, 0, 1], np.ones((2, 2)), [2, 2])


def test_keep_homes_slows_no_rank_beyond_the_slowest() -> None:
    # the traffic makes each set slower on the rank where it lies now
    topology = dgx_h100_like(2).select([0, 8])
    counts = np.array([[9, 9, 0, 0], [0, 0, 9, 9]])
    costs = ExpertCosts.from_traffic(counts, topology, seconds_per_row=1e-6, row_bytes=8192)
    before = PlacementMap(num_experts=4, slots=((2, 3), (0, 1)))
    assert keep_homes(before, [[0, 1], [2, 3]], costs.seconds) == [[0, 1], [2, 3]]
    even = ExpertCosts.from_loads([1] * 4, 2)
    assert keep_homes(before, [[0, 1], [2, 3]], even.seconds) == [[2, 3], [0, 1]]
