"""Rebalance by packing anew: longest processing time first, then the fewest moves.

Graham's LPT rule takes experts from the costliest down and gives each to the rank that is then done
first, as long as that rank has a free slot; swaps then even out what whole experts left. Which
packed set goes to which rank is chosen so that as many experts as possible stay where they are: an
assignment problem, solved exactly.

Pure: no torch, no process group. Letters: E experts, P ranks, S slots.
"""

import heapq
from collections.abc import Sequence

import numpy as np

from piper_kernels.dist.placement_map import PlacementMap
from piper_kernels.errors import PlanError, instruction, require
from piper_kernels.pipeline.expert_costs import ExpertCosts
from piper_kernels.pipeline.placement_moves import place_sets
from piper_kernels.pipeline.placement_swap import SwapLimits, swap_experts

# for each rank its experts, in the order in which they came
Packs = list[list[int]]


def pack_experts(
    before: PlacementMap, costs: ExpertCosts, *, min_gain: float = 1e-3
) -> PlacementMap:
    """Pack all experts anew, each rank with as many slots as it has.

    Args:
        before: the present placement, without copies.
        costs: of the same experts and ranks.
        min_gain: share of the mean rank's time that must be won; else ``before`` is returned.

    Raises:
        ConfigError: the costs are for other experts or ranks.
        PlanError: an expert has copies: ``replicate_experts`` packs those.

    Example:
        >>> before = PlacementMap(num_experts=4, slots=((0, 1), (2, 3)))
        >>> pack_experts(before, ExpertCosts.from_loads([9, 7, 2, 1], 2)).slots
        ((0, 3), (2, 1))
    """
    name = "pack_experts"
    costs.check(name, before)
    remedy = "Use replicate_experts."
    fits = not before.has_replicas
    require(
        fits,
        name,
        "before",
        "have one copy of each expert",
        before.num_slots,
        remedy,
        error=PlanError,
    )
    capacities = [len(experts) for experts in before.slots]
    packs = polish(pack(range(before.num_experts), costs.seconds, capacities), costs)
    after = place_sets(before, keep_homes(before, packs, costs.seconds))
    return better_of(before, after, costs, min_gain)


def better_of(
    before: PlacementMap, after: PlacementMap, costs: ExpertCosts, min_gain: float
) -> PlacementMap:
    """``after`` if its slowest rank is faster by more than ``min_gain`` of the mean rank's time."""
    seconds = costs.of_ranks(before)
    gain = float(seconds.max()) - float(costs.of_ranks(after).max())
    return after if gain > min_gain * float(seconds.mean()) else before


def pack(copies: Sequence[int], share: np.ndarray, capacities: Sequence[int]) -> Packs:
    """LPT: distribute copies of experts over ranks, never two of one expert on a rank.

    Ties go to the copy named first, and to the rank with the lower number.

    Args:
        copies: the expert of each copy; as many as there are slots.
        share: ``[E, P]`` seconds that one copy costs a rank.
        capacities: ``[P]`` slots of each rank.

    Raises:
        PlanError: an expert has more copies than there are ranks with slots.

    Example:
        >>> pack([0, 0, 1, 2], np.array([[4.0] * 2, [3.0] * 2, [1.0] * 2]), [2, 2])
        [[0, 1], [0, 2]]
    """
    order = sorted(copies, key=lambda expert: (-float(share[expert].mean()), expert))
    packs: Packs = [[] for _ in capacities]
    is_even = bool((share == share[:, :1]).all())
    place = _place_by_heap if is_even else _place_by_scan
    place(order, share, capacities, packs)
    return packs


def _place_by_heap(
    order: Sequence[int], share: np.ndarray, capacities: Sequence[int], packs: Packs
) -> None:
    """Where an expert costs every rank the same: a heap of ranks by time, then by number."""
    each = share[:, 0].tolist()
    heap = [(0.0, rank) for rank, capacity in enumerate(capacities) if capacity]
    heapq.heapify(heap)
    for expert in order:
        held = []
        while heap and expert in packs[heap[0][1]]:
            held.append(heapq.heappop(heap))
        if heap:
            seconds, rank = heapq.heappop(heap)
            packs[rank].append(expert)
            if len(packs[rank]) < capacities[rank]:
                held.append((seconds + each[expert], rank))
        else:
            _make_room(expert, capacities, packs)
            # the exchange changed times of two ranks; only those with a free slot matter
            held = [
                (sum(each[e] for e in packs[rank]), rank)
                for _, rank in held
                if len(packs[rank]) < capacities[rank]
            ]
        for entry in held:
            heapq.heappush(heap, entry)


def _place_by_scan(
    order: Sequence[int], share: np.ndarray, capacities: Sequence[int], packs: Packs
) -> None:
    """Where costs differ between ranks: look at all ranks for each copy."""
    for expert in order:
        free = [
            rank
            for rank, capacity in enumerate(capacities)
            if len(packs[rank]) < capacity and expert not in packs[rank]
        ]
        if not free:
            _make_room(expert, capacities, packs)
            continue
        done = {rank: sum(float(share[e, rank]) for e in (*packs[rank], expert)) for rank in free}
        packs[min(free, key=lambda rank: (done[rank], rank))].append(expert)


def _make_room(expert: int, capacities: Sequence[int], packs: Packs) -> None:
    """All ranks with a free slot hold the expert: another expert moves there, and this takes over.

    Raises:
        PlanError: every rank holds the expert.
    """
    free = next(rank for rank, capacity in enumerate(capacities) if len(packs[rank]) < capacity)
    for held in packs:
        movable = [other for other in held if other not in packs[free]]
        if expert not in held and movable:
            held[held.index(movable[-1])] = expert
            packs[free].append(movable[-1])
            return
    requirement = f"have at most one copy on each of the {len(packs)} ranks"
    sentence = instruction("pack", f"expert {expert}", requirement, "more", "Use fewer replicas.")
    raise PlanError(sentence)


def polish(packs: Packs, costs: ExpertCosts) -> Packs:
    """Make the slowest rank faster by a few swaps between packs."""
    packed = PlacementMap(num_experts=costs.num_experts, slots=tuple(map(tuple, packs)))
    after, _ = swap_experts(packed, costs, SwapLimits(most_swaps=4 * len(packs)))
    return [list(experts) for experts in after.slots]


def keep_homes(before: PlacementMap, packs: Packs, share: np.ndarray) -> Packs:
    """Deal the packs out to ranks: most experts stay, none gets slower than the slowest was.

    Args:
        before: the present placement.
        packs: one for each rank.
        share: ``[E, P]`` seconds that one copy costs a rank.

    Returns:
        The same packs in another order.

    Example:
        >>> before = PlacementMap(num_experts=4, slots=((0, 1), (2, 3)))
        >>> keep_homes(before, [[2, 3], [0, 1]], np.ones((4, 2)))
        [[0, 1], [2, 3]]
    """
    # loading scipy takes longer than planning does, so it waits until it is needed
    from scipy.optimize import linear_sum_assignment

    num_ranks, num_experts = before.num_ranks, before.num_experts
    wanted = np.zeros((num_ranks, num_experts))
    held = np.zeros((num_ranks, num_experts))
    for rank in range(num_ranks):
        wanted[rank, packs[rank]] = 1
        held[rank, list(before.slots[rank])] = 1
    num_stay = wanted @ held.T
    seconds = wanted @ share
    worst = float(seconds.diagonal().max())
    sizes = np.array([len(experts) for experts in packs])
    may = (seconds <= worst * (1 + 1e-12)) & (sizes[:, None] == sizes[None, :])
    # one forbidden pair outweighs all that could stay
    value = np.where(may, num_stay, -float(num_experts * num_ranks))
    _, rank_of_pack = linear_sum_assignment(value, maximize=True)
    ordered: Packs = [[] for _ in packs]
    for index, rank in enumerate(rank_of_pack.tolist()):
        ordered[rank] = packs[index]
    return ordered
