"""The groups of a mesh on real ranks: who sums with whom."""

from typing import Any

import pytest
import torch
import torch.distributed as dist

from piper_kernels.dist.mesh import build_mesh
from piper_kernels.dist.mesh_layout import MeshLayout
from piper_kernels.errors import PlanError
from piper_kernels.testing import run_ranks


def members(group: dist.ProcessGroup) -> list[int]:
    """Ranks of a group, found by talking to them."""
    found = torch.zeros(dist.get_world_size(), dtype=torch.int64)
    found[dist.get_rank()] = 1
    dist.all_reduce(found, group=group)
    return found.nonzero().flatten().tolist()


def who_is_with_me(layout: MeshLayout) -> dict[str, Any]:
    mesh = build_mesh(layout)
    names = ("pp", "dp", "ep", "tp", "replica")
    groups = {name: members(getattr(mesh, f"{name}_group")) for name in names}
    return {"groups": groups, "name": str(mesh), "place": mesh.coordinates}


def test_build_mesh_groups_the_layouts_ranks() -> None:
    layout = MeshLayout(pp=2, dp=1, ep=2, tp=2, rank_order=(7, 6, 5, 4, 3, 2, 1, 0))
    found = run_ranks(who_is_with_me, 8, layout)
    axes = {"pp": ["pp"], "dp": ["dp"], "ep": ["ep"], "tp": ["tp"], "replica": ["dp", "ep"]}
    for rank, seen in enumerate(found):
        for name, own_axes in axes.items():
            (want,) = (group for group in layout.groups(*own_axes) if rank in group)
            assert seen["groups"][name] == sorted(want), (rank, name)
        assert seen["place"] == layout.coordinates(rank)
    assert found[2]["name"] == "rank 2 (pp=1, ep=0, tp=1)"


def build(layout: MeshLayout) -> str:
    with pytest.raises(PlanError) as caught:
        build_mesh(layout)
    return str(caught.value)


def test_build_mesh_refuses_another_number_of_ranks() -> None:
    message = (
        "build_mesh: pp, dp, ep, tp must multiply to the 2 ranks that were started, "
        "got 2 * 1 * 2 * 1 = 4. Start 4 ranks, or change an axis."
    )
    assert run_ranks(build, 2, MeshLayout(pp=2, ep=2)) == [message] * 2


def test_build_mesh_refuses_without_a_process_group() -> None:
    with pytest.raises(PlanError, match=r"default process group must exist, got none. Start with"):
        build_mesh(MeshLayout())
