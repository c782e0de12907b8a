"""Order, relays and rails."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from piper_kernels.dist.halo_phases import (
    message_paths,
    missing_rails,
    node_order,
    relay_ranks,
)
from piper_kernels.dist.halo_plan import make_plan
from piper_kernels.dist.topology_presets import frontier
from piper_kernels.testing.exchange import make_cluster

CLUSTERS = st.lists(st.tuples(st.integers(1, 4), st.integers(0, 2)), min_size=1, max_size=6)


def test_node_order_by_hand() -> None:
    # nodes 0 1 in group a, 2 3 in group b
    topology = frontier(4, nodes_per_group=2)
    assert node_order(topology, False).tolist() == [[1, 2, 3], [0, 3, 2], [3, 0, 1], [2, 1, 0]]
    assert node_order(topology, True).tolist() == [[2, 3, 1], [3, 2, 0], [0, 1, 3], [1, 0, 2]]


@pytest.mark.parametrize(("num_nodes", "nodes_per_group"), [(1, 1), (6, 6), (6, 2), (8, 4), (5, 1)])
@pytest.mark.parametrize("is_far_first", [False, True])
def test_node_order_is_a_permutation_in_every_step(
    num_nodes: int, nodes_per_group: int, is_far_first: bool
) -> None:
    """No node receives from two others in one step."""
    order = node_order(frontier(num_nodes, nodes_per_group=nodes_per_group), is_far_first)
    for step in order.T:
        assert sorted(step.tolist()) == list(range(num_nodes))


@given(CLUSTERS, st.booleans(), st.integers(0, 99))
def test_node_order_names_each_other_node_once_near_before_far(cluster, is_far_first, seed) -> None:
    topology = make_cluster(*zip(*cluster, strict=True), seed)
    groups = topology.maps.node_to_group
    for node, order in enumerate(node_order(topology, is_far_first)):
        assert sorted([node, *order.tolist()]) == list(range(topology.num_nodes))
        is_far = (groups[order] != groups[node]).tolist()
        assert is_far == sorted(is_far, reverse=is_far_first)


@given(CLUSTERS, st.integers(0, 99))
def test_relay_ranks_keep_to_the_rail(cluster, seed) -> None:
    topology = make_cluster(*zip(*cluster, strict=True), seed)
    maps, relay = topology.maps, relay_ranks(topology)
    for rank in range(topology.num_ranks):
        for node in range(topology.num_nodes):
            there = relay[rank, node]
            assert maps.rank_to_node[there] == node
            local, size = maps.rank_to_local[rank], maps.node_sizes[node]
            assert maps.rank_to_local[there] == (local if local < size else local % size)
    sizes = [size for size, _ in cluster]
    assert bool(missing_rails(topology)) == (len(set(sizes)) > 1)


def test_missing_rails_says_what_falls_back() -> None:
    topology = frontier(1).lay_out((3, 2, 2))
    assert missing_rails(topology) == (
        "rails 2 .. 2 end before node1, node2 (2 ranks): messages for such a node from local rank "
        "l go to local rank l mod 2",
    )
    many = missing_rails(frontier(1).lay_out((4, 1, 1, 1, 1, 1, 3)))
    assert many[0].startswith("rails 1 .. 3 end before node1, node2, node3 and 2 more (1 ranks)")
    assert many[1].startswith("rails 3 .. 3 end before node6 (3 ranks)")
    np.testing.assert_equal(len(many), 2)


def test_message_paths_name_rail_and_nics() -> None:
    topology = frontier(1).lay_out((4, 3))
    plan = make_plan(topology, np.ones((7, 7), dtype=int), 1)
    second = plan.phase("II")
    paths = message_paths(topology, second)
    rows = zip(
        second.src.tolist(),
        second.dst.tolist(),
        paths.rail.tolist(),
        paths.src_nic.tolist(),
        paths.dst_nic.tolist(),
        paths.is_on_rail.tolist(),
        strict=True,
    )
    # two ranks to a NIC; node1's NICs are 2 and 3; local rank 3 has no rail there and falls to 0
    assert list(rows) == [
        (0, 4, 0, 0, 2, True),
        (1, 5, 1, 0, 2, True),
        (2, 6, 2, 1, 3, True),
        (3, 4, 3, 1, 2, False),
        (4, 0, 0, 2, 0, True),
        (5, 1, 1, 2, 0, True),
        (6, 2, 2, 3, 1, True),
    ]
    inside = message_paths(topology, plan.phase("I"))
    assert set(inside.rail.tolist()) == set(inside.src_nic.tolist()) == {-1}
    assert not inside.is_on_rail.any()
