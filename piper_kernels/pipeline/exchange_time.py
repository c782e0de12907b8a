"""Seconds of the token exchange of one layer, from the traffic model, and who gets how many rows.

Tokens choose experts evenly, or by given shares, or as a run recorded. The exchange runs inside one
expert group; every group of an aligned mesh is like the first one.

Pure: no torch, no process group. Letters: E experts, K top_k, T tokens on each rank, P ranks.
"""

import functools
import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Self

import numpy as np

from piper_kernels.dist.exchange_counts import ExchangeCounts, expect_rows, sum_by_node
from piper_kernels.dist.halo_phases import ALGORITHMS, Algorithm
from piper_kernels.dist.links import FloatArray
from piper_kernels.dist.placement_map import PlacementMap
from piper_kernels.dist.topology import Topology
from piper_kernels.dist.traffic import Prediction, choose
from piper_kernels.dist.traffic_tasks import Traffic
from piper_kernels.errors import ConfigError, PlanError, require
from piper_kernels.pipeline.model_description import Experts
from piper_kernels.pipeline.platform import Platform

CHUNK_OPTIONS = (1, 2, 4, 8)


@dataclass(frozen=True, kw_only=True, slots=True)
class ExpertLoad:
    """Share of all routed rows that each expert gets.

    Attributes:
        shares: ``[E]``, sum 1.

    Example:
        >>> load = ExpertLoad.from_counts([3, 1, 2, 2])
        >>> load.shares, load.imbalance(2), load.imbalance(4)
        ((0.375, 0.125, 0.25, 0.25), 1.0, 1.5)
    """

    shares: tuple[float, ...]

    @classmethod
    def from_counts(cls, counts: Sequence[float]) -> Self:
        """From recorded rows per expert, e.g. summed over the steps of a run.

        Raises:
            ConfigError: no count, a negative or non-finite one, or nothing but zeros.
        """
        fits = len(counts) > 0 and all(0 <= count < math.inf for count in counts)
        requirement = "be numbers >= 0, one for each expert"
        require(fits, "ExpertLoad.from_counts", "counts", requirement, counts)
        total = sum(counts)
        require(total > 0, "ExpertLoad.from_counts", "counts", "have a row at least", counts)
        return cls(shares=tuple(count / total for count in counts))

    def imbalance(self, num_ranks: int) -> float:
        """Rows of the busiest rank over the mean, experts placed contiguously."""
        return float(max(self.rank_shares(num_ranks)) * num_ranks)

    def rank_shares(self, num_ranks: int) -> FloatArray:
        """``[P]`` share of each rank."""
        placement = PlacementMap.contiguous(len(self.shares), num_ranks)
        return np.array([sum(self.shares[e] for e in experts) for experts in placement.slots])


@dataclass(frozen=True, kw_only=True, slots=True)
class ExchangeTime:
    """One layer's exchange in one direction of the step (forward, or backward).

    Attributes:
        visible_s: what it adds to the time of the experts, after all overlap.
        prediction: of the traffic model, the experts included.
        reason: why this way of exchanging.
    """

    visible_s: float
    prediction: Prediction
    reason: str


class ExchangePrices:
    """Prices exchanges on one platform, each setting once.

    Args:
        platform: to run on.
        load: of the experts; ``None`` is balanced.
        algorithms: those allowed.
        chunk_options: numbers of chunks allowed.
    """

    def __init__(
        self,
        platform: Platform,
        *,
        load: ExpertLoad | None = None,
        algorithms: tuple[Algorithm, ...] = ALGORITHMS,
        chunk_options: tuple[int, ...] = CHUNK_OPTIONS,
    ) -> None:
        self.platform = platform
        self.load = load
        self.algorithms = algorithms
        self.chunk_options = chunk_options
        self._price = functools.cache(self._price_once)

    def imbalance(self, experts: Experts, ep_size: int) -> float:
        """Rows of the busiest rank over the mean."""
        if self.load is None or ep_size == 1:
            # contiguous blocks of different length: the longest is the busiest
            return math.ceil(experts.num_experts / ep_size) * ep_size / experts.num_experts
        self._check_load(experts)
        return self.load.imbalance(ep_size)

    def price(
        self,
        experts: Experts,
        *,
        hidden_size: int,
        ep_size: int,
        tp_size: int,
        num_tokens: int,
        expert_s: float,
    ) -> ExchangeTime:
        """The fastest allowed exchange of a layer in bf16, dispatch and combine.

        Args:
            experts: of the layer.
            hidden_size: of the model.
            ep_size: P, ranks of the expert group, at most E.
            tp_size: ranks that share each token.
            num_tokens: T on each rank.
            expert_s: of the busiest rank's experts, which the exchange overlaps.

        Raises:
            PlanError: more ranks than experts.
        """
        requirement = f"be at most the {experts.num_experts} experts"
        fits = ep_size <= experts.num_experts
        require(fits, "ExchangePrices.price", "ep_size", requirement, ep_size, error=PlanError)
        sizes = (hidden_size, experts.num_experts, experts.top_k)
        # experts to four digits: prices of almost equal settings are shared
        return self._price(sizes, ep_size, tp_size, num_tokens, float(f"{expert_s:.3e}"))

    def _price_once(
        self,
        sizes: tuple[int, int, int],
        ep_size: int,
        tp_size: int,
        num_tokens: int,
        expert_s: float,
    ) -> ExchangeTime:
        hidden_size, num_experts, top_k = sizes
        topology = self.platform.lay_out(ep_size * tp_size)
        part = topology
        if tp_size > 1:
            part = topology.select(range(0, topology.num_ranks, tp_size))
        traffic = Traffic(
            topology=topology,
            counts=self._counts(part, num_experts, num_tokens, top_k),
            dispatch_row_bytes=2.0 * hidden_size,
            combine_row_bytes=2.0 * hidden_size,
            top_k=top_k,
            tp_size=tp_size,
            expert_s=expert_s,
        )
        choice = choose(traffic, algorithms=self.algorithms, chunk_options=self.chunk_options)
        return ExchangeTime(
            visible_s=max(choice.best.seconds - expert_s, 0.0),
            prediction=choice.best,
            reason=choice.reason,
        )

    def _counts(
        self, topology: Topology, num_experts: int, num_tokens: int, top_k: int
    ) -> ExchangeCounts:
        if self.load is None:
            placement = PlacementMap.contiguous(num_experts, topology.num_ranks)
            return expect_rows(topology, placement, num_tokens, top_k)
        shares = self.load.rank_shares(topology.num_ranks)
        on_node = np.minimum(sum_by_node(topology, shares), 1.0)

        def reach(share: FloatArray) -> list[float]:
            # choices taken as independent: exact for K = 1, else a little too many distinct
            return list(num_tokens * (1 - (1 - share) ** top_k))

        shape = (topology.num_ranks, 1)
        return ExchangeCounts(
            rows=np.tile(num_tokens * top_k * shares, shape),
            rank_rows=np.tile(reach(np.minimum(shares, 1.0)), shape),
            node_rows=np.tile(reach(on_node), shape),
        )

    def _check_load(self, experts: Experts) -> None:
        assert self.load is not None
        given = len(self.load.shares)
        if given != experts.num_experts:
            raise ConfigError(
                f"plan: load must have one share for each of the {experts.num_experts} experts, "
                f"got {given}. Record it on this model."
            )
