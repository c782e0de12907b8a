"""Known machines."""

import pytest

from piper_kernels.dist.topology import Topology
from piper_kernels.dist.topology_presets import PRESETS, dgx_h100_like, frontier, one_box, preset
from piper_kernels.errors import ConfigError


def test_frontier_facts() -> None:
    topology = frontier(512)
    assert topology.num_ranks == 4096
    assert topology.num_groups == 4
    assert topology.level_of(0, 7) == "node"
    assert topology.level_of(0, 127 * 8) == "group"
    assert topology.level_of(0, 128 * 8) == "far"
    # four NICs of 25 GB/s are 100 GB/s a node, each for two GCDs
    per_node = 4 * topology.link("group").bandwidth_bytes_per_s
    assert per_node == 100e9
    assert topology.maps.rank_to_nic[:10].tolist() == [0, 0, 1, 1, 2, 2, 3, 3, 4, 4]
    # taper of 57 % between groups, and 30 GB/s per node when every far byte may detour
    fabric = topology.fabric
    assert fabric is not None
    assert fabric.uplink_bytes_per_s / (128 * per_node) == pytest.approx(0.57, abs=0.005)
    per_node_far = fabric.uplink_bytes_per_s / 128 / (1 + fabric.non_minimal_share)
    assert per_node_far == pytest.approx(30e9, rel=0.01)


def test_frontier_scattered() -> None:
    assert frontier(8, nodes_per_group=2).num_groups == 4
    with pytest.raises(ConfigError, match="num_nodes must be at most 148, got 149"):
        frontier(149, nodes_per_group=2)
    with pytest.raises(ConfigError, match=r"nodes_per_group must be in 1 .. 128, got 129"):
        frontier(1, nodes_per_group=129)


def test_dgx_h100_like_has_a_nic_per_gpu() -> None:
    topology = dgx_h100_like(33)
    assert topology.maps.rank_to_nic.tolist() == list(range(33 * 8))
    assert topology.num_groups == 2


def test_one_box_is_one_node() -> None:
    topology = one_box(4)
    assert topology.num_nodes == 1
    assert topology.level_of(0, 3) == "node"
    # the two measurements that it is made from
    link = topology.link("node")
    assert link.seconds(2**20) - link.message_gap_s == pytest.approx(0.96e-3)


def test_preset_by_name() -> None:
    for name in PRESETS:
        topology = preset(name, 2)
        assert topology.name == name
        assert topology.source
        assert Topology.from_json(topology.to_json()) == topology
        with pytest.raises(ConfigError, match=rf"{name}: num_\w+ must be at least 1, got 0"):
            preset(name, 0)
    with pytest.raises(ConfigError, match=r"got frontire. Did you mean 'frontier'\?"):
        preset("frontire", 1)
