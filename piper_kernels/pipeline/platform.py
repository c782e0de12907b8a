"""Platform: what one GPU of a machine can do, and how the machine connects them.

The schema of the platform file. Units are in the keys, unknown keys are refused with the nearest
known one. ``piper probe`` writes one for the machine at hand; ``platform_presets`` has known ones.

Pure: no torch, no process group.
"""

from typing import Any

from piper_kernels.dist.links import Link
from piper_kernels.dist.topology import Topology
from piper_kernels.errors import PlanError, require
from piper_kernels.pipeline.curve import Curve, check_curve
from piper_kernels.strict_model import (
    Fraction,
    NonNegativeFloat,
    NonNegativeInt,
    PositiveFloat,
    PositiveInt,
    StrictModel,
)


class Device(StrictModel):
    """One GPU (on Frontier one GCD), or whatever one rank computes with.

    Attributes:
        name: of the product.
        memory_bytes: of its own memory.
        reserved_bytes: of it, what drivers, libraries and fragmentation take from a job.
        peak_flops_per_s: of dense matrix products in 16 bit.
        memory_bandwidth_bytes_per_s: peak.
        memory_efficiency: share of it that large copies reach.
        num_compute_units: what a launch's tiles are spread over (SMs, CUs).
        gemm_tile_rows: rows of a matrix product's tile; with 1 rows are not rounded up.
        gemm_tile_columns: columns of it.
        gemm_efficiency: (smallest of a product's rows, columns and depth; share of the peak), once
            tiles and waves are full.
        attention_efficiency: (sequence length, share of the peak) of fused attention.
        launch_overhead_s: what a kernel costs whatever it does.
    """

    name: str
    memory_bytes: PositiveInt
    reserved_bytes: NonNegativeInt = 0
    peak_flops_per_s: PositiveFloat
    memory_bandwidth_bytes_per_s: PositiveFloat
    memory_efficiency: Fraction = 1.0
    num_compute_units: PositiveInt = 1
    gemm_tile_rows: PositiveInt = 1
    gemm_tile_columns: PositiveInt = 1
    gemm_efficiency: Curve = ()
    attention_efficiency: Curve = ()
    launch_overhead_s: NonNegativeFloat = 0.0

    def model_post_init(self, _: Any) -> None:
        """Check curves and shares."""
        check_curve("Device", "gemm_efficiency", self.gemm_efficiency)
        check_curve("Device", "attention_efficiency", self.attention_efficiency)
        share = self.memory_efficiency
        require(share > 0, "Device", "memory_efficiency", "be above 0", share)
        usable = self.reserved_bytes < self.memory_bytes
        requirement = f"be below memory_bytes = {self.memory_bytes}"
        require(usable, "Device", "reserved_bytes", requirement, self.reserved_bytes)

    @property
    def usable_bytes(self) -> int:
        """Memory that a job may fill."""
        return self.memory_bytes - self.reserved_bytes

    @property
    def copy_bytes_per_s(self) -> float:
        """Bytes read plus written each second by a large copy."""
        return self.memory_bandwidth_bytes_per_s * self.memory_efficiency

    @property
    def ridge_flops_per_byte(self) -> float:
        """Arithmetic intensity above which a product is bound by compute, not by memory."""
        return self.peak_flops_per_s / self.memory_bandwidth_bytes_per_s


class Platform(StrictModel):
    """A machine to plan for.

    Attributes:
        name: how reports call it.
        source: where the numbers come from, and which are assumed.
        device: every GPU of it.
        topology: one node at least. The planner repeats the first node as often as it needs.
        nodes_per_group: nodes in one switch group, for laying out more nodes.
        nodes_per_domain: nodes that one fast hop connects; expert groups stay inside.
        price_per_gpu_hour: for the cost of a token, in any currency; ``None`` if unknown.
    """

    name: str
    source: str
    device: Device
    topology: Topology
    nodes_per_group: PositiveInt
    nodes_per_domain: PositiveInt
    price_per_gpu_hour: NonNegativeFloat | None = None

    @property
    def gpus_per_node(self) -> int:
        """Ranks of the first node."""
        return len(self.topology.nodes[0].ranks)

    @property
    def gpus_per_nic(self) -> int:
        """Most GPUs that share a NIC of the first node."""
        nics = self.topology.nodes[0].nics
        return max(map(nics.count, nics))

    @property
    def gpus_per_domain(self) -> int:
        """GPUs that one fast hop connects."""
        return self.gpus_per_node * self.nodes_per_domain

    def lay_out(self, num_gpus: int) -> Topology:
        """The topology of the first ``num_gpus`` GPUs; the last node may be a part of one.

        Raises:
            PlanError: fewer than one GPU, or several nodes of a machine that describes one only.

        Example:
            >>> from piper_kernels.pipeline.platform_presets import load_platform
            >>> load_platform("frontier").lay_out(20).maps.node_sizes.tolist()
            [8, 8, 4]
        """
        name = "Platform.lay_out"
        require(num_gpus >= 1, name, "num_gpus", "be at least 1", num_gpus, error=PlanError)
        full, rest = divmod(num_gpus, self.gpus_per_node)
        sizes = [self.gpus_per_node] * full + [rest] * (rest > 0)
        groups = [f"group{n // self.nodes_per_group}" for n in range(len(sizes))]
        self.check_reach(num_gpus)
        return self.topology.lay_out(sizes, groups=groups)

    def check_reach(self, num_gpus: int) -> None:
        """Raise ``PlanError`` if so many GPUs need a link whose speed the file does not give."""
        links, per_node = self.topology.links, self.gpus_per_node
        per_group = per_node * self.nodes_per_group
        remedy = f"Give topology.links.group, or plan for at most {per_node} GPUs."
        requirement = f"be at most {per_node}, as {self.name} describes one node only"
        fits = num_gpus <= per_node or links.group is not None
        require(fits, "plan", "num_gpus", requirement, num_gpus, remedy, error=PlanError)
        remedy = f"Give topology.links.far, or plan for at most {per_group} GPUs."
        requirement = f"be at most {per_group}, as {self.name} describes one switch group only"
        fits = num_gpus <= per_group or links.far is not None
        require(fits, "plan", "num_gpus", requirement, num_gpus, remedy, error=PlanError)

    def link_over(self, span: int, num_gpus: int) -> Link:
        """The slowest link inside any of the aligned runs of ``span`` ranks among ``num_gpus``.

        Example:
            >>> from piper_kernels.pipeline.platform_presets import load_platform
            >>> h100 = load_platform("h100")
            >>> h100.link_over(4, 64).bandwidth_bytes_per_s, h100.link_over(6, 64) is h100.nic
            (450000000000.0, True)
        """
        links, per_node = self.topology.links, self.gpus_per_node
        if num_gpus <= per_node or per_node % span == 0:
            return links.node
        per_group = per_node * self.nodes_per_group
        is_near = num_gpus <= per_group or per_group % span == 0
        link = links.group if is_near else links.far
        assert link is not None, f"no link over {span} of {num_gpus} ranks: check_reach comes first"
        return link

    @property
    def nic(self) -> Link:
        """What a node's NIC does; the link inside the node where only one is described."""
        return self.topology.links.group or self.topology.links.node
