"""How many rows an exchange moves between which ranks, with and without de-duplication.

Pure: no torch, no process group. Letters: P ranks, N nodes, E experts, T tokens per rank, K experts
per token. A token that goes to two experts of one rank is two *rows*, one *rank row*; to two ranks
of one node it is two rank rows, one *node row*.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import ArrayLike, NDArray

from piper_kernels.dist.placement_map import PlacementMap
from piper_kernels.dist.topology import Topology
from piper_kernels.errors import ConfigError, require

# int64 where counted, float64 where expected
CountArray = NDArray[Any]


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class ExchangeCounts:
    """Rows from each rank to each rank; int64 as counted or float64 as expected.

    Attributes:
        rows: ``[P, P]`` (token, k) pairs from source to destination rank.
        rank_rows: ``[P, P]`` distinct tokens from source to destination rank.
        node_rows: ``[P, N]`` distinct tokens from source rank to destination node.
    """

    rows: CountArray
    rank_rows: CountArray
    node_rows: CountArray

    def dedup_factor(self, topology: Topology) -> float:
        """Rows that cross nodes without de-duplication, over those that cross with it.

        1.0 where nothing crosses.
        """
        nodes = topology.maps.rank_to_node
        crosses = nodes[:, None] != nodes
        leaves = nodes[:, None] != np.arange(topology.num_nodes)
        with_dedup = float(self.node_rows[leaves].sum())
        return float(self.rows[crosses].sum()) / with_dedup if with_dedup else 1.0

    def check(self, function: str, topology: Topology) -> None:
        """Raise ``ConfigError`` unless shapes and sizes can belong to one routing."""
        num_ranks, num_nodes = topology.num_ranks, topology.num_nodes
        shapes = {"rows": (num_ranks, num_ranks), "rank_rows": (num_ranks, num_ranks)}
        shapes["node_rows"] = (num_ranks, num_nodes)
        for argument, shape in shapes.items():
            given = getattr(self, argument)
            requirement = f"have shape {shape} for {num_ranks} ranks on {num_nodes} nodes"
            require(given.shape == shape, function, argument, requirement, given.shape)
            fits = bool((given >= 0).all())
            require(fits, function, argument, "be >= 0", given.min() if not fits else "")
        per_node = sum_by_node(topology, self.rank_rows)
        largest = max_by_node(topology, self.rank_rows)
        slack = 1e-9 * (1 + self.rows.max(initial=0))
        bounds = {
            "rank_rows must be at most rows": (self.rank_rows <= self.rows + slack).all(),
            "node_rows must be at most the sum of rank_rows over the node": (
                self.node_rows <= per_node + slack
            ).all(),
            "node_rows must be at least the largest of rank_rows on the node": (
                self.node_rows >= largest - slack
            ).all(),
        }
        for sentence, holds in bounds.items():
            if not holds:
                remedy = "Count all three from one routing: count_rows."
                raise ConfigError(f"{function}: {sentence}, for every source. {remedy}")


def plain_counts(topology: Topology, rows: ArrayLike) -> ExchangeCounts:
    """Counts of an exchange without de-duplication: each row is a token of its own.

    Args:
        topology: of the group.
        rows: ``[P, P]`` rows from source to destination rank.

    Raises:
        ConfigError: wrong shape, or a negative count.
    """
    given = np.asarray(rows)
    given = given.astype(np.float64 if given.dtype.kind == "f" else np.int64)
    num_ranks = topology.num_ranks
    requirement = f"have shape ({num_ranks}, {num_ranks}), from rank to rank"
    fits = given.shape == (num_ranks, num_ranks)
    require(fits, "plain_counts", "rows", requirement, given.shape)
    counts = ExchangeCounts(rows=given, rank_rows=given, node_rows=sum_by_node(topology, given))
    counts.check("plain_counts", topology)
    return counts


def count_rows(
    topology: Topology, placement: PlacementMap, expert_ids: Sequence[ArrayLike]
) -> ExchangeCounts:
    """Count a routing.

    Args:
        topology: of the group.
        placement: where experts live.
        expert_ids: for each rank ``[T, K]`` logical ids, E for a dropped slot; T may differ.

    Raises:
        ConfigError: not one array for each rank, or ids out of range.

    Example:
        >>> from piper_kernels.dist.topology_presets import one_box
        >>> topology, placement = one_box(2), PlacementMap.contiguous(4, 2)
        >>> counts = count_rows(topology, placement, [[[0, 1], [1, 2]], [[3, 2]]])
        >>> counts.rows.tolist(), counts.rank_rows.tolist(), counts.node_rows.tolist()
        ([[3, 1], [0, 2]], [[2, 1], [0, 1]], [[2], [1]])
    """
    num_ranks, num_nodes = topology.num_ranks, topology.num_nodes
    placement.check_topology("count_rows", topology)
    requirement = f"hold one array for each of the {num_ranks} ranks"
    fits = len(expert_ids) == num_ranks
    require(fits, "count_rows", "expert_ids", requirement, f"{len(expert_ids)} arrays")
    rows = np.zeros((num_ranks, num_ranks), dtype=np.int64)
    rank_rows, node_rows = rows.copy(), np.zeros((num_ranks, num_nodes), dtype=np.int64)
    for source, ids in enumerate(expert_ids):
        physical = placement.choose(topology, source, ids)
        tokens, ks = np.nonzero(physical < placement.num_slots)
        ranks = placement.maps.physical_to_rank[physical[tokens, ks]]
        rows[source] = np.bincount(ranks, minlength=num_ranks)
        pairs = np.unique(tokens * num_ranks + ranks)
        rank_rows[source] = np.bincount(pairs % num_ranks, minlength=num_ranks)
        pairs = np.unique(tokens * num_nodes + topology.maps.rank_to_node[ranks])
        node_rows[source] = np.bincount(pairs % num_nodes, minlength=num_nodes)
    return ExchangeCounts(rows=rows, rank_rows=rank_rows, node_rows=node_rows)


def expect_rows(
    topology: Topology, placement: PlacementMap, num_tokens: int, top_k: int
) -> ExchangeCounts:
    """Expected counts when each rank's tokens choose K distinct experts uniformly.

    Args:
        topology: of the group.
        placement: without replicas.
        num_tokens: T, on each rank.
        top_k: K.

    Raises:
        ConfigError: K above E, or replicas (count a recorded routing instead).

    Example:
        Two nodes of one rank, two experts each, K = 2: of the 6 pairs of experts one stays on a
        node altogether, so 5/6 of the tokens cross.

        >>> from piper_kernels.dist.topology_presets import frontier
        >>> topology = frontier(1).lay_out((1, 1))
        >>> counts = expect_rows(topology, PlacementMap.contiguous(4, 2), 6, 2)
        >>> counts.rows[0].tolist(), counts.node_rows[0].tolist()
        ([6.0, 6.0], [5.0, 5.0])
    """
    name = "expect_rows"
    placement.check_topology(name, topology)
    fits = not placement.has_replicas
    remedy = "Count a routing with count_rows."
    require(fits, name, "placement", "hold each expert once", "replicas", remedy)
    num_experts = placement.num_experts
    requirement = f"be in 1 .. {num_experts}, the experts"
    require(1 <= top_k <= num_experts, name, "top_k", requirement, top_k)
    require(num_tokens >= 0, name, "num_tokens", "be >= 0", num_tokens)
    on_rank = np.diff(placement.maps.physical_offsets)
    on_node = np.bincount(topology.maps.rank_to_node, weights=on_rank).astype(int)

    def tokens_that_reach(num_there: int) -> float:
        avoid = math.comb(num_experts - num_there, top_k) / math.comb(num_experts, top_k)
        return num_tokens * (1 - avoid)

    shape = (topology.num_ranks, 1)
    return ExchangeCounts(
        rows=np.tile(num_tokens * top_k * on_rank / num_experts, shape),
        rank_rows=np.tile([tokens_that_reach(count) for count in on_rank.tolist()], shape),
        node_rows=np.tile([tokens_that_reach(count) for count in on_node.tolist()], shape),
    )


def dedup_factor(top_k: int, num_nodes: int) -> float:
    """How many times fewer rows cross with de-duplication: ``K / (N (1 - (1 - 1/N)^K))``.

    Exact where the K choices of a token fall on the N nodes uniformly and independently; experts of
    a token differ, so real routings save a little less (:func:`expect_rows` is exact for them).

    Source: X-MoE (2508.13337) section on redundancy; its 75.1 % for N = 2, K = 8 is 1 - 1/4.016.

    Example:
        >>> round(dedup_factor(8, 2), 3), round(dedup_factor(8, 4), 3), dedup_factor(1, 4)
        (4.016, 2.223, 1.0)
    """
    require(top_k >= 1, "dedup_factor", "top_k", "be at least 1", top_k)
    require(num_nodes >= 1, "dedup_factor", "num_nodes", "be at least 1", num_nodes)
    return top_k / (num_nodes * (1 - (1 - 1 / num_nodes) ** top_k))


def sum_by_node(topology: Topology, per_rank: CountArray) -> CountArray:
    """``[..., P]`` summed over the ranks of each node: ``[..., N]``."""
    maps = topology.maps
    return np.add.reduceat(per_rank[..., maps.ranks_by_node], maps.node_offsets[:-1], axis=-1)


def max_by_node(topology: Topology, per_rank: CountArray) -> CountArray:
    """``[..., P]``, the largest on each node: ``[..., N]``."""
    maps = topology.maps
    return np.maximum.reduceat(per_rank[..., maps.ranks_by_node], maps.node_offsets[:-1], axis=-1)
