"""The process groups of a mesh (pp, dp, ep, tp), built with torch's DeviceMesh.

The same ranks are seen twice, because experts and everything else are replicated differently: an
expert by the dp ranks, a dense parameter by all dp * ep ranks of its stage. So there are two device
meshes over one layout, and each process group belongs to one of them.
"""

from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

from piper_kernels.dist.mesh_layout import MeshLayout
from piper_kernels.errors import PlanError, require


@dataclass(frozen=True, kw_only=True, slots=True)
class ParallelMesh:
    """A layout with its process groups, as one rank sees them.

    Attributes:
        layout: sizes and places.
        rank: this rank.
        experts: device mesh ``(pp, dp, ep, tp)``: for expert parameters.
        dense: device mesh ``(pp, replicas, tp)`` of the same ranks: for everything else.
    """

    layout: MeshLayout
    rank: int
    experts: DeviceMesh
    dense: DeviceMesh

    @property
    def pp_group(self) -> dist.ProcessGroup:
        """Ranks that hold the other stages of this rank's pipeline."""
        return self.experts.get_group("pp")

    @property
    def dp_group(self) -> dist.ProcessGroup:
        """Ranks that hold the same experts: their gradients are summed over it."""
        return self.experts.get_group("dp")

    @property
    def ep_group(self) -> dist.ProcessGroup:
        """Ranks that share this layer's experts: rows are exchanged in it."""
        return self.experts.get_group("ep")

    @property
    def tp_group(self) -> dist.ProcessGroup:
        """Ranks that work on the same tokens."""
        return self.experts.get_group("tp")

    @property
    def replica_group(self) -> dist.ProcessGroup:
        """Ranks that hold the same dense parameters: their gradients are summed over it."""
        return self.dense.get_group("replicas")

    @property
    def coordinates(self) -> dict[str, int]:
        """This rank's place, by axis."""
        return {str(axis): index for axis, index in self.layout.coordinates(self.rank).items()}

    def __str__(self) -> str:
        return self.layout.describe(self.rank)


def build_mesh(layout: MeshLayout, device_type: str = "cpu") -> ParallelMesh:
    """Make the process groups of a layout; every rank of the default group must call this.

    Args:
        layout: its product is the number of ranks.
        device_type: ``cpu`` or ``cuda``.

    Raises:
        PlanError: no default process group, or one of another size.

    Example:
        Under torchrun with 8 processes: ``build_mesh(MeshLayout(pp=2, ep=4)).ep_group``.
    """
    remedy = "Start with torchrun, and call torch.distributed.init_process_group first."
    is_ready = dist.is_available() and dist.is_initialized()
    name, argument = "build_mesh", "the default process group"
    require(is_ready, name, argument, "exist", "none", remedy, error=PlanError)
    world_size = dist.get_world_size()
    requirement = f"multiply to the {world_size} ranks that were started"
    product = f"{' * '.join(map(str, layout.shape))} = {layout.size}"
    remedy = f"Start {layout.size} ranks, or change an axis."
    fits = layout.size == world_size
    require(fits, name, "pp, dp, ep, tp", requirement, product, remedy, error=PlanError)
    ranks = torch.from_numpy(layout.ranks)
    experts = DeviceMesh(device_type, ranks, mesh_dim_names=("pp", "dp", "ep", "tp"))
    merged = ranks.reshape(layout.pp, layout.dp * layout.ep, layout.tp)
    dense = DeviceMesh(device_type, merged, mesh_dim_names=("pp", "replicas", "tp"))
    return ParallelMesh(layout=layout, rank=dist.get_rank(), experts=experts, dense=dense)
