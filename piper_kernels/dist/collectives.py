"""torch.distributed under the names of its newest release, and groups however they are given.

torch 2.13 renames collectives and warns of the old names; earlier releases have only those.
"""

from collections.abc import Callable
from typing import Any

import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

from piper_kernels.errors import ConfigError, instruction, require

GroupLike = dist.ProcessGroup | DeviceMesh | None


def _under(new_name: str, old_name: str) -> Callable[..., Any]:
    collective: Callable[..., Any] = getattr(dist, new_name, None) or getattr(dist, old_name)
    return collective


all_gather_single = _under("all_gather_single", "all_gather_into_tensor")


def resolve_group(function: str, group: GroupLike) -> dist.ProcessGroup:
    """The process group that is meant.

    Args:
        function: for the message.
        group: a process group, a one-dimensional mesh, or ``None`` for the default group.

    Raises:
        ConfigError: a mesh of several dims, no process group at all, or a group without this rank.
    """
    if isinstance(group, DeviceMesh):
        requirement = "be one-dimensional"
        remedy = 'Select its axis, e.g. mesh["ep"].'
        require(group.ndim == 1, function, "group", requirement, f"{group.ndim} dims", remedy)
        group = group.get_group()
    if group is None:
        remedy = "Start with torchrun and call torch.distributed.init_process_group() first."
        is_ready = dist.is_available() and dist.is_initialized()
        require(is_ready, function, "group", "exist", "no process group", remedy)
        group = dist.group.WORLD
    if not isinstance(group, dist.ProcessGroup):
        remedy = "Call it on the ranks of the group only."
        name = type(group).__name__
        raise ConfigError(instruction(function, "group", "contain this rank", name, remedy))
    return group
