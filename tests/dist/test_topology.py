"""Who sits where, and how the file says what is wrong with it."""

import json
import pickle

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from piper_kernels.dist.links import LEVELS, Link, Links
from piper_kernels.dist.topology import Node, Topology
from piper_kernels.dist.topology_presets import frontier
from piper_kernels.errors import ConfigError

LINK = Link(latency_s=1e-6, bandwidth_bytes_per_s=1e9)
LINKS = Links(node=LINK, group=LINK, far=LINK)


def make_topology() -> Topology:
    """Seven ranks on three ragged nodes in two groups, numbered across nodes."""
    nodes = (
        Node(host="a", group="r0", ranks=(0, 3, 6), nics=(0, 0, 1)),
        Node(host="b", group="r1", ranks=(5, 1), nics=(1, 0)),
        Node(host="c", group="r0", ranks=(2, 4), nics=(0, 0)),
    )
    return Topology(name="t", source="by hand", links=LINKS, nodes=nodes)


def test_topology_maps_by_hand() -> None:
    topology = make_topology()
    maps = topology.maps
    assert maps.rank_to_node.tolist() == [0, 1, 2, 0, 2, 1, 0]
    assert maps.rank_to_local.tolist() == [0, 1, 0, 1, 1, 0, 2]
    # node a has NICs 0 and 1, b has 2 and 3, c has 4
    assert maps.rank_to_nic.tolist() == [0, 2, 4, 0, 4, 3, 1]
    assert maps.nic_to_node.tolist() == [0, 0, 1, 1, 2]
    assert maps.rank_to_group.tolist() == [0, 1, 0, 0, 0, 1, 0]
    assert maps.node_to_group.tolist() == [0, 1, 0]
    assert maps.ranks_by_node.tolist() == [0, 3, 6, 5, 1, 2, 4]
    assert maps.node_offsets.tolist() == [0, 3, 5, 7]
    assert maps.node_sizes.tolist() == [3, 2, 2]
    assert topology.num_ranks, topology.num_nodes == (7, 3)
    assert topology.group_names == ("r0", "r1")
    assert topology.group_nodes("r0") == (0, 2)
    assert topology.rails == ((0, 5, 2), (3, 1, 4), (6,))


def test_level_of_every_pair() -> None:
    topology = make_topology()
    host_of = {r: node for node in topology.nodes for r in node.ranks}
    for a in range(7):
        for b in range(7):
            same_host = host_of[a].host == host_of[b].host
            same_group = host_of[a].group == host_of[b].group
            far = "group" if same_group else "far"
            expected = "self" if a == b else "node" if same_host else far
            assert topology.level_of(a, b) == expected
    table = topology.distances(np.arange(7)[:, None], np.arange(7))
    assert LEVELS[table[0, 3]] == "node"
    assert table.tolist() == table.T.tolist()


def test_level_of_names_a_wrong_rank() -> None:
    with pytest.raises(ConfigError, match=r"Topology.level_of: b must be in 0 .. 6, got 7\."):
        make_topology().level_of(0, 7)
    with pytest.raises(ConfigError, match=r"a must be in 0 .. 6, got -1\."):
        make_topology().level_of(-1, 0)


def test_topology_file_round_trip(tmp_path) -> None:
    topology = make_topology()
    _ = topology.maps
    path = tmp_path / "cluster.json"
    topology.save(path)
    read = Topology.load(path)
    assert read == topology
    assert read.digest() == topology.digest()
    assert pickle.loads(pickle.dumps(topology)) == topology
    assert read.select([1, 0, 2, 3, 4, 5, 6]).digest() != topology.digest()
    keys = json.loads(path.read_text())["links"]["node"]
    assert set(keys) == {"latency_s", "bandwidth_bytes_per_s", "message_gap_s", "efficiency"}


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (
            lambda d: d["links"]["node"].update(latency_us=1),
            r"cluster.json: links.node.latency_us must be a field of Link, got 1. Did you mean "
            r"'latency_s'\?",
        ),
        (
            lambda d: d["nodes"][0]["ranks"].pop(),
            r"cluster.json: nodes.0: Node: nics must have one entry for each of the 2 ranks",
        ),
        (
            lambda d: d["nodes"][2].update(ranks=[2], nics=[0]),
            r"Topology: nodes must place each of the ranks 0 .. 5 once, got 6 ranks, missing \[4\]",
        ),
        (lambda d: d["nodes"][2].update(ranks=[2, 2]), r"missing \[4\], twice \[2\]"),
        (lambda d: d["nodes"][2].update(host="a"), r"name each host once, got \['a'\]"),
        (lambda d: d["nodes"][1].update(ranks=[], nics=[]), "ranks must name a rank at least"),
        (lambda d: d.update(nodes=[]), "nodes must name a node at least"),
        (lambda d: d["links"].pop("far"), "links.far must be given for 2 or more groups, got None"),
        (lambda d: d["links"].update(group=None), "links.group must be given for 2 or more nodes"),
        (lambda d: d["nodes"][0].update(ranks=[0, 3, -6]), "nodes.0.ranks.2 must be greater than"),
        (
            lambda d: d.update(
                fabric={"kind": "dragonfly", "uplink_bytes_per_s": 1, "num_groups": 1}
            ),
            "nodes must lie in at most fabric.num_groups = 1 groups, got 2",
        ),
        (lambda d: d.pop("links"), "links must be given, got nothing"),
    ],
)
def test_topology_file_names_the_fault(tmp_path, change, message: str) -> None:
    data = json.loads(make_topology().to_json())
    change(data)
    path = tmp_path / "cluster.json"
    path.write_text(json.dumps(data))
    with pytest.raises(ConfigError, match=message) as caught:
        Topology.load(path)
    assert str(path) in str(caught.value)


def test_link_of_a_level() -> None:
    topology = make_topology()
    assert topology.link("far") == LINK
    one = topology.replace(
        links=Links(node=LINK), nodes=(Node(host="a", group="g", ranks=(0,), nics=(0,)),)
    )
    with pytest.raises(ConfigError, match=r"level must be a level whose speed is given, got far"):
        one.link("far")
    with pytest.raises(ConfigError, match=r"got self"):
        one.link("self")


def test_select_keeps_places() -> None:
    topology = make_topology()
    chosen = [4, 0, 6, 1]
    part = topology.select(chosen)
    assert part.num_ranks == 4
    for new_a, old_a in enumerate(chosen):
        for new_b, old_b in enumerate(chosen):
            assert part.level_of(new_a, new_b) == topology.level_of(old_a, old_b)
    assert [node.host for node in part.nodes] == ["a", "b", "c"]
    assert part.nodes[0].ranks == (1, 2)
    assert part.nodes[0].nics == (0, 1)
    with pytest.raises(ConfigError, match="ranks must name no rank twice"):
        topology.select([0, 0])
    with pytest.raises(ConfigError, match=r"ranks must be below 7 ranks, got \[9\]"):
        topology.select([0, 9])


def test_lay_out_ragged() -> None:
    ragged = frontier(1).lay_out((3, 2, 2), hosts=("x", "y", "z"), groups=("g", "g", "h"))
    assert [node.ranks for node in ragged.nodes] == [(0, 1, 2), (3, 4), (5, 6)]
    assert ragged.nodes[0].nics == (0, 0, 1)
    assert ragged.level_of(0, 3) == "group"
    assert ragged.level_of(0, 6) == "far"
    with pytest.raises(ConfigError, match=r"ranks_per_node must be in 1 .. 8, the ranks of node0"):
        frontier(1).lay_out((9,))
    with pytest.raises(ConfigError, match="hosts must name 2 nodes, got 1"):
        frontier(1).lay_out((1, 1), hosts=("x",))


@given(st.lists(st.integers(1, 8), min_size=1, max_size=6), st.randoms())
def test_rails_hold_every_rank_once(sizes: list[int], random) -> None:
    topology = frontier(1).lay_out(sizes)
    order = list(range(topology.num_ranks))
    random.shuffle(order)
    topology = topology.select(order)
    rails = topology.rails
    assert sorted(rank for rail in rails for rank in rail) == list(range(topology.num_ranks))
    for local, rail in enumerate(rails):
        assert len({int(topology.maps.rank_to_node[rank]) for rank in rail}) == len(rail)
        assert all(topology.maps.rank_to_local[rank] == local for rank in rail)
