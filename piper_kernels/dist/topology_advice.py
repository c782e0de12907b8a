"""Advice: in which order to number ranks, and which free nodes to take.

Two rules. An expert-parallel group stays inside one node if it fits, else inside one switch group.
A job takes as few switch groups (racks) as fit. Both are packing problems whose optimum is simple;
what they are worth on a given machine is for the simulator to show.

Pure: no torch, no process group.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from piper_kernels.dist.links import LEVELS, Level
from piper_kernels.dist.topology import Topology
from piper_kernels.errors import require


@dataclass(frozen=True, kw_only=True, slots=True)
class RankOrderAdvice:
    """A better numbering of the ranks.

    Attributes:
        rank_order: new rank i is old rank ``rank_order[i]``; for ``Topology.select``.
        before: how many expert-parallel groups reach each level with the old numbering.
        after: the same with ``rank_order``.
        reason: one sentence.
    """

    rank_order: tuple[int, ...]
    before: dict[Level, int]
    after: dict[Level, int]
    reason: str


@dataclass(frozen=True, kw_only=True, slots=True)
class NodeAdvice:
    """Which nodes to take.

    Attributes:
        hosts: in the order in which ranks should be numbered.
        groups: the switch group of each host.
        num_split_blocks: blocks of nodes that lie in two groups or more.
        reason: one sentence.
    """

    hosts: tuple[str, ...]
    groups: tuple[str, ...]
    num_split_blocks: int
    reason: str


def advise_rank_order(topology: Topology, ranks_per_block: int) -> RankOrderAdvice:
    """Number ranks so that as many blocks of consecutive ranks as possible stay close together.

    A block is what must be close: ``ep * tp`` ranks in the mesh order (pp, dp, ep, tp).

    Args:
        topology: where the ranks sit now.
        ranks_per_block: must divide the number of ranks.

    Raises:
        ConfigError: it does not.

    Example:
        >>> from piper_kernels.dist.topology_presets import frontier
        >>> cyclic = frontier(2).select([r // 2 + r % 2 * 8 for r in range(16)])
        >>> advice = advise_rank_order(cyclic, 8)
        >>> advice.before["group"], advice.after["node"]
        (2, 2)
    """
    num_ranks = topology.num_ranks
    fits = ranks_per_block >= 1 and num_ranks % ranks_per_block == 0
    requirement = f"divide the {num_ranks} ranks"
    require(fits, "advise_rank_order", "ranks_per_block", requirement, ranks_per_block)
    blocks: list[list[int]] = []
    last: list[int] = []
    for group in topology.group_names:
        rest: list[int] = []
        for node in topology.group_nodes(group):
            rest += _take_blocks(list(topology.nodes[node].ranks), ranks_per_block, blocks)
        last += _take_blocks(rest, ranks_per_block, blocks)
    _take_blocks(last, ranks_per_block, blocks)
    order = tuple(rank for block in blocks for rank in block)
    before = _spans(topology, range(num_ranks), ranks_per_block)
    after = _spans(topology, order, ranks_per_block)
    if before == after:
        order = tuple(range(num_ranks))
        reason = f"Keep the order: blocks of {ranks_per_block} ranks are as close as they can be."
    else:
        words = [
            f"{level} {before[level]} -> {after[level]}"
            for level in LEVELS
            if before[level] or after[level]
        ]
        reason = f"Blocks of {ranks_per_block} ranks by the level they reach: {', '.join(words)}."
    return RankOrderAdvice(rank_order=order, before=before, after=after, reason=reason)


def advise_nodes(
    free_hosts: Mapping[str, Sequence[str]], num_nodes: int, *, nodes_per_block: int = 1
) -> NodeAdvice:
    """Choose nodes in as few switch groups as fit, whole blocks in a group where that costs none.

    Args:
        free_hosts: free hosts by switch group.
        num_nodes: how many to take.
        nodes_per_block: nodes of one expert-parallel group; must divide ``num_nodes``.

    Raises:
        ConfigError: too few free hosts, or a block size that does not divide.

    Example:
        >>> advise_nodes({"a": ["a0", "a1"], "b": ["b0", "b1", "b2"]}, 2).hosts
        ('a0', 'a1')
    """
    name = "advise_nodes"
    free = sum(map(len, free_hosts.values()))
    require(1 <= num_nodes <= free, name, "num_nodes", f"be in 1 .. {free} free", num_nodes)
    fits = nodes_per_block >= 1 and num_nodes % nodes_per_block == 0
    requirement = f"divide num_nodes = {num_nodes}"
    require(fits, name, "nodes_per_block", requirement, nodes_per_block)
    rooms = {group: len(hosts) for group, hosts in free_hosts.items()}
    whole = {group: room // nodes_per_block * nodes_per_block for group, room in rooms.items()}
    taken = _fewest_groups(rooms, num_nodes)
    if sum(whole.values()) >= num_nodes:
        taken_whole = _fewest_groups(whole, num_nodes)
        taken = taken_whole if len(taken_whole) == len(taken) else taken
    pairs = [(host, group) for group, count in taken.items() for host in free_hosts[group][:count]]
    hosts, groups = zip(*pairs, strict=True)
    starts = range(0, num_nodes, nodes_per_block)
    num_split = sum(len(set(groups[start : start + nodes_per_block])) > 1 for start in starts)
    reason = (
        f"{num_nodes} nodes in {len(taken)} of {len(rooms)} groups; {num_split} of {len(starts)} "
        f"blocks of {nodes_per_block} nodes lie in two groups or more."
    )
    return NodeAdvice(hosts=hosts, groups=groups, num_split_blocks=num_split, reason=reason)


def _take_blocks(ranks: list[int], size: int, blocks: list[list[int]]) -> list[int]:
    """Append the full blocks of ``ranks`` to ``blocks`` and return what is left over."""
    num_full = len(ranks) // size
    blocks += [ranks[i * size : (i + 1) * size] for i in range(num_full)]
    return ranks[num_full * size :]


def _spans(topology: Topology, order: Sequence[int], size: int) -> dict[Level, int]:
    """How many blocks of ``size`` consecutive ranks of ``order`` reach each level."""
    blocks = np.asarray(order).reshape(-1, size)
    furthest = topology.distances(blocks[:, :1], blocks).max(axis=1)
    counts = np.bincount(furthest, minlength=len(LEVELS))
    return {level: int(count) for level, count in zip(LEVELS, counts, strict=True)}


def _fewest_groups(rooms: Mapping[str, int], num_nodes: int) -> dict[str, int]:
    """Nodes to take from each group: largest groups first, the last one as small as fits."""
    taken: dict[str, int] = {}
    left = num_nodes
    by_room = sorted(rooms, key=lambda group: -rooms[group])
    while left:
        remaining = [group for group in by_room if group not in taken]
        fitting = [group for group in remaining if rooms[group] >= left]
        group = fitting[-1] if fitting else remaining[0]
        taken[group] = min(left, rooms[group])
        left -= taken[group]
    return taken
