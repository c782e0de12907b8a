"""Replicas: a hot expert on several ranks, so that no rank has to carry it alone.

Every spare slot goes to the expert whose copies are busiest at that moment; the copies are then
packed. The hierarchical form packs groups of experts onto nodes first, so that a token whose groups
are chosen together finds them on one node (DeepSeek's EPLB, whose published example is a test).

Pure: no torch, no process group. Letters: E experts, P ranks, S slots.
"""

import heapq
from collections.abc import Sequence

import numpy as np

from piper_kernels.dist.placement_map import PlacementMap
from piper_kernels.errors import PlanError, require
from piper_kernels.pipeline.expert_costs import ExpertCosts
from piper_kernels.pipeline.placement_moves import place_sets
from piper_kernels.pipeline.placement_pack import better_of, keep_homes, pack, polish


def slots_within(budget_bytes: int, bytes_per_expert: int) -> int:
    """How many experts fit a rank's memory budget.

    Raises:
        ConfigError: the expert has no bytes, or the budget is negative.

    Example:
        >>> slots_within(1000, 300)
        3
    """
    name = "slots_within"
    require(bytes_per_expert > 0, name, "bytes_per_expert", "be positive", bytes_per_expert)
    require(budget_bytes >= 0, name, "budget_bytes", "be at least 0", budget_bytes)
    return budget_bytes // bytes_per_expert


def copies_by_load(loads: Sequence[float], num_slots: int, most_copies: int) -> list[int]:
    """Which expert each slot is for: every expert once, then each spare one for the busiest copy's.

    Args:
        loads: ``[E]`` rows, or seconds.
        num_slots: S.
        most_copies: of one expert: the number of ranks.

    Returns:
        ``[S]`` experts: 0 .. E-1, then those with a further copy in the order in which they got it.

    Raises:
        PlanError: there are fewer slots than experts, or more than so many copies fill.

    Example:
        >>> copies_by_load([8.0, 3.0, 1.0], 5, 4)
        [0, 1, 2, 0, 0]
    """
    name, num_experts = "copies_by_load", len(loads)
    requirement = f"lie in {num_experts} .. {num_experts * most_copies}, E .. E * ranks"
    fits = num_experts <= num_slots <= num_experts * most_copies
    require(fits, name, "num_slots", requirement, num_slots, error=PlanError)
    num_copies = [1] * num_experts
    heap = [(-load, expert) for expert, load in enumerate(loads)]
    heapq.heapify(heap)
    spare = []
    for _ in range(num_slots - num_experts):
        _, expert = heapq.heappop(heap)
        spare.append(expert)
        num_copies[expert] += 1
        if num_copies[expert] < most_copies:
            heapq.heappush(heap, (-loads[expert] / num_copies[expert], expert))
    return [*range(num_experts), *spare]


def replicate_experts(
    before: PlacementMap,
    costs: ExpertCosts,
    slots_per_rank: Sequence[int],
    *,
    min_gain: float = 1e-3,
) -> PlacementMap:
    """Place all experts and as many copies as fill the slots.

    Args:
        before: the present placement; it may have other numbers of slots.
        costs: of the same experts and ranks.
        slots_per_rank: ``[P]`` experts that each rank has memory for (:func:`slots_within`).
        min_gain: where ``before`` has these slots already, the share of the mean rank's time that
            must be won; else ``before`` is returned.

    Returns:
        A placement that fills every slot; no rank has two copies of an expert.

    Raises:
        ConfigError: the costs are for other experts or ranks, or another number of ranks is given.
        PlanError: fewer slots than experts, or so many that an expert would be twice on a rank.

    Example:
        >>> before = PlacementMap(num_experts=2, slots=((0,), (1,)))
        >>> replicate_experts(before, ExpertCosts.from_loads([6, 2], 2), [2, 1]).slots
        ((0, 1), (0,))
    """
    name, num_ranks = "replicate_experts", before.num_ranks
    costs.check(name, before)
    requirement = f"give the slots of each of the {num_ranks} ranks, each in 0 .. E"
    sizes = list(slots_per_rank)
    fits = len(sizes) == num_ranks and all(0 <= size <= before.num_experts for size in sizes)
    require(fits, name, "slots_per_rank", requirement, sizes)
    most_copies = sum(size > 0 for size in sizes)
    loads = costs.seconds.mean(axis=1).tolist()
    copies = copies_by_load(loads, sum(sizes), most_copies)
    share = costs.seconds / np.bincount(copies)[:, None]
    packs = polish(pack(copies, share, sizes), costs)
    after = place_sets(before, keep_homes(before, packs, share))
    is_same_size = [len(experts) for experts in before.slots] == sizes
    return better_of(before, after, costs, min_gain) if is_same_size else after


def replicate_by_node(
    loads: Sequence[float], *, num_groups: int, num_nodes: int, num_ranks: int, num_slots: int
) -> PlacementMap:
    """Hierarchical placement: groups of experts to nodes, copies within a node, copies to ranks.

    The three steps are EPLB's; its README's example is reproduced to the last slot by the tests.

    Args:
        loads: ``[E]`` rows of each expert; a group is ``E / num_groups`` consecutive experts.
        num_groups: of group-limited routing.
        num_nodes: divides num_groups, num_ranks.
        num_ranks: P, divides num_slots.
        num_slots: S of all ranks, E and the replicas.

    Raises:
        PlanError: a number does not divide the other, or a node has too few or too many slots.

    Example:
        >>> replicate_by_node(
        ...     [9.0, 1.0, 4.0, 2.0], num_groups=2, num_nodes=2, num_ranks=4, num_slots=8).slots
        ((0, 1), (0, 1), (2, 3), (2, 3))
    """
    name, num_experts = "replicate_by_node", len(loads)
    for argument, number, divisor, of in (
        ("num_groups", num_groups, num_experts, "the number of experts"),
        ("num_nodes", num_nodes, num_groups, "num_groups"),
        ("num_nodes", num_nodes, num_ranks, "num_ranks"),
        ("num_ranks", num_ranks, num_slots, "num_slots"),
    ):
        fits = number >= 1 and divisor % number == 0
        require(fits, name, argument, f"divide {of} = {divisor}", number, error=PlanError)
    group_size, ranks_per_node = num_experts // num_groups, num_ranks // num_nodes
    group_loads = np.reshape(loads, (num_groups, group_size)).sum(axis=1)
    node_share = np.repeat(group_loads[:, None], num_nodes, axis=1)
    groups_of = pack(range(num_groups), node_share, [num_groups // num_nodes] * num_nodes)
    slots: list[tuple[int, ...]] = []
    for groups in groups_of:
        members = [group * group_size + i for group in groups for i in range(group_size)]
        mine = [loads[expert] for expert in members]
        copies = copies_by_load(mine, num_slots // num_nodes, ranks_per_node)
        each = np.array(mine) / np.bincount(copies)
        share = np.repeat(each[:, None], ranks_per_node, axis=1)
        packs = pack(copies, share, [num_slots // num_ranks] * ranks_per_node)
        slots += [tuple(members[copy] for copy in held) for held in packs]
    return PlacementMap(num_experts=num_experts, slots=tuple(slots))
