"""ExchangeGroup: ranks that exchange rows, where they sit, and how an error names them.

Letters: P ranks of the group.
"""

import logging
from collections.abc import Sequence

import torch
import torch.distributed as dist

from piper_kernels.dist.algorithm_choice import AlgorithmChoice
from piper_kernels.dist.collectives import GroupLike, resolve_group
from piper_kernels.dist.halo_phases import Algorithm, missing_rails
from piper_kernels.dist.halo_routes import RankRoutes, rank_routes
from piper_kernels.dist.topology import Topology
from piper_kernels.dist.topology_presets import one_box
from piper_kernels.errors import DeviceError, instruction, require

logger = logging.getLogger(__name__)


class ExchangeGroup:
    """A process group with its topology. Build it once and pass it wherever a group is asked for.

    Args:
        group: a process group, a one-dimensional mesh, or ``None`` for the default group.
        topology: of the group's ranks, or of all ranks of the job, from which the group's are
            selected. ``None``: nothing is known about nodes, so exchanges are flat.
        timeout_s: how long one message may take, in seconds; ``None``: as long as the process
            group's own time-out says.

    Attributes:
        group: the process group.
        topology: of its ranks, in their order.
        rank: of this process in the group.
        global_ranks: ``[P]`` the group's ranks as the job numbers them.
        timeout_s: as given.
        has_one_topology: the ranks have compared their topologies.
        move_choice: what decides between flat and halo for rows that are no tokens.

    Raises:
        ConfigError: no process group, a topology that fits neither the group nor the job, or a
            time-out that is not positive.

    Example:
        ``ExchangeGroup(dist.new_group([2, 3]), topology=of_the_job, timeout_s=60)``
    """

    def __init__(
        self,
        group: GroupLike = None,
        topology: Topology | None = None,
        *,
        timeout_s: float | None = None,
    ) -> None:
        name = "ExchangeGroup"
        self.group = resolve_group(name, group)
        self.rank = self.group.rank()
        self.global_ranks = tuple(dist.get_process_group_ranks(self.group))
        self.topology = _fit_topology(topology, self.global_ranks)
        fits = timeout_s is None or timeout_s > 0
        require(fits, name, "timeout_s", "be above 0 or None", timeout_s)
        self.timeout_s = timeout_s
        self.topology_digest = self.topology.digest()
        self.has_one_topology = False
        self.move_choice = AlgorithmChoice(self.topology, ("flat", "halo"))
        self._routes: dict[tuple[Algorithm, bool], RankRoutes] = {}

    @property
    def num_ranks(self) -> int:
        """P."""
        return len(self.global_ranks)

    def check_device(self, function: str, argument: str, tensor: torch.Tensor) -> None:
        """Raise ``DeviceError`` unless the group's backend sends from the tensor's device."""
        backend = dist.get_backend(self.group)
        needed = {"gloo": "cpu", "nccl": "cuda", "xccl": "xpu"}.get(backend)
        if needed is not None and tensor.device.type != needed:
            requirement = f"be on {needed}, from which the group's backend {backend} sends"
            remedy = "Move it, or make a process group for its device."
            raise DeviceError(instruction(function, argument, requirement, tensor.device, remedy))

    def device_for(self, tensor: torch.Tensor) -> torch.device:
        """Where small integers must lie to travel: NCCL sends from the GPU only."""
        is_on_device = dist.get_backend(self.group) in ("nccl", "xccl")
        return tensor.device if is_on_device else torch.device("cpu")

    def routes(self, algorithm: Algorithm, *, is_far_first: bool = False) -> RankRoutes:
        """This rank's routes, worked out once for each algorithm."""
        key = algorithm, is_far_first
        if key not in self._routes:
            made = rank_routes(self.topology, self.rank, algorithm, is_far_first=is_far_first)
            self._routes[key] = made
            if algorithm != "flat" and self.rank == 0:
                for note in missing_rails(self.topology):
                    logger.warning("%s", note)
        return self._routes[key]

    def name(self, rank: int) -> str:
        """For people: ``rank 5 on node1``, the rank as the job numbers it."""
        node = self.topology.nodes[int(self.topology.maps.rank_to_node[rank])]
        return f"rank {self.global_ranks[rank]} on {node.host}"

    def where(self, phase: str) -> str:
        """The start of a message: this rank, its node, and the phase."""
        return f"{self.name(self.rank)}, phase {phase}"


def _fit_topology(topology: Topology | None, global_ranks: Sequence[int]) -> Topology:
    """The topology of the group, from one of the group or of the job."""
    num_ranks = len(global_ranks)
    if topology is None:
        return one_box(num_ranks)
    if topology.num_ranks == num_ranks:
        return topology
    num_all = dist.get_world_size()
    requirement = f"have the {num_ranks} ranks of the group, or the {num_all} of the job"
    remedy = "Is it the topology file of this job? Topology.select gives a sub-group's."
    fits = topology.num_ranks == num_all
    found = f"{topology.num_ranks} ranks"
    require(fits, "ExchangeGroup", "topology", requirement, found, remedy)
    return topology.select(list(global_ranks))
