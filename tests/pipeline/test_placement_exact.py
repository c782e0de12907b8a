"""Which groups are small enough to be listed; what is found there is in test_placement_swap.py."""

import pytest

from piper_kernels.dist.placement_map import PlacementMap
from piper_kernels.pipeline.expert_costs import ExpertCosts
from piper_kernels.pipeline.placement_exact import fewest_swaps, is_small


@pytest.mark.parametrize(
    ("num_experts", "num_ranks", "small"),
    [(8, 2, True), (8, 4, True), (8, 5, True), (8, 8, False), (10, 2, True), (16, 2, False)],
)
def test_is_small_counts_placements(num_experts: int, num_ranks: int, small: bool) -> None:
    assert is_small(PlacementMap.contiguous(num_experts, num_ranks)) == small


def test_replicas_are_not_listed() -> None:
    assert not is_small(PlacementMap(num_experts=2, slots=((0, 1), (0,))))


def test_fewest_swaps_asks_for_a_gain() -> None:
    before = PlacementMap(num_experts=4, slots=((0, 1), (2, 3)))
    # 20 | 19 is as even as it gets; then 22 | 17 of 39, which one swap evens out
    assert fewest_swaps(before, ExpertCosts.from_loads([10, 10, 10, 9], 2), 0.0) == []
    costs = ExpertCosts.from_loads([12, 10, 9, 8], 2)
    assert len(fewest_swaps(before, costs, 0.0)) == 1
    assert fewest_swaps(before, costs, 0.2) == []
