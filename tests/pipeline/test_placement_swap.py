"""Swaps reach what swaps can reach, and no more are made than needed."""

from collections.abc import Iterator

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from piper_kernels.dist.placement_map import PlacementMap
from piper_kernels.dist.topology_presets import dgx_h100_like
from piper_kernels.errors import ConfigError
from piper_kernels.pipeline.expert_costs import ExpertCosts, imbalance
from piper_kernels.pipeline.placement_swap import Swap, SwapLimits, swap_experts

Slots = tuple[tuple[int, ...], ...]


def zipf_loads(num_experts: int, exponent: float, seed: int) -> np.ndarray:
    """Loads whose n-th largest is n ** -exponent, in random order."""
    loads = 1e5 / np.arange(1, num_experts + 1) ** exponent
    return np.random.default_rng(seed).permutation(loads)


def swap_bound(loads: np.ndarray, num_ranks: int) -> float:
    """The least max/mean with E / P slots each: the hottest expert beside the lightest ones."""
    lightest = np.sort(loads)[: len(loads) // num_ranks - 1].sum()
    return max(1.0, float((loads.max() + lightest) / loads.sum() * num_ranks))


def replay(before: PlacementMap, swaps: tuple[Swap, ...]) -> PlacementMap:
    """Carry the swaps out one by one; each expert must be where its swap says."""
    slots = [list(experts) for experts in before.slots]
    for swap in swaps:
        a = slots[swap.rank_a].index(swap.expert_a)
        b = slots[swap.rank_b].index(swap.expert_b)
        slots[swap.rank_a][a], slots[swap.rank_b][b] = swap.expert_b, swap.expert_a
    return before.replace(slots=tuple(map(tuple, slots)))


@pytest.mark.parametrize("seed", range(5))
@pytest.mark.parametrize(
    ("num_experts", "exponent"), [(128, 0.6), (128, 1.0), (64, 1.0), (16, 1.0)]
)
def test_swaps_reach_their_bound(num_experts: int, exponent: float, seed: int) -> None:
    loads = zipf_loads(num_experts, exponent, seed)
    costs = ExpertCosts.from_loads(loads, 8)
    before = PlacementMap.contiguous(num_experts, 8)
    after, swaps = swap_experts(before, costs)
    assert imbalance(costs.of_ranks(after)) <= 1.01 * swap_bound(loads, 8)
    assert [len(held) for held in after.slots] == [len(held) for held in before.slots]
    assert replay(before, swaps) == after


def neighbours(slots: Slots) -> Iterator[Slots]:
    """Every placement that is one swap away."""
    for p in range(len(slots)):
        for q in range(p + 1, len(slots)):
            for i in range(len(slots[p])):
                for j in range(len(slots[q])):
                    new = [list(held) for held in slots]
                    new[p][i], new[q][j] = new[q][j], new[p][i]
                    yield tuple(map(tuple, new))


def fewest_by_brute_force(before: PlacementMap, costs: ExpertCosts) -> tuple[float, int]:
    """Least slowest rank over all placements, and after how many swaps it is first reached."""
    seen = {tuple(map(frozenset, before.slots))}
    layer: list[Slots] = [before.slots]
    depth, best = 0, (float(costs.of_ranks(before).max()), 0)
    while layer:
        depth, following = depth + 1, []
        for neighbour in (new for slots in layer for new in neighbours(slots)):
            key = tuple(map(frozenset, neighbour))
            if key in seen:
                continue
            seen.add(key)
            following.append(neighbour)
            slowest = float(costs.of_ranks(before.replace(slots=neighbour)).max())
            if slowest < best[0] * (1 - 1e-12):
                best = (slowest, depth)
        layer = following
    return best


@pytest.mark.parametrize(("num_experts", "num_ranks"), [(4, 2), (6, 3), (6, 2), (5, 2), (8, 2)])
@pytest.mark.parametrize("seed", range(4))
def test_swaps_are_as_few_as_brute_force_needs(num_experts: int, num_ranks: int, seed: int) -> None:
    loads = np.random.default_rng(seed).integers(0, 40, num_experts)
    costs = ExpertCosts.from_loads(loads, num_ranks)
    before = PlacementMap.contiguous(num_experts, num_ranks)
    after, swaps = swap_experts(before, costs, SwapLimits(min_gain=0.0))
    slowest, num_swaps = fewest_by_brute_force(before, costs)
    assert float(costs.of_ranks(after).max()) == pytest.approx(slowest)
    assert len(swaps) == num_swaps
    assert replay(before, swaps) == after


@given(
    loads=st.lists(st.integers(0, 1000), min_size=2, max_size=24),
    num_ranks=st.integers(1, 6),
    is_one_round=st.booleans(),
    is_paper_rule=st.booleans(),
    most_swaps=st.none() | st.integers(0, 3),
)
def test_swaps_never_hurt(loads, num_ranks, is_one_round, is_paper_rule, most_swaps) -> None:
    num_ranks = min(num_ranks, len(loads))
    costs = ExpertCosts.from_loads(loads, num_ranks)
    before = PlacementMap.contiguous(len(loads), num_ranks)
    limits = SwapLimits(
        most_swaps=most_swaps, is_one_round=is_one_round, is_paper_rule=is_paper_rule
    )
    after, swaps = swap_experts(before, costs, limits)
    slowest = [float(costs.of_ranks(placement).max()) for placement in (before, after)]
    assert slowest[1] <= slowest[0] * (1 + 1e-12)
    assert swap_experts(before, costs, limits) == (after, swaps)
    assert replay(before, swaps) == after
    assert most_swaps is None or len(swaps) <= most_swaps
    if is_one_round:
        pairs = [frozenset((swap.rank_a, swap.rank_b)) for swap in swaps]
        experts = [expert for swap in swaps for expert in (swap.expert_a, swap.expert_b)]
        assert len(set(pairs)) == len(pairs)
        assert len(set(experts)) == len(experts)


@pytest.mark.parametrize("loads", [[0] * 12, [5] * 12, [float("nan")] * 12])
def test_even_loads_swap_nothing(loads: list[float]) -> None:
    before = PlacementMap.contiguous(12, 4)
    assert swap_experts(before, ExpertCosts.from_loads(loads, 4)) == (before, ())


def test_paper_rule_stalls_where_the_default_goes_on() -> None:
    # papers.md 1.9: E = 64, Zipf 1.0: the rule of the slowest and fastest rank stalls above 1.88
    loads = zipf_loads(64, 1.0, 0)
    costs, before = ExpertCosts.from_loads(loads, 8), PlacementMap.contiguous(64, 8)
    paper, _ = swap_experts(before, costs, SwapLimits(is_paper_rule=True))
    default, _ = swap_experts(before, costs)
    reached = [imbalance(costs.of_ranks(placement)) for placement in (paper, default)]
    assert reached[0] > 1.01 * swap_bound(loads, 8) > reached[1]


def test_swaps_follow_the_traffic() -> None:
    # even loads, but each expert's rows all come from the other node: swapping saves the wire
    topology = dgx_h100_like(2).select([0, 8])
    counts = np.array([[0, 0, 9, 9], [9, 9, 0, 0]])
    costs = ExpertCosts.from_traffic(counts, topology, seconds_per_row=1e-6, row_bytes=8192)
    after, swaps = swap_experts(PlacementMap.contiguous(4, 2), costs)
    assert len(swaps) == 2
    assert [set(held) for held in after.slots] == [{2, 3}, {0, 1}]


def test_swaps_never_put_two_copies_on_a_rank() -> None:
    before = PlacementMap(num_experts=5, slots=((0, 1, 2), (0, 3, 4)))
    after, swaps = swap_experts(before, ExpertCosts.from_loads([2, 50, 40, 1, 1], 2))
    assert swaps
    assert all(0 in held for held in after.slots)


def test_swap_limits_refuse() -> None:
    with pytest.raises(ConfigError, match=r"min_gain must lie in 0 .. 1, got 1.5"):
        SwapLimits(min_gain=1.5)
    with pytest.raises(ConfigError, match="most_swaps must be at least 0, or None, got -1"):
        SwapLimits(most_swaps=-1)
    costs = ExpertCosts.from_loads([1, 2, 3], 3)
    with pytest.raises(ConfigError, match="swap_experts: costs must be for the placement's 4"):
        swap_experts(PlacementMap.contiguous(4, 2), costs)
