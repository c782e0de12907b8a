"""What `piper simulate` runs: a layer's dispatch on a topology, with uniform or skewed experts.

Counts are expected ones: what a token's K experts would give on average, so that a run is the same
every time and takes no drawing of millions of tokens.

Pure: no torch, no process group. Letters: P ranks, N nodes, E experts, T tokens per rank, K experts
per token.
"""

from dataclasses import dataclass

import numpy as np

from piper_kernels.dist.exchange_counts import ExchangeCounts
from piper_kernels.dist.halo_phases import ALGORITHMS, Algorithm
from piper_kernels.dist.halo_plan import make_plan
from piper_kernels.dist.links import FloatArray
from piper_kernels.dist.placement_map import PlacementMap
from piper_kernels.dist.simulate import SimulationResult, simulate
from piper_kernels.dist.topology import Topology
from piper_kernels.errors import require

MOST_RANKS = 4096


@dataclass(frozen=True, kw_only=True, slots=True)
class Problem:
    """One dispatch.

    Attributes:
        topology: of the group that exchanges.
        num_experts: E, at least one a rank.
        num_tokens: T, on each rank.
        top_k: K.
        row_bytes: of one token's row.
        skew: Zipf exponent of the experts' popularity; 0 is uniform.
        seed: which experts are the popular ones.
        background_share: of the links between switch groups that other jobs use.
        flat_far_efficiency: as in :func:`simulate`.
    """

    topology: Topology
    num_experts: int
    num_tokens: int
    top_k: int
    row_bytes: float
    skew: float = 0.0
    seed: int = 0
    background_share: float = 0.0
    flat_far_efficiency: float = 1.0

    def __post_init__(self) -> None:
        name, num_ranks = "Problem", self.topology.num_ranks
        requirement = f"have at most {MOST_RANKS} ranks"
        require(num_ranks <= MOST_RANKS, name, "topology", requirement, num_ranks)
        requirement = f"be at least {num_ranks}, one a rank"
        require(self.num_experts >= num_ranks, name, "num_experts", requirement, self.num_experts)
        fits = 1 <= self.top_k <= self.num_experts
        require(fits, name, "top_k", f"be in 1 .. {self.num_experts}", self.top_k)
        require(self.num_tokens >= 1, name, "num_tokens", "be at least 1", self.num_tokens)
        require(self.row_bytes > 0, name, "row_bytes", "be above 0", self.row_bytes)
        require(0 <= self.skew <= 4, name, "skew", "be in 0 .. 4", self.skew)

    def counts(self) -> ExchangeCounts:
        """The expected counts."""
        popularity = zipf_popularity(self.num_experts, self.skew, self.seed)
        placement = PlacementMap.contiguous(self.num_experts, self.topology.num_ranks)
        return expected_counts(
            self.topology, placement, popularity, num_tokens=self.num_tokens, top_k=self.top_k
        )

    def run(self, algorithms: tuple[Algorithm, ...] = ALGORITHMS) -> tuple[SimulationResult, ...]:
        """Simulate the dispatch by each algorithm."""
        counts = self.counts()
        results = []
        for algorithm in algorithms:
            plan = make_plan(self.topology, counts, self.row_bytes, algorithm, has_blocks=False)
            result = simulate(
                plan,
                background_share=self.background_share,
                flat_far_efficiency=self.flat_far_efficiency,
            )
            results.append(result)
        return tuple(results)


def zipf_popularity(num_experts: int, skew: float, seed: int = 0) -> FloatArray:
    """``[E]`` share of the choices that each expert gets: the i-th most popular ``1 / i ** skew``.

    Example:
        >>> sorted(zipf_popularity(2, 1.0).round(3).tolist())
        [0.333, 0.667]
    """
    weights = 1 / np.arange(1, num_experts + 1) ** skew
    return np.random.default_rng(seed).permutation(weights / weights.sum())


def expected_counts(
    topology: Topology,
    placement: PlacementMap,
    popularity: FloatArray,
    *,
    num_tokens: int,
    top_k: int,
) -> ExchangeCounts:
    """Expected counts when each token draws K experts independently by their popularity.

    Real tokens draw *distinct* experts, so they reach slightly more ranks and nodes than this;
    :func:`expect_rows` is exact for that, and for uniform popularity only.

    Example:
        Two nodes of one rank and K = 2: a quarter of the tokens stays away from each.

        >>> from piper_kernels.dist.topology_presets import frontier
        >>> topology = frontier(1).lay_out((1, 1))
        >>> counts = expected_counts(topology, PlacementMap.contiguous(2, 2), np.full(2, 0.5),
        ...                          num_tokens=8, top_k=2)
        >>> counts.rows[0].tolist(), counts.node_rows[0].tolist()
        ([8.0, 8.0], [6.0, 6.0])
    """
    placement.check_topology("expected_counts", topology)
    ranks = placement.maps.physical_to_rank
    on_rank = np.bincount(ranks, weights=popularity, minlength=topology.num_ranks)
    nodes = topology.maps.rank_to_node
    on_node = np.bincount(nodes, weights=on_rank, minlength=topology.num_nodes)
    shape = (topology.num_ranks, 1)
    return ExchangeCounts(
        rows=np.tile(num_tokens * top_k * on_rank, shape),
        rank_rows=np.tile(num_tokens * (1 - (1 - on_rank) ** top_k), shape),
        node_rows=np.tile(num_tokens * (1 - (1 - on_node) ** top_k), shape),
    )
