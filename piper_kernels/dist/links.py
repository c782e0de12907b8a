"""How fast each level of the network is: ports, and what switch groups share.

Pure: no torch, no process group.
"""

import itertools
from typing import Any, Literal, get_args

import numpy as np
from numpy.typing import ArrayLike, NDArray

from piper_kernels.errors import require
from piper_kernels.strict_model import (
    Fraction,
    NonNegativeFloat,
    PositiveFloat,
    PositiveInt,
    StrictModel,
)

Level = Literal["self", "node", "group", "far"]
LEVELS: tuple[Level, ...] = get_args(Level)
FloatArray = NDArray[np.float64]


class Link(StrictModel):
    """What one port of a level does, in each direction: LogGP's latency, bandwidth and gap.

    The port is a GPU's own inside a node, a NIC outside. ``k`` messages of ``b`` bytes each occupy
    it for ``k * (message_gap_s + b / (bandwidth_bytes_per_s * efficiency(b)))``, and the last one
    arrives ``latency_s`` later.

    Attributes:
        latency_s: from the end of sending to the end of receiving.
        bandwidth_bytes_per_s: of large messages.
        message_gap_s: what a message costs its port apart from its bytes.
        efficiency: ``(size_bytes, share of the bandwidth)``, sizes rising; between two points the
            share is linear in the logarithm of the size, beyond the ends it is constant. It tells
            what is left after latency and gap. Empty is 1 everywhere.

    Example:
        >>> link = Link(latency_s=1e-5, bandwidth_bytes_per_s=1e9, message_gap_s=1e-6)
        >>> round(link.seconds(4_000, 2) * 1e6, 3)  # 10 + 2 * (1 + 2) us
        16.0
    """

    latency_s: NonNegativeFloat
    bandwidth_bytes_per_s: PositiveFloat
    message_gap_s: NonNegativeFloat = 0.0
    efficiency: tuple[tuple[PositiveFloat, Fraction], ...] = ()

    def model_post_init(self, _: Any) -> None:
        """Check the curve."""
        sizes = [size for size, _ in self.efficiency]
        is_rising = all(a < b for a, b in itertools.pairwise(sizes))
        require(is_rising, "Link", "efficiency", "have rising sizes", sizes, "Sort the points.")
        shares = [share for _, share in self.efficiency]
        require(all(shares), "Link", "efficiency", "have shares above 0", shares)

    def efficiency_at(self, size_bytes: ArrayLike) -> FloatArray:
        """Share of the bandwidth that messages of ``size_bytes`` get, elementwise."""
        sizes = np.asarray(size_bytes, dtype=np.float64)
        if not self.efficiency:
            return np.ones_like(sizes)
        at, share = np.array(self.efficiency).T
        return np.interp(np.log(np.maximum(sizes, at[0])), np.log(at), share)

    def busy_s(self, size_bytes: ArrayLike) -> FloatArray:
        """Seconds for which one message of ``size_bytes`` occupies a port, elementwise."""
        sizes = np.asarray(size_bytes, dtype=np.float64)
        rate = self.bandwidth_bytes_per_s * self.efficiency_at(sizes)
        return self.message_gap_s + sizes / rate

    def seconds(self, num_bytes: float, num_messages: int = 1) -> float:
        """Seconds until ``num_bytes`` in ``num_messages`` equal messages have arrived."""
        each = self.busy_s(num_bytes / num_messages)
        return self.latency_s + num_messages * float(each)


class Links(StrictModel):
    """One :class:`Link` for each level. ``group`` and ``far`` may be absent where unused."""

    node: Link
    group: Link | None = None
    far: Link | None = None


class Fabric(StrictModel):
    """What switch groups share on their way to other groups.

    Attributes:
        kind: ``fat_tree`` (an uplink for each group) or ``dragonfly`` (also a direct link for each
            pair of groups, and packets that detour over a third group).
        uplink_bytes_per_s: of one group's links to all others, each direction.
        num_groups: groups of the whole machine, the job's or not; for ``dragonfly`` only.
        non_minimal_share: share of the far bytes that detour; for ``dragonfly`` only.
    """

    kind: Literal["fat_tree", "dragonfly"]
    uplink_bytes_per_s: PositiveFloat
    num_groups: PositiveInt | None = None
    non_minimal_share: Fraction = 0.0

    def model_post_init(self, _: Any) -> None:
        """Check that the fields belong to the kind."""
        is_dragonfly, detours = self.kind == "dragonfly", self.non_minimal_share
        has_pairs = self.num_groups is not None
        requirement = "be given for a dragonfly and for nothing else"
        require(has_pairs == is_dragonfly, "Fabric", "num_groups", requirement, self.num_groups)
        requirement = "be 0 for a fat_tree, and for fewer than 3 groups"
        fits = not detours or (self.num_groups or 0) >= 3
        remedy = "Only a dragonfly has a third group to detour over."
        require(fits, "Fabric", "non_minimal_share", requirement, detours, remedy)

    def uplink_capacity(self, num_job_groups: int) -> float:
        """Bytes/s that one group of a job can send to its other groups.

        Detours of the job's other groups also cross this group's links. By symmetry they are
        charged to the group's own far bytes: each takes ``1 + share * (G - 2) / (M - 2)`` of them,
        for a job on G of M groups.

        Example:
            >>> fabric = Fabric(
            ...     kind="dragonfly", uplink_bytes_per_s=9.0, num_groups=4, non_minimal_share=0.5)
            >>> fabric.uplink_capacity(2), fabric.uplink_capacity(4)  # 9 / 1, 9 / 1.5
            (9.0, 6.0)
        """
        return self.uplink_bytes_per_s / (1 + self._detours_through(num_job_groups))

    def pair_capacity(self, num_job_groups: int) -> float:
        """Bytes/s that one group can send to one other; infinite where only the uplink limits.

        The direct link of a pair is ``1 / (M - 1)`` of a group's uplink. It carries the bytes that
        do not detour, and twice the detours through a group, as these cross two links.

        Example:
            >>> fabric = Fabric(kind="dragonfly", uplink_bytes_per_s=9.0, num_groups=4)
            >>> fabric.pair_capacity(2)
            3.0
        """
        if self.num_groups is None:
            return float("inf")
        carried = 1 - self.non_minimal_share + 2 * self._detours_through(num_job_groups)
        direct = self.uplink_bytes_per_s / max(self.num_groups - 1, 1)
        return direct / carried if carried else float("inf")

    def _detours_through(self, num_job_groups: int) -> float:
        """Detouring bytes on one group's links, over its own far bytes."""
        if self.num_groups is None or self.num_groups < 3:
            return 0.0
        others = max(num_job_groups - 2, 0)
        return self.non_minimal_share * others / (self.num_groups - 2)
