"""Rebalance by swaps: two ranks exchange an expert each, so every rank keeps its number of slots.

Hill climbing as in the Piper paper (section 7): the slowest rank gives one of its experts for a
cheaper one of the fastest rank, whichever pair helps most, until none does. That stalls where the
fastest rank has nothing that fits though another rank has; the default looks at all of them. Where
an expert-parallel group is so small that all its placements can be listed, the best one with the
fewest swaps is found instead (``placement_exact``).

No swaps can make the slowest rank faster than the hottest expert together with the cheapest ones
that fill its rank: for more, see ``placement_replicate``.

Pure: no torch, no process group. Letters: E experts, P ranks, S slots.
"""

from dataclasses import dataclass

import numpy as np

from piper_kernels.dist.links import FloatArray
from piper_kernels.dist.placement_map import PlacementMap
from piper_kernels.dist.topology import IntArray
from piper_kernels.errors import require
from piper_kernels.pipeline.expert_costs import ExpertCosts
from piper_kernels.pipeline.placement_exact import fewest_swaps, is_small


@dataclass(frozen=True, slots=True, order=True)
class Swap:
    """``expert_a`` leaves ``rank_a`` for ``rank_b``, and ``expert_b`` comes in its place."""

    rank_a: int
    expert_a: int
    rank_b: int
    expert_b: int


@dataclass(frozen=True, kw_only=True, slots=True)
class SwapLimits:
    """What swaps are worth making, and how many fit into one migration.

    Attributes:
        most_swaps: stop after so many; ``None`` is no limit.
        min_gain: a swap must make the slower of its two ranks faster by more than this share of the
            mean rank's time.
        is_one_round: each pair of ranks swaps once at most and no expert twice, so that one round
            of messages, one each way between two ranks, carries the migration.
        is_paper_rule: only the slowest and the fastest rank swap.
    """

    most_swaps: int | None = None
    min_gain: float = 1e-3
    is_one_round: bool = False
    is_paper_rule: bool = False

    def __post_init__(self) -> None:
        name = "SwapLimits"
        fits = self.most_swaps is None or self.most_swaps >= 0
        require(fits, name, "most_swaps", "be at least 0, or None", self.most_swaps)
        require(0 <= self.min_gain < 1, name, "min_gain", "lie in 0 .. 1", self.min_gain)

    @property
    def are_default_rules(self) -> bool:
        """Whether any swaps may be made in any number."""
        return self.most_swaps is None and not (self.is_one_round or self.is_paper_rule)


ANY_SWAPS = SwapLimits()


def swap_experts(
    before: PlacementMap, costs: ExpertCosts, limits: SwapLimits = ANY_SWAPS
) -> tuple[PlacementMap, tuple[Swap, ...]]:
    """Make the slowest rank faster by swaps; deterministic, ties go to the lower rank and slot.

    Args:
        before: the present placement; copies of an expert stay on different ranks.
        costs: of the same experts and ranks.
        limits: which swaps may be made.

    Returns:
        The new placement, and the swaps that lead to it in order.

    Raises:
        ConfigError: the costs are for other experts or ranks.

    Example:
        >>> before = PlacementMap(num_experts=4, slots=((0, 1), (2, 3)))
        >>> costs = ExpertCosts.from_loads([9, 7, 2, 1], 2)
        >>> after, swaps = swap_experts(before, costs)
        >>> after.slots, swaps
        (((2, 1), (0, 3)), (Swap(rank_a=0, expert_a=0, rank_b=1, expert_b=2),))
    """
    costs.check("swap_experts", before)
    if limits.are_default_rules and is_small(before):
        pairs = fewest_swaps(before, costs, limits.min_gain)
        climber = _Climber(before, costs)
        swaps = tuple(climber.swap(a, b) for a, b in pairs)
        return climber.placement(), swaps
    return _climb(_Climber(before, costs), limits)


class _Climber:
    """Slots, their ranks, and the seconds of each rank while swaps are made."""

    def __init__(self, before: PlacementMap, costs: ExpertCosts) -> None:
        maps = before.maps
        self.before = before
        self.experts: IntArray = maps.physical_to_logical.copy()
        self.ranks = maps.physical_to_rank
        self.share: FloatArray = costs.seconds / maps.num_copies[:, None]
        self.seconds = costs.of_ranks(before)
        self.holds = np.zeros(costs.seconds.shape, dtype=bool)
        self.holds[self.experts, self.ranks] = True
        self.is_used_pair = np.zeros((costs.num_ranks, costs.num_ranks), dtype=bool)
        self.has_moved = np.zeros(len(self.experts), dtype=bool)

    def swap(self, a: int, b: int) -> Swap:
        """Exchange the experts in slots ``a`` and ``b``."""
        experts, ranks = self.experts[[a, b]], self.ranks[[a, b]]
        self.seconds[ranks] += self.share[experts[::-1], ranks] - self.share[experts, ranks]
        self.holds[experts, ranks], self.holds[experts[::-1], ranks] = False, True
        self.experts[[a, b]] = experts[::-1]
        self.is_used_pair[ranks, ranks[::-1]] = True
        self.has_moved[[a, b]] = True
        return Swap(int(ranks[0]), int(experts[0]), int(ranks[1]), int(experts[1]))

    def slower_after(self, mine: IntArray, others: IntArray) -> FloatArray:
        """``[mine, others]`` seconds of the slower rank after each swap; inf where forbidden."""
        a, b = self.experts[mine], self.experts[others]
        rank, other_ranks = self.ranks[mine[0]], self.ranks[others]
        on_rank = self.seconds[rank] - self.share[a, rank][:, None] + self.share[b, rank]
        leaves = self.seconds[other_ranks] - self.share[b, other_ranks]
        on_others = leaves + self.share[a][:, other_ranks]
        is_twice = self.holds[b, rank] | self.holds[a][:, other_ranks]
        return np.where(is_twice, np.inf, np.maximum(on_rank, on_others))

    def placement(self) -> PlacementMap:
        """The placement as it stands."""
        ends = self.before.maps.physical_offsets[1:-1]
        slots = tuple(tuple(part.tolist()) for part in np.split(self.experts, ends))
        return self.before.replace(slots=slots)


def _climb(climber: _Climber, limits: SwapLimits) -> tuple[PlacementMap, tuple[Swap, ...]]:
    """Best swap of the slowest rank, again and again."""
    swaps: list[Swap] = []
    least_gain = limits.min_gain * float(climber.seconds.mean())
    while limits.most_swaps is None or len(swaps) < limits.most_swaps:
        slowest = int(climber.seconds.argmax())
        mine = np.flatnonzero(climber.ranks == slowest)
        others = np.flatnonzero(_partners(climber, slowest, limits))
        if not len(mine) or not len(others):
            break
        slower = climber.slower_after(mine, others)
        if limits.is_one_round:
            slower[climber.has_moved[mine]] = np.inf
        best = int(slower.argmin())
        gain = float(climber.seconds[slowest]) - float(slower.flat[best])
        if not gain > least_gain:
            break
        a, b = np.unravel_index(best, slower.shape)
        swaps.append(climber.swap(int(mine[a]), int(others[b])))
    return climber.placement(), tuple(swaps)


def _partners(climber: _Climber, slowest: int, limits: SwapLimits) -> np.ndarray:
    """``[S]`` which slots the slowest rank may swap with."""
    may = climber.ranks != slowest
    if limits.is_paper_rule:
        may &= climber.ranks == int(climber.seconds.argmin())
    if limits.is_one_round:
        may &= ~climber.has_moved & ~climber.is_used_pair[slowest, climber.ranks]
    return may
