"""Seconds of collectives and of sends between stages, on a group of ranks with a stride.

A group is ``size`` ranks, ``stride`` apart, in the world order (pp, dp, ep, tp). Bandwidth terms
only count what leaves a rank; ranks that share a NIC share it. Source of the forms: Thakur et al.
2005 (ring and reduce-scatter/all-gather), 2.0 * (n - 1) / n for an all-reduce.

Pure: no torch, no process group.
"""

from dataclasses import dataclass

from piper_kernels.errors import require
from piper_kernels.pipeline.platform import Platform


@dataclass(frozen=True, kw_only=True, slots=True)
class Group:
    """Ranks that do a collective together.

    Attributes:
        size: of the group.
        stride: from one to the next, in ranks.
        world_size: of the job.
    """

    size: int
    stride: int
    world_size: int

    def __post_init__(self) -> None:
        span = (self.size - 1) * self.stride + 1
        fits = self.size >= 1 and self.stride >= 1 and span <= self.world_size
        given = f"{self.size} ranks, {self.stride} apart"
        require(fits, "Group", "size", f"fit into {self.world_size} ranks", given)

    @property
    def run(self) -> int:
        """Consecutive ranks within which such groups lie."""
        return self.size * self.stride

    def num_per_node(self, gpus_per_node: int) -> int:
        """Ranks of the group that share a node."""
        return max(1, min(self.size, gpus_per_node // self.stride))


def all_reduce_s(platform: Platform, group: Group, num_bytes: float) -> float:
    """All-reduce of ``num_bytes`` on every rank: in the node, between nodes, in the node.

    Example:
        >>> from piper_kernels.pipeline.platform_presets import load_platform
        >>> eight = Group(size=8, stride=1, world_size=8)
        >>> us = all_reduce_s(load_platform("h100"), eight, 450e6) * 1e6
        >>> round(us)  # two passes of 7/8 of 1 ms, and 20 us each
        1790
    """
    return 2 * reduce_scatter_s(platform, group, num_bytes)


def reduce_scatter_s(platform: Platform, group: Group, num_bytes: float) -> float:
    """Reduce-scatter of ``num_bytes``, or the all-gather that ends with as many: one way.

    Inside a node each rank passes (n - 1) / n of the bytes; across N nodes the part that is then
    its own, (N - 1) / N of it, over its share of a NIC.
    """
    if group.size == 1 or not num_bytes:
        return 0.0
    inside = group.num_per_node(platform.gpus_per_node)
    outside = -(-group.size // inside)
    seconds = 0.0
    if inside > 1:
        link = platform.topology.links.node
        seconds += link.latency_s + num_bytes * (inside - 1) / inside / link.bandwidth_bytes_per_s
    if outside > 1:
        link = platform.link_over(group.run, group.world_size)
        part = num_bytes / inside
        rate = link.bandwidth_bytes_per_s / platform.gpus_per_nic
        if link is platform.topology.links.node:
            rate = link.bandwidth_bytes_per_s
        seconds += link.latency_s + part * (outside - 1) / outside / rate
    return seconds


def send_s(platform: Platform, stage_width: int, world_size: int, num_bytes: float) -> float:
    """From each rank of a stage to its peer in the next one, all at once.

    Args:
        platform: to run on.
        stage_width: ranks of a stage, hence the distance to the peer.
        world_size: of the job.
        num_bytes: of one rank.
    """
    link = platform.link_over(2 * stage_width, world_size)
    is_inside = link is platform.topology.links.node
    share = 1 if is_inside else min(platform.gpus_per_nic, stage_width)
    return link.latency_s + share * float(link.busy_s(num_bytes))
