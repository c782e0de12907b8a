"""From one rank's counts to its part in the exchange, step after step.

Routes hold what the topology decides, once; :meth:`RankRoutes.program` adds an exchange's counts.

Pure: no torch, no process group. Letters: P ranks, N nodes, g ranks on the own node.
"""

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np

from piper_kernels.config import check_choice
from piper_kernels.dist.halo_phases import Algorithm, node_order, relay_ranks
from piper_kernels.dist.halo_program import (
    Buffer,
    PhaseProgram,
    Piece,
    RankCounts,
    RankProgram,
    layout,
    transfers,
    transfers_by_key,
)
from piper_kernels.dist.topology import IntArray, Topology
from piper_kernels.errors import require


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class RankRoutes:
    """Whom one rank talks to, in which order. Build with :func:`rank_routes`.

    Attributes:
        rank: whose routes they are.
        algorithm: as in :func:`make_plan`.
        near_ranks: ``[g]`` ranks of the own node, by local rank.
        rank_to_node: ``[P]``.
        ring: ranks that this one sends to in phase I, III or flat, in posting order.
        ring_back: the same ranks in the order in which they send to this one.
        far_nodes: ``[N - 1]`` the other nodes in sending order.
        far_relays: ``[N - 1]`` the rank that receives on each of them.
        relay_in: ``[P]`` rank of the own node that receives from each rank; -1 for the own node's.
        sources: ranks that this one receives from in phase II, in the order in which they post.
    """

    rank: int
    algorithm: Algorithm
    near_ranks: IntArray
    rank_to_node: IntArray
    ring: IntArray
    ring_back: IntArray
    far_nodes: IntArray
    far_relays: IntArray
    relay_in: IntArray
    sources: IntArray

    def program(self, counts: RankCounts) -> RankProgram:
        """This rank's part in an exchange of ``counts``, equal to its part in :func:`make_plan`.

        Example:
            Two nodes of two ranks, one row from each rank to each. Rank 0 sends rows 2 and 3 of its
            input to rank 2.

            >>> from piper_kernels.dist.exchange_counts import plain_counts
            >>> from piper_kernels.dist.halo_program import rank_counts
            >>> from piper_kernels.dist.topology_presets import frontier
            >>> topology = frontier(1).lay_out((2, 2))
            >>> mine = rank_counts(topology, plain_counts(topology, [[1] * 4] * 4), 0, "halo")
            >>> program = rank_routes(topology, 0, "halo").program(mine)
            >>> [(t.peer, t.starts.tolist(), t.stops.tolist()) for t in program.phases[1].sends]
            [(2, [2], [4])]
        """
        sizes: dict[Buffer, int] = {"output": int(self._arriving(counts).sum())}
        if self.algorithm == "halo_dedup":
            sizes["near"] = int(self._near_rows(counts).sum())
            sizes["far"] = int(counts.send_node_rows[self.far_nodes].sum())
            sizes["spread"] = int(counts.node_rank_rows[self.sources].sum())
        else:
            sizes["input"] = int(counts.send_rank_rows.sum())
        if self.algorithm == "flat":
            phases: tuple[PhaseProgram, ...] = (self._direct(counts),)
        else:
            sizes["relay"] = int(counts.node_rows[self.sources].sum())
            phases = (self._direct(counts), self._second(counts), self._third(counts))
        return RankProgram(rank=self.rank, phases=phases, buffer_rows=sizes)

    def _arriving(self, counts: RankCounts) -> IntArray:
        """``[P]`` rows that end here, by origin."""
        return counts.node_rank_rows[:, self.near_ranks == self.rank][:, 0]

    def _near_rows(self, counts: RankCounts) -> IntArray:
        """``[P]`` rows to the ranks of the own node, 0 to others."""
        is_near = self.rank_to_node == self.rank_to_node[self.rank]
        return np.where(is_near, counts.send_rank_rows, 0)

    def _direct(self, counts: RankCounts) -> PhaseProgram:
        """The flat exchange, or phase I."""
        is_dedup = self.algorithm == "halo_dedup"
        rows = self._near_rows(counts) if is_dedup else counts.send_rank_rows
        ring, ring_back = self.ring.tolist(), self.ring_back.tolist()
        return PhaseProgram(
            name="flat" if self.algorithm == "flat" else "I",
            after=(),
            source="near" if is_dedup else "input",
            target="output",
            sends=transfers_by_key(ring, ring, rows),
            recvs=transfers_by_key(ring_back, ring_back, self._arriving(counts)),
        )

    def _second(self, counts: RankCounts) -> PhaseProgram:
        """Phase II: one message to the relay on each other node."""
        relays, nodes = self.far_relays.tolist(), self.far_nodes.tolist()
        if self.algorithm == "halo_dedup":
            rows = counts.send_node_rows.copy()
            rows[self.rank_to_node[self.rank]] = 0
            sends = transfers_by_key(relays, nodes, rows)
        else:
            starts, stops = layout(counts.send_rank_rows)
            on = [np.flatnonzero(self.rank_to_node == node) for node in nodes]
            pieces = zip(relays, on, strict=True)
            sends = transfers((relay, starts[ranks], stops[ranks]) for relay, ranks in pieces)
        arriving = np.where(self.relay_in == self.rank, counts.node_rows, 0)
        sources = self.sources.tolist()
        return PhaseProgram(
            name="II",
            after=(),
            source="far" if self.algorithm == "halo_dedup" else "input",
            target="relay",
            sends=sends,
            recvs=transfers_by_key(sources, sources, arriving),
        )

    def _third(self, counts: RankCounts) -> PhaseProgram:
        """Phase III: from this relay to its node, and from the node's other relays to this rank."""
        is_dedup = self.algorithm == "halo_dedup"
        origins = np.sort(self.sources)
        by_rank = np.argsort(self.near_ranks)
        # [origins, g]: what came from each origin for each rank of the node, ranks rising
        rows = counts.node_rank_rows[np.ix_(origins, by_rank)]
        starts, stops = (a.T for a in layout(rows)) if not is_dedup else layout(rows.T)
        column = {int(rank): place for place, rank in enumerate(self.near_ranks[by_rank])}
        sends = ((rank, starts[column[rank]], stops[column[rank]]) for rank in self.ring.tolist())
        return PhaseProgram(
            name="III",
            after=("II",),
            source="spread" if is_dedup else "relay",
            target="output",
            sends=transfers(sends),
            recvs=transfers(self._from_relays(counts)),
        )

    def _from_relays(self, counts: RankCounts) -> Iterator[Piece]:
        """Where the rows that each relay of the node passes on belong in the output."""
        starts, stops = layout(self._arriving(counts))
        for relay in self.ring_back.tolist():
            passed_on = np.flatnonzero(self.relay_in == relay)
            yield relay, starts[passed_on], stops[passed_on]


def rank_routes(
    topology: Topology, rank: int, algorithm: Algorithm, *, is_far_first: bool = False
) -> RankRoutes:
    """The routes of one rank.

    Raises:
        ConfigError: unknown rank or algorithm.
    """
    name = "rank_routes"
    check_choice(name, "algorithm", algorithm, Algorithm)
    num_ranks, maps = topology.num_ranks, topology.maps
    require(0 <= rank < num_ranks, name, "rank", f"be in 0 .. {num_ranks - 1}", rank)
    node, local = int(maps.rank_to_node[rank]), int(maps.rank_to_local[rank])
    near_ranks = np.array(topology.nodes[node].ranks)
    circle, place = (np.arange(num_ranks), rank) if algorithm == "flat" else (near_ranks, local)
    order, relay = node_order(topology, is_far_first), relay_ranks(topology).astype(np.int64)
    relay_in = np.where(maps.rank_to_node == node, -1, relay[:, node])
    sources = np.flatnonzero(relay_in == rank)
    # the step in which each of them posts its message to this node
    steps = (
        np.argmax(order[maps.rank_to_node[sources]] == node, axis=1) if len(sources) else sources
    )
    far_nodes = order[node].astype(np.int64)
    return RankRoutes(
        rank=rank,
        algorithm=algorithm,
        near_ranks=near_ranks,
        rank_to_node=maps.rank_to_node,
        ring=np.roll(circle, -place),
        ring_back=np.roll(circle[::-1], place + 1),
        far_nodes=far_nodes,
        far_relays=relay[rank, far_nodes],
        relay_in=relay_in,
        sources=sources[np.lexsort((sources, steps))],
    )
