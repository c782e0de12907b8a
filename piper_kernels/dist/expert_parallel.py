"""ExpertParallel: what a layer is told about the ranks that share its experts."""

import os
from dataclasses import dataclass
from typing import Literal

import torch.distributed as dist

from piper_kernels.config import check_choice
from piper_kernels.dist.collectives import GroupLike
from piper_kernels.dist.exchange_group import ExchangeGroup
from piper_kernels.dist.placement_map import PlacementMap
from piper_kernels.dist.topology import Topology
from piper_kernels.errors import ConfigError, instruction, require

Exchange = Literal["auto", "flat", "halo", "halo_dedup"]


@dataclass(frozen=True, slots=True, eq=False)
class ExpertParallel:
    """Expert parallelism of one or more layers: each rank holds some experts, tokens travel.

    Attributes:
        group: ranks that share the experts: a process group, a one-dimensional mesh, an
            :class:`ExchangeGroup`, or ``None`` for the default group (for one process without a
            group: no parallelism).
        topology: of the group's ranks, or of all ranks of the job; ``None``: nothing is known about
            nodes, and the exchange is flat.
        exchange: ``flat``, ``halo``, ``halo_dedup``, or ``auto``: what the traffic model says is
            fastest for the counts at hand.
        placement: which rank holds which experts; ``None``: contiguous blocks, which need not be
            equally large.
        timeout_s: for one message, in seconds; ``None``: the process group's own.

    Raises:
        ConfigError: an unknown exchange.
    """

    group: GroupLike | ExchangeGroup = None
    topology: Topology | None = None
    exchange: Exchange = "auto"
    placement: PlacementMap | None = None
    timeout_s: float | None = None

    def __post_init__(self) -> None:
        check_choice("ExpertParallel", "exchange", self.exchange, Exchange)

    def join(self) -> ExchangeGroup | None:
        """The exchange group; ``None`` if this process is alone.

        Raises:
            ConfigError: see :class:`ExchangeGroup`; also if the job has several ranks, by its
                environment, and no process group yet.
        """
        if isinstance(self.group, ExchangeGroup):
            given = self.topology if self.topology is not None else self.timeout_s
            requirement = "be None beside an ExchangeGroup, which has its own"
            require(given is None, "ExpertParallel", "topology, timeout_s", requirement, given)
            return self.group if self.group.num_ranks > 1 else None
        if self.group is None and not (dist.is_available() and dist.is_initialized()):
            num_ranks = os.environ.get("WORLD_SIZE", "1")
            remedy = "Call torch.distributed.init_process_group() before you build the layer."
            if num_ranks != "1":
                requirement = f"exist, for WORLD_SIZE = {num_ranks}"
                sentence = instruction("ExpertParallel", "group", requirement, "none", remedy)
                raise ConfigError(sentence)
            return None
        joined = ExchangeGroup(self.group, self.topology, timeout_s=self.timeout_s)
        return joined if joined.num_ranks > 1 else None

    def place(self, num_experts: int, num_ranks: int) -> PlacementMap:
        """The placement for a layer, checked.

        Raises:
            ConfigError: it is for another number of experts or ranks, leaves a rank without an
                expert, or there are more ranks than experts.
        """
        if self.placement is None:
            return PlacementMap.contiguous(num_experts, num_ranks)
        placement, name = self.placement, "ExpertParallel"
        requirement = f"place the layer's {num_experts} experts"
        found = f"one for {placement.num_experts}"
        fits = placement.num_experts == num_experts
        require(fits, name, "placement", requirement, found)
        requirement = f"place them on the group's {num_ranks} ranks"
        found = f"one for {placement.num_ranks}"
        require(placement.num_ranks == num_ranks, name, "placement", requirement, found)
        idle = [rank for rank, experts in enumerate(placement.slots) if not experts]
        remedy = "Use a smaller group."
        requirement = "give every rank an expert"
        require(not idle, name, "placement", requirement, f"none for {idle}", remedy)
        return placement
