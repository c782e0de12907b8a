"""Coordinates and groups by property, and expert groups that stay where they fit."""

import itertools

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from piper_kernels.dist.mesh_layout import AXES, MeshLayout
from piper_kernels.dist.topology_presets import dgx_h100_like, frontier
from piper_kernels.errors import ConfigError, PlanError


@st.composite
def layouts(draw: st.DrawFn) -> MeshLayout:
    """Any layout of up to 81 ranks, in any rank order."""
    sizes = {axis: draw(st.integers(1, 3)) for axis in AXES}
    layout = MeshLayout(**sizes)
    order = draw(st.none() | st.permutations(range(layout.size)))
    return layout if order is None else layout.replace(rank_order=tuple(order))


@given(layout=layouts())
def test_coordinates_and_rank_at_are_inverse(layout: MeshLayout) -> None:
    seen = set()
    for rank in range(layout.size):
        where = layout.coordinates(rank)
        assert layout.rank_at(**where) == rank
        seen.add(tuple(where.values()))
    assert seen == set(itertools.product(*map(range, layout.shape)))


@given(layout=layouts(), axes=st.sets(st.sampled_from(AXES), min_size=1))
def test_groups_are_the_ranks_that_differ_in_their_axes_only(layout, axes) -> None:
    groups = layout.groups(*axes)
    assert sorted(rank for group in groups for rank in group) == list(range(layout.size))
    for group in groups:
        places = [layout.coordinates(rank) for rank in group]
        fixed = {tuple(place[a] for a in AXES if a not in axes) for place in places}
        moving = [tuple(place[a] for a in AXES if a in axes) for place in places]
        assert len(fixed) == 1
        # in mesh order, each once
        assert moving == sorted(set(moving))


@given(
    nodes=st.integers(1, 4),
    exponents=st.tuples(st.integers(0, 3), st.integers(0, 2)),
    seed=st.integers(0, 99),
)
def test_near_keeps_expert_groups_where_they_fit(nodes, exponents, seed) -> None:
    # ranks dealt over the nodes in any order; ep * tp = 1 .. 32 on nodes of 8
    ep, tp = 2 ** exponents[0], 2 ** exponents[1]
    num_ranks = nodes * 8
    if num_ranks % (ep * tp):
        return
    order = np.random.default_rng(seed).permutation(num_ranks).tolist()
    topology = dgx_h100_like(nodes).select(order)
    layout = MeshLayout.near(topology, dp=num_ranks // (ep * tp), ep=ep, tp=tp)
    reach = layout.reach(topology, "ep", "tp")
    if ep * tp <= 8:
        assert reach["group"] == reach["far"] == 0


def test_near_keeps_a_group_that_needs_two_nodes_in_one_rack() -> None:
    # Frontier's nodes of 8 in groups of 2: blocks of 16 fit a group; the order mixes the groups
    topology = frontier(4, nodes_per_group=2).select(
        [rank % 4 * 8 + rank // 4 for rank in range(32)]
    )
    assert MeshLayout(pp=2, ep=16).reach(topology, "ep")["far"] == 2
    layout = MeshLayout.near(topology, pp=2, ep=16)
    assert layout.reach(topology, "ep") == {"self": 0, "node": 0, "group": 2, "far": 0}


def test_near_leaves_a_good_order_alone() -> None:
    assert MeshLayout.near(frontier(2), pp=2, ep=8) == MeshLayout(pp=2, ep=8)


def test_describe_names_axes_that_have_more_than_one_rank() -> None:
    assert MeshLayout(pp=2, ep=4).describe(5) == "rank 5 (pp=1, ep=1)"
    assert MeshLayout().describe(0) == "rank 0"


def test_mesh_layout_refuses() -> None:
    with pytest.raises(ConfigError, match=r"rank_order must name each of the ranks 0 .. 3 once"):
        MeshLayout(pp=2, ep=2, rank_order=(0, 1, 2, 2))
    with pytest.raises(ConfigError, match="ep must be greater than 0, got 0"):
        MeshLayout(ep=0)
    layout = MeshLayout(pp=2, ep=2)
    with pytest.raises(PlanError, match=r"rank must be in 0 .. 3, got 4"):
        layout.coordinates(4)
    with pytest.raises(PlanError, match=r"ep must be in 0 .. 1, got 2"):
        layout.rank_at(ep=2)
    with pytest.raises(PlanError, match=r"axis must be one of .*, got cp"):
        layout.rank_at(cp=0)
    with pytest.raises(PlanError, match=r"multiply to the 8 ranks, got 2 \* 1 \* 3 \* 1 = 6"):
        MeshLayout.near(frontier(1), pp=2, ep=3)
    with pytest.raises(PlanError, match="topology must have the mesh's 4 ranks, got 8"):
        layout.reach(frontier(1), "ep")
