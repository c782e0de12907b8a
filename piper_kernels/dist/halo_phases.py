"""The phases of an exchange as arrays: who sends how many rows to whom, in which order.

HALO (hierarchical, affinity-aware, locality-optimised all-to-all) has three phases::

    I    inside each node: rows whose destination is on the source's own node
    II   between nodes:    each rank sends one message per other node, along its rail
    III  inside each node: what came in by a rail goes on to its destination

I runs beside II and III; III waits for II. The flat exchange is one phase of direct messages.

Pure: no torch, no process group. Letters: P ranks, N nodes, M messages, B blocks.
Source: Piper (2605.05049) section VI.
"""

from dataclasses import dataclass, replace
from typing import Literal, get_args

import numpy as np
from numpy.typing import NDArray

from piper_kernels.dist.exchange_counts import CountArray
from piper_kernels.dist.topology import IntArray, Topology

Algorithm = Literal["flat", "halo", "halo_dedup"]
ALGORITHMS: tuple[Algorithm, ...] = get_args(Algorithm)
PhaseName = Literal["flat", "I", "II", "III"]
RankArray = NDArray[np.int32]


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class Blocks:
    """What each message carries: rows that share origin and final target.

    Attributes:
        offsets: ``[M + 1]`` exclusive: message m carries blocks ``offsets[m]:offsets[m + 1]``, in
            the order of its rows.
        origin: ``[B]`` rank where the rows start.
        target: ``[B]`` rank where they end.
        num_rows: ``[B]``.
    """

    offsets: IntArray
    origin: RankArray
    target: RankArray
    num_rows: CountArray


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class Phase:
    """Messages that may all be under way at once, by source and then posting order.

    Attributes:
        name: ``flat``, or HALO's ``I``, ``II``, ``III``.
        after: phases that must have ended on the ranks concerned.
        src: ``[M]`` sending rank.
        dst: ``[M]`` receiving rank; equal to ``src`` where rows only change buffers.
        num_rows: ``[M]``, above 0: empty messages are not sent.
        step: ``[M]`` position in the sender's ring; a sender posts by rising step.
        blocks: what the messages carry, or ``None`` in a plan made for its sizes only. With
            de-duplication a row of phase II stands for a row of several blocks.
    """

    name: PhaseName
    after: tuple[PhaseName, ...]
    src: RankArray
    dst: RankArray
    num_rows: CountArray
    step: RankArray
    blocks: Blocks | None

    @property
    def num_messages(self) -> int:
        """M, moves inside one rank included."""
        return len(self.src)


def node_order(topology: Topology, is_far_first: bool) -> RankArray:
    """``[N, N - 1]`` the other nodes in the order in which ranks of each node send to them.

    A ring shifted over groups and, in each group, over nodes: where groups are equally large, every
    step is a permutation, so no node receives from two others at once.
    """
    groups = topology.maps.node_to_group
    num_nodes, num_groups = topology.num_nodes, topology.num_groups
    group_sizes = np.bincount(groups, minlength=num_groups)
    position = np.zeros(num_nodes, dtype=np.int64)
    for group in range(num_groups):
        position[groups == group] = np.arange(group_sizes[group])
    group_shift = (groups[None, :] - groups[:, None]) % num_groups
    node_shift = (position[None, :] - position[:, None]) % group_sizes[groups][None, :]
    distance = group_shift * num_nodes + node_shift
    if is_far_first:
        distance = np.where(group_shift == 0, distance + num_groups * num_nodes, distance)
    # a node itself goes to the front and is cut off
    np.fill_diagonal(distance, -1)
    return np.argsort(distance, axis=1, kind="stable")[:, 1:].astype(np.int32)


def relay_ranks(topology: Topology) -> RankArray:
    """``[P, N]`` the rank of each node that receives from each source.

    It is the one on the source's rail; where a small node has no such rank, local rank l falls back
    to ``l mod size``. Phase II does not use the column of a rank's own node.
    """
    maps = topology.maps
    locals_there = maps.rank_to_local[:, None] % maps.node_sizes[None, :]
    return maps.ranks_by_node[maps.node_offsets[:-1][None, :] + locals_there].astype(np.int32)


def missing_rails(topology: Topology) -> tuple[str, ...]:
    """What falls back for want of a rail, in words; empty where all nodes are equally large."""
    sizes = topology.maps.node_sizes
    widest = int(sizes.max())
    notes = []
    for size in sorted(set(sizes.tolist()) - {widest}):
        hosts = [node.host for node in topology.nodes if len(node.ranks) == size]
        shown = ", ".join(hosts[:3]) + (f" and {len(hosts) - 3} more" if len(hosts) > 3 else "")
        notes.append(
            f"rails {size} .. {widest - 1} end before {shown} ({size} ranks): "
            f"messages for such a node from local rank l go to local rank l mod {size}"
        )
    return tuple(notes)


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class Paths:
    """The way of each message.

    Attributes:
        rail: ``[M]`` local rank of the sender; -1 inside a node.
        src_nic: ``[M]`` NIC it leaves by, counted over all nodes; -1 inside a node.
        dst_nic: ``[M]`` NIC it arrives at; -1 inside a node.
        is_on_rail: ``[M]`` whether the receiver is on the sender's rail; False inside a node.
    """

    rail: IntArray
    src_nic: IntArray
    dst_nic: IntArray
    is_on_rail: NDArray[np.bool_]


def message_paths(topology: Topology, phase: Phase) -> Paths:
    """Over which rail and which NICs each message of a phase goes."""
    maps = topology.maps
    leaves = maps.rank_to_node[phase.src] != maps.rank_to_node[phase.dst]
    rail = maps.rank_to_local[phase.src]
    return Paths(
        rail=np.where(leaves, rail, -1),
        src_nic=np.where(leaves, maps.rank_to_nic[phase.src], -1),
        dst_nic=np.where(leaves, maps.rank_to_nic[phase.dst], -1),
        is_on_rail=leaves & (rail == maps.rank_to_local[phase.dst]),
    )


def flat_phase(topology: Topology, rows: CountArray) -> Phase:
    """All messages at once, each rank starting with itself and going round."""
    num_ranks = topology.num_ranks
    src = np.repeat(np.arange(num_ranks, dtype=np.int32), num_ranks)
    step = np.tile(np.arange(num_ranks, dtype=np.int32), num_ranks)
    dst = (src + step) % num_ranks
    return _phase("flat", src, dst, step, rows[src, dst])


def halo_phases(
    topology: Topology, rank_rows: CountArray, node_rows: CountArray, *, is_far_first: bool
) -> tuple[Phase, Phase, Phase]:
    """Phases I, II and III.

    Args:
        topology: of the group.
        rank_rows: ``[P, P]`` rows from origin to target.
        node_rows: ``[P, N]`` rows from origin to each node: the sum of ``rank_rows`` over the node,
            or less with de-duplication.
        is_far_first: phase II begins with other switch groups rather than with the own one.
    """
    src, dst, step = _pairs_in_nodes(topology)
    near = _phase("I", src, dst, step, rank_rows[src, dst])
    rows = _relayed_rows(topology, rank_rows)[topology.maps.rank_to_local[src], dst]
    spread = _phase("III", src, dst, step, rows, after=("II",))
    order = node_order(topology, is_far_first)[topology.maps.rank_to_node]
    num_ranks, num_others = order.shape
    far_src = np.repeat(np.arange(num_ranks, dtype=np.int32), num_others)
    far_step = np.tile(np.arange(num_others, dtype=np.int32), num_ranks)
    node = order.ravel()
    relay = relay_ranks(topology)[far_src, node]
    return near, _phase("II", far_src, relay, far_step, node_rows[far_src, node]), spread


def _phase(
    name: PhaseName,
    src: RankArray,
    dst: RankArray,
    step: RankArray,
    num_rows: CountArray,
    after: tuple[PhaseName, ...] = (),
) -> Phase:
    """A phase without blocks; empty messages are dropped."""
    kept = np.flatnonzero(num_rows)
    return Phase(
        name=name,
        after=after,
        src=src[kept],
        dst=dst[kept],
        num_rows=num_rows[kept],
        step=step[kept],
        blocks=None,
    )


def _pairs_in_nodes(topology: Topology) -> tuple[RankArray, RankArray, RankArray]:
    """Source, destination and step of every pair of ranks on one node, by source, then step."""
    maps = topology.maps
    sizes = maps.node_sizes[maps.rank_to_node]
    src = np.repeat(np.arange(topology.num_ranks), sizes)
    step = np.arange(len(src)) - np.repeat(np.cumsum(sizes) - sizes, sizes)
    there = (maps.rank_to_local[src] + step) % sizes[src]
    dst = maps.ranks_by_node[maps.node_offsets[maps.rank_to_node[src]] + there]
    return src.astype(np.int32), dst.astype(np.int32), step.astype(np.int32)


def _relayed_rows(topology: Topology, rank_rows: CountArray) -> CountArray:
    """``[widest, P]`` rows from other nodes that local rank l of a node passes on to a rank."""
    maps = topology.maps
    rows = np.zeros((int(maps.node_sizes.max()), topology.num_ranks), dtype=rank_rows.dtype)
    for node, size in enumerate(maps.node_sizes.tolist()):
        ranks = maps.ranks_by_node[maps.node_offsets[node] : maps.node_offsets[node + 1]]
        is_foreign = maps.rank_to_node != node
        for local in range(size):
            sources = np.flatnonzero(is_foreign & (maps.rank_to_local % size == local))
            rows[local, ranks] = rank_rows[np.ix_(sources, ranks)].sum(axis=0)
    return rows


def with_blocks(
    phase: Phase, rank_rows: CountArray, origin: IntArray, target: IntArray, relay: RankArray
) -> Phase:
    """``phase`` with what its messages carry.

    Args:
        phase: any phase.
        rank_rows: ``[P, P]`` rows from origin to target.
        origin: ``[B]`` of the blocks that take part, rising.
        target: ``[B]``.
        relay: ``[B]`` rank that passes a block on, from II to III.
    """
    sender = relay if phase.name == "III" else origin
    receiver = relay if phase.name == "II" else target
    num_ranks = len(rank_rows)
    keys = phase.src.astype(np.int64) * num_ranks + phase.dst
    by_key = np.argsort(keys)
    wanted = np.asarray(sender, dtype=np.int64) * num_ranks + receiver
    message = by_key[np.searchsorted(keys, wanted, sorter=by_key)]
    order = np.argsort(message, kind="stable")
    sizes = np.bincount(message, minlength=phase.num_messages)
    blocks = Blocks(
        offsets=np.concatenate([[0], np.cumsum(sizes)]),
        origin=origin[order].astype(np.int32),
        target=target[order].astype(np.int32),
        num_rows=rank_rows[origin[order], target[order]],
    )
    return replace(phase, blocks=blocks)
