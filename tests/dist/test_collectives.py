"""Names across torch releases, and groups in every form."""

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh

from piper_kernels.dist.collectives import all_gather_single, resolve_group
from piper_kernels.errors import ConfigError
from piper_kernels.testing import run_ranks


def gather_and_resolve() -> list[bool]:
    rank = dist.get_rank()
    gathered = torch.empty(2, dtype=torch.int64)
    # warnings are errors here: the newest name must be the one that is called
    all_gather_single(gathered, torch.tensor([rank]))
    mesh = init_device_mesh("cpu", (2,))
    own = dist.new_group([0])
    found = [gathered.tolist() == [0, 1], resolve_group("f", None) is dist.group.WORLD]
    found.append(resolve_group("f", mesh).size() == 2)
    try:
        found.append(resolve_group("f", own).size() == 1)
    except ConfigError as error:
        found.append(rank == 1 and "f: group must contain this rank" in str(error))
    return found


def test_collectives_and_groups() -> None:
    assert run_ranks(gather_and_resolve, 2) == [[True] * 4] * 2


def test_resolve_group_needs_one() -> None:
    with pytest.raises(ConfigError, match="f: group must exist, got no process group"):
        resolve_group("f", None)
