"""Cluster shapes: what is refused, who sits where, and the topology that they stand for."""

from typing import Any

import pytest

from piper_kernels.errors import ConfigError
from piper_kernels.testing.cluster import ClusterShape, LinkShape
from piper_kernels.testing.cluster.shape import address_of

NIC = LinkShape(rate_bytes_per_s=10e6)
SLOW = LinkShape(rate_bytes_per_s=5e6, delay_s=0.001)


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"rate_bytes_per_s": 10}, "LinkShape: rate_bytes_per_s must be at least 1e4, got 10"),
        ({"rate_bytes_per_s": 1e6, "delay_s": 20}, "delay_s must be in 0 .. 1 s, got 20"),
        ({"rate_bytes_per_s": 1e6, "gap_s": -1}, "gap_s must be in 0 .. 1 s, got -1"),
    ],
)
def test_link_shape_refuses(fields: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        LinkShape(**fields)


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"ranks_per_node": ()}, r"ranks_per_node must give 1 \.\. 64 nodes a rank at least"),
        ({"ranks_per_node": (2, 0)}, r"got \(2, 0\)"),
        ({"nics_per_node": 9}, r"nics_per_node must be in 1 \.\. 8, got 9"),
        ({"local_rank_to_nic": (0, 1)}, r"name one of the NICs 0 \.\. 0 for each of 2 ranks"),
        ({"local_rank_to_nic": (0,)}, r"got \(0,\)"),
        ({"node_to_group": (0, 2), "uplink": NIC}, r"groups 0, 1, \.\.\. for each of 2 nodes"),
        ({"node_to_group": (0, 1)}, "uplink must be given exactly if there are several groups"),
        ({"uplink": NIC}, "uplink must be given exactly"),
        ({"nic": SLOW}, "nic must have neither delay nor gap on a bridge.*Choose engine='tun'"),
        ({"engine": "tum"}, "engine must be one of"),
    ],
)
def test_cluster_shape_refuses(fields: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        ClusterShape(**{"ranks_per_node": (2, 2), "nic": NIC, **fields})


def test_cluster_shape_numbers_ranks_node_after_node() -> None:
    shape = ClusterShape(ranks_per_node=(3, 2), nic=NIC, nics_per_node=2)
    assert shape.num_ranks == 5
    assert [shape.node_of(rank) for rank in range(5)] == [0, 0, 0, 1, 1]
    assert [shape.local_rank_of(rank) for rank in range(5)] == [0, 1, 2, 0, 1]
    assert [shape.nic_of(local) for local in range(3)] == [0, 0, 1]
    pinned = ClusterShape(
        ranks_per_node=(3, 2), nic=NIC, nics_per_node=2, local_rank_to_nic=(1, 1, 0)
    )
    assert [pinned.nic_of(local) for local in range(3)] == [1, 1, 0]


def test_cluster_shape_topology_has_groups_and_speeds() -> None:
    shape = ClusterShape(
        ranks_per_node=(2, 2, 2),
        nics_per_node=2,
        nic=LinkShape(rate_bytes_per_s=10e6, delay_s=0.002, gap_s=0.001),
        node_to_group=(0, 1, 1),
        uplink=SLOW,
        engine="tun",
    )
    topology = shape.topology()
    assert topology.maps.rank_to_node.tolist() == [0, 0, 1, 1, 2, 2]
    assert topology.maps.rank_to_nic.tolist() == [0, 1, 2, 3, 4, 5]
    assert topology.level_of(0, 2) == "far"
    assert topology.level_of(2, 4) == "group"
    assert topology.link("group").latency_s == 0.002
    assert topology.link("far").latency_s == 0.003
    assert topology.link("group").message_gap_s == 0.001
    assert topology.fabric is not None
    assert topology.fabric.uplink_bytes_per_s == 5e6
    measured = topology.links.replace(group=topology.link("far"))
    assert shape.topology(measured).links == measured


def test_address_of_differs_for_every_nic() -> None:
    addresses = [address_of(node, nic) for node in range(64) for nic in range(8)]
    assert len(set(addresses)) == 64 * 8
    assert address_of(63, 7) == "10.127.7.1"
