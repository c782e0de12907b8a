"""What one rank does in an exchange: its messages, and where their rows lie in its buffers.

A rank need not know the whole counts matrix: its own row and the columns of its node suffice
(:class:`RankCounts`), P * (g + 1) numbers on a node of g ranks.

Buffers, by algorithm; rows of a buffer are ordered by the first key, then the second::

    flat, halo   input    by destination rank, then as given
                 relay    by origin, then destination rank: what this rank passes on   (halo)
                 output   by origin, then as given: what torch's all_to_all_single returns
    halo_dedup   near     by destination rank of the own node; a row per (token, rank)
                 far      by destination node; a row per (token, node)
                 relay    by origin; a row per (token, node) that arrived
                 spread   by destination rank, then origin; a row per (token, rank) to pass on
                 output   by origin; a row per (token, rank)

With de-duplication the caller fills ``near`` and ``far`` from its tokens and ``spread`` from
``relay``: which tokens go where is not in the counts.

Pure: no torch, no process group. Letters: P ranks, N nodes, g ranks on the own node.
"""

from collections.abc import Iterable
from dataclasses import dataclass, replace
from typing import Literal

import numpy as np

from piper_kernels.dist.exchange_counts import ExchangeCounts, sum_by_node
from piper_kernels.dist.halo_phases import Algorithm, PhaseName
from piper_kernels.dist.topology import IntArray, Topology

Buffer = Literal["input", "near", "far", "relay", "spread", "output"]


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class RankCounts:
    """The part of the counts that one rank needs, all int64.

    For ``flat`` and ``halo`` these are rows (and their sums); for ``halo_dedup`` distinct tokens.

    Attributes:
        send_rank_rows: ``[P]`` from this rank to each rank.
        send_node_rows: ``[N]`` from this rank to each node.
        node_rank_rows: ``[P, g]`` from each rank to the ranks of this node, by local rank.
        node_rows: ``[P]`` from each rank to this node.
    """

    send_rank_rows: IntArray
    send_node_rows: IntArray
    node_rank_rows: IntArray
    node_rows: IntArray


def rank_counts(
    topology: Topology, counts: ExchangeCounts, rank: int, algorithm: Algorithm
) -> RankCounts:
    """What ``rank`` needs of the whole counts."""
    is_dedup = algorithm == "halo_dedup"
    rank_rows = counts.rank_rows if is_dedup else counts.rows
    node_rows = counts.node_rows if is_dedup else sum_by_node(topology, rank_rows)
    node = int(topology.maps.rank_to_node[rank])
    return RankCounts(
        send_rank_rows=rank_rows[rank],
        send_node_rows=node_rows[rank],
        node_rank_rows=rank_rows[:, list(topology.nodes[node].ranks)],
        node_rows=node_rows[:, node],
    )


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class Transfer:
    """One message as one of its two ends sees it.

    Attributes:
        peer: the other end; the rank itself where rows only change buffers.
        num_rows: above 0.
        starts: ``[k]`` first row of each piece of the message in the buffer, in message order.
        stops: ``[k]`` end of each piece, exclusive; pieces that touch are one.
    """

    peer: int
    num_rows: int
    starts: IntArray
    stops: IntArray


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class PhaseProgram:
    """One rank's part in one phase.

    Attributes:
        name: of the phase.
        after: phases of this rank that must have ended before.
        source: buffer that sends read.
        target: buffer that receives write.
        sends: in posting order.
        recvs: in the order in which their senders post them.
    """

    name: PhaseName
    after: tuple[PhaseName, ...]
    source: Buffer
    target: Buffer
    sends: tuple[Transfer, ...]
    recvs: tuple[Transfer, ...]


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class RankProgram:
    """One rank's part in an exchange.

    Attributes:
        rank: whose part it is.
        phases: in an order that respects what waits for what.
        buffer_rows: rows of each buffer that the algorithm uses.
    """

    rank: int
    phases: tuple[PhaseProgram, ...]
    buffer_rows: dict[Buffer, int]

    def reverse(self) -> "RankProgram":
        """The way back, over the same buffers: sends become receives, phases run backwards."""
        turned = []
        for phase in reversed(self.phases):
            waiting = tuple(other.name for other in self.phases if phase.name in other.after)
            turned.append(
                replace(
                    phase,
                    after=waiting,
                    source=phase.target,
                    target=phase.source,
                    sends=phase.recvs,
                    recvs=phase.sends,
                )
            )
        return replace(self, phases=tuple(turned))


Piece = tuple[int, IntArray, IntArray]


def layout(sizes: IntArray) -> tuple[IntArray, IntArray]:
    """Starts and stops of consecutive stretches of ``sizes`` rows, in the shape of ``sizes``."""
    stops = np.cumsum(sizes.ravel()).reshape(sizes.shape)
    return stops - sizes, stops


def transfers(pieces: Iterable[Piece]) -> tuple[Transfer, ...]:
    """Messages from ``(peer, starts, stops)``; empty ones are dropped, touching pieces joined."""
    made = []
    for peer, starts, stops in pieces:
        kept = stops > starts
        starts, stops = starts[kept], stops[kept]
        if not len(starts):
            continue
        is_first = np.append(True, starts[1:] != stops[:-1])
        is_last = np.append(is_first[1:], True)
        num_rows = int((stops - starts).sum())
        joined = starts[is_first], stops[is_last]
        made.append(Transfer(peer=peer, num_rows=num_rows, starts=joined[0], stops=joined[1]))
    return tuple(made)


def transfers_by_key(
    peers: Iterable[int], keys: Iterable[int], sizes: IntArray
) -> tuple[Transfer, ...]:
    """A message for each peer: the stretch of its key in a buffer laid out by ``sizes``."""
    starts, stops = layout(sizes)
    pairs = zip(peers, keys, strict=True)
    return transfers((peer, starts[key : key + 1], stops[key : key + 1]) for peer, key in pairs)
