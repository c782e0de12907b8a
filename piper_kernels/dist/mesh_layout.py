"""Who is where in the mesh (pp, dp, ep, tp): coordinates, groups, and how far groups reach.

Pure: no torch, no process group.
"""

import math
from collections.abc import Mapping
from typing import Any, Literal, Self, get_args

import numpy as np

from piper_kernels.dist.links import LEVELS, Level
from piper_kernels.dist.topology import IntArray, Topology
from piper_kernels.dist.topology_advice import advise_rank_order
from piper_kernels.errors import PlanError, did_you_mean, require
from piper_kernels.strict_model import NonNegativeInt, PositiveInt, StrictModel

Axis = Literal["pp", "dp", "ep", "tp"]
AXES: tuple[Axis, ...] = get_args(Axis)


class MeshLayout(StrictModel):
    """Sizes of the axes, and the rank at each coordinate; the last axis changes fastest.

    Attributes:
        pp: pipeline stages.
        dp: replicas of the experts.
        ep: ranks that share the experts of a layer.
        tp: ranks that share each token.
        rank_order: ``rank_order[i]`` is the rank at place i of the mesh; empty is 0, 1, 2, ...

    Example:
        >>> layout = MeshLayout(pp=2, ep=2)
        >>> layout.coordinates(3), layout.rank_at(pp=1, ep=0)
        ({'pp': 1, 'dp': 0, 'ep': 1, 'tp': 0}, 2)
    """

    pp: PositiveInt = 1
    dp: PositiveInt = 1
    ep: PositiveInt = 1
    tp: PositiveInt = 1
    rank_order: tuple[NonNegativeInt, ...] = ()

    def model_post_init(self, _: Any) -> None:
        """Check that the order names each rank once."""
        requirement = f"name each of the ranks 0 .. {self.size - 1} once, or be empty"
        fits = not self.rank_order or sorted(self.rank_order) == list(range(self.size))
        require(fits, "MeshLayout", "rank_order", requirement, self.rank_order)

    @classmethod
    def near(
        cls, topology: Topology, *, pp: int = 1, dp: int = 1, ep: int = 1, tp: int = 1
    ) -> Self:
        """The layout whose expert groups (ep * tp ranks) reach no further than they must.

        Args:
            topology: of all ranks.
            pp: pipeline stages.
            dp: replicas of the experts.
            ep: ranks that share experts.
            tp: ranks that share tokens.

        Raises:
            PlanError: the product is not the topology's number of ranks.

        Example:
            >>> from piper_kernels.dist.topology_presets import frontier
            >>> cyclic = frontier(2).select([r // 2 + r % 2 * 8 for r in range(16)])
            >>> MeshLayout.near(cyclic, pp=2, ep=8).rank_order[:4]
            (0, 2, 4, 6)
        """
        layout = cls(pp=pp, dp=dp, ep=ep, tp=tp)
        remedy = "Change an axis, or start another number of ranks."
        requirement = f"multiply to the {topology.num_ranks} ranks"
        fits = layout.size == topology.num_ranks
        given = f"{pp} * {dp} * {ep} * {tp} = {layout.size}"
        name, axes = "MeshLayout.near", "pp, dp, ep, tp"
        require(fits, name, axes, requirement, given, remedy, error=PlanError)
        order = advise_rank_order(topology, ep * tp).rank_order
        return layout if order == tuple(range(layout.size)) else layout.replace(rank_order=order)

    @property
    def size(self) -> int:
        """Ranks in all."""
        return math.prod(self.shape)

    @property
    def shape(self) -> tuple[int, int, int, int]:
        """``(pp, dp, ep, tp)``."""
        return self.pp, self.dp, self.ep, self.tp

    @property
    def ranks(self) -> IntArray:
        """``[pp, dp, ep, tp]`` the rank at each coordinate."""
        order = self.rank_order or tuple(range(self.size))
        return np.array(order, dtype=np.int64).reshape(self.shape)

    def coordinates(self, rank: int) -> dict[Axis, int]:
        """Where a rank is.

        Raises:
            PlanError: no such rank.
        """
        requirement = f"be in 0 .. {self.size - 1}"
        fits = 0 <= rank < self.size
        require(fits, "MeshLayout.coordinates", "rank", requirement, rank, error=PlanError)
        place = self.rank_order.index(rank) if self.rank_order else rank
        where = np.unravel_index(place, self.shape)
        return {axis: int(index) for axis, index in zip(AXES, where, strict=True)}

    def rank_at(self, **coordinates: int) -> int:
        """The rank at coordinates; axes that are not named are 0.

        Raises:
            PlanError: an unknown axis, or a coordinate outside its axis.
        """
        name = "MeshLayout.rank_at"
        _check_axes(name, coordinates)
        where = [coordinates.get(axis, 0) for axis in AXES]
        for axis, index, size in zip(AXES, where, self.shape, strict=True):
            fits = 0 <= index < size
            require(fits, name, axis, f"be in 0 .. {size - 1}", index, error=PlanError)
        return int(self.ranks[tuple(where)])

    def groups(self, *axes: Axis) -> tuple[tuple[int, ...], ...]:
        """All groups of ranks that differ in the given axes only, each in mesh order.

        Raises:
            PlanError: an unknown axis.

        Example:
            >>> MeshLayout(pp=2, ep=2).groups("ep")
            ((0, 1), (2, 3))
            >>> MeshLayout(dp=2, ep=2).groups("dp", "ep")
            ((0, 1, 2, 3),)
        """
        _check_axes("MeshLayout.groups", dict.fromkeys(axes, 0))
        inside = [index for index, axis in enumerate(AXES) if axis in axes]
        outside = [index for index in range(len(AXES)) if index not in inside]
        width = math.prod(self.shape[index] for index in inside)
        rows = self.ranks.transpose(outside + inside).reshape(-1, width)
        return tuple(tuple(row) for row in rows.tolist())

    def reach(self, topology: Topology, *axes: Axis) -> dict[Level, int]:
        """How many groups of the given axes reach each level at most.

        Raises:
            PlanError: an unknown axis, or a topology with another number of ranks.

        Example:
            >>> from piper_kernels.dist.topology_presets import frontier
            >>> MeshLayout(pp=2, ep=8).reach(frontier(2), "ep")
            {'self': 0, 'node': 2, 'group': 0, 'far': 0}
        """
        requirement = f"have the mesh's {self.size} ranks"
        num_ranks, name = topology.num_ranks, "MeshLayout.reach"
        require(num_ranks == self.size, name, "topology", requirement, num_ranks, error=PlanError)
        counts = dict.fromkeys(LEVELS, 0)
        for group in self.groups(*axes):
            members = np.array(group)
            furthest = int(topology.distances(members[:, None], members[None, :]).max())
            counts[LEVELS[furthest]] += 1
        return counts

    def describe(self, rank: int) -> str:
        """How a message names a rank.

        Example:
            >>> MeshLayout(pp=2, ep=2).describe(3)
            'rank 3 (pp=1, ep=1)'
        """
        where = self.coordinates(rank)
        sizes = dict(zip(AXES, self.shape, strict=True))
        named = ", ".join(f"{axis}={where[axis]}" for axis in AXES if sizes[axis] > 1)
        return f"rank {rank} ({named})" if named else f"rank {rank}"


def _check_axes(function: str, given: Mapping[str, int]) -> None:
    for axis in given:
        remedy = did_you_mean(axis, AXES)
        require(axis in AXES, function, "axis", f"be one of {AXES}", axis, remedy, error=PlanError)
