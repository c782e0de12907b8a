"""What each expert costs each rank: the objective of every placement.

A placement is judged by its slowest rank. What a rank needs is the sum over its experts of
``seconds[expert, rank]``: the expert's GEMMs, the same on every rank, and if the traffic is given
the time in which the rank's port receives the expert's rows and sends its outputs back, which is
less where the rows come from near.

Pure: no torch, no process group. Letters: E experts, P ranks.
"""

from dataclasses import dataclass
from typing import Self

import numpy as np
from numpy.typing import ArrayLike

from piper_kernels.dist.links import LEVELS, FloatArray
from piper_kernels.dist.placement_map import PlacementMap
from piper_kernels.dist.topology import Topology
from piper_kernels.errors import require


def clean_loads(loads: ArrayLike, function: str, num_dims: int = 1) -> FloatArray:
    """Loads as fp64, with NaN (not known) replaced by the mean of the known ones of its row.

    Args:
        loads: rows routed to each expert, ``[..., E]``.
        function: the caller, for the message.
        num_dims: how many dims they must have.

    Raises:
        ConfigError: a load is negative or infinite, there is none, or the dims are others.

    Example:
        >>> clean_loads([1.0, float("nan"), 5.0], "f").tolist()
        [1.0, 3.0, 5.0]
    """
    array = np.asarray(loads, dtype=np.float64)
    fits = array.ndim == num_dims and array.shape[-1] > 0
    requirement = f"have {num_dims} dims, the last one E >= 1"
    require(fits, function, "loads", requirement, f"shape {array.shape}")
    is_bad = (array < 0) | np.isinf(array)
    first = np.argwhere(is_bad)[:1].tolist()
    found = f"{array[tuple(first[0])]} at {first[0]}" if first else ""
    require(not first, function, "loads", "be finite counts >= 0, or NaN", found)
    is_known = ~np.isnan(array)
    known = np.where(is_known, array, 0.0)
    mean = known.sum(-1, keepdims=True) / np.maximum(is_known.sum(-1, keepdims=True), 1)
    return np.where(is_known, array, mean)


@dataclass(frozen=True, slots=True, eq=False)
class ExpertCosts:
    """Seconds that all rows of an expert cost a rank.

    Attributes:
        seconds: ``[E, P]`` fp64. A copy of an expert with n copies costs one n-th of it: tokens are
            dealt out evenly, which ignores that a token prefers a copy on its own node.
    """

    seconds: FloatArray

    @classmethod
    def from_loads(cls, loads: ArrayLike, num_ranks: int, *, seconds_per_row: float = 1.0) -> Self:
        """Costs that are the same on every rank.

        Args:
            loads: ``[E]`` rows of each expert per step; NaN counts as the mean of the others.
            num_ranks: P.
            seconds_per_row: of the expert's GEMMs; 1 makes costs rows.

        Raises:
            ConfigError: a load is negative or infinite, or there are none.

        Example:
            >>> ExpertCosts.from_loads([3, 1], 2).seconds.tolist()
            [[3.0, 3.0], [1.0, 1.0]]
        """
        name = "ExpertCosts.from_loads"
        require(num_ranks >= 1, name, "num_ranks", "be at least 1", num_ranks)
        column = clean_loads(loads, name)[:, None] * seconds_per_row
        return cls(np.repeat(column, num_ranks, axis=1))

    @classmethod
    def from_traffic(
        cls, counts: ArrayLike, topology: Topology, *, seconds_per_row: float, row_bytes: int
    ) -> Self:
        """Costs that also hold the exchange: rows that come from afar take the port longer.

        Args:
            counts: ``[P, E]`` rows that each rank routes to each expert.
            topology: of the P ranks.
            seconds_per_row: of the expert's GEMMs.
            row_bytes: of one row; it is received, and its output sent back.

        Raises:
            ConfigError: a count is negative or infinite, or P is not the topology's.

        Example:
            >>> from piper_kernels.dist.topology_presets import one_box
            >>> box = one_box(2)
            >>> costs = ExpertCosts.from_traffic(
            ...     [[4, 0], [0, 4]], box, seconds_per_row=1.0, row_bytes=0)
            >>> costs.seconds.tolist()
            [[4.0, 4.0], [4.0, 4.0]]
        """
        name = "ExpertCosts.from_traffic"
        rows = clean_loads(counts, name, num_dims=2)
        num_ranks = topology.num_ranks
        requirement = f"have a row for each of the topology's {num_ranks} ranks"
        require(len(rows) == num_ranks, name, "counts", requirement, len(rows))
        ranks = np.arange(num_ranks)
        distances = topology.distances(ranks[:, None], ranks[None, :])
        per_byte = np.zeros(len(LEVELS))
        for index in np.unique(distances[distances > 0]).tolist():
            per_byte[index] = 1 / topology.link(LEVELS[index]).bandwidth_bytes_per_s
        exchange_s = rows.T @ per_byte[distances] * (2 * row_bytes)
        return cls(rows.sum(0)[:, None] * seconds_per_row + exchange_s)

    @property
    def num_experts(self) -> int:
        """E."""
        return self.seconds.shape[0]

    @property
    def num_ranks(self) -> int:
        """P."""
        return self.seconds.shape[1]

    def check(self, function: str, placement: PlacementMap) -> None:
        """Raise ``ConfigError`` unless these are the costs of the placement's experts and ranks."""
        want = (placement.num_experts, placement.num_ranks)
        requirement = f"be for the placement's {want[0]} experts and {want[1]} ranks"
        given = f"{self.num_experts} experts and {self.num_ranks} ranks"
        require(self.seconds.shape == want, function, "costs", requirement, given)

    def of_ranks(self, placement: PlacementMap) -> FloatArray:
        """``[P]`` seconds that each rank needs.

        Raises:
            ConfigError: the placement has other experts or ranks.

        Example:
            >>> placement = PlacementMap(num_experts=2, slots=((0, 1), (0,)))
            >>> ExpertCosts.from_loads([6, 1], 2).of_ranks(placement).tolist()
            [4.0, 3.0]
        """
        self.check("ExpertCosts.of_ranks", placement)
        maps = placement.maps
        logical, ranks = maps.physical_to_logical, maps.physical_to_rank
        each = self.seconds[logical, ranks] / maps.num_copies[logical]
        seconds = np.zeros(self.num_ranks)
        np.add.at(seconds, ranks, each)
        return seconds


def imbalance(rank_seconds: ArrayLike) -> float:
    """The slowest rank over the mean; 1.0 is perfect balance, also where nobody has work.

    Example:
        >>> imbalance([3.0, 1.0]), imbalance([0.0, 0.0])
        (1.5, 1.0)
    """
    seconds = np.asarray(rank_seconds, dtype=np.float64)
    mean = float(seconds.mean())
    return float(seconds.max()) / mean if mean > 0 else 1.0
