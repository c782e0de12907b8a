"""Rank order and node allocation, against brute force where that is small enough."""

import itertools

import pytest
from hypothesis import given
from hypothesis import strategies as st

from piper_kernels.dist.topology_advice import advise_nodes, advise_rank_order
from piper_kernels.dist.topology_presets import frontier
from piper_kernels.errors import ConfigError


def test_advise_rank_order_undoes_cyclic_numbering() -> None:
    cyclic = frontier(2).select([r // 2 + r % 2 * 8 for r in range(16)])
    advice = advise_rank_order(cyclic, 8)
    assert advice.before == {"self": 0, "node": 0, "group": 2, "far": 0}
    assert advice.after == {"self": 0, "node": 2, "group": 0, "far": 0}
    better = cyclic.select(advice.rank_order)
    assert better.level_of(0, 7) == "node"
    assert advice.reason == "Blocks of 8 ranks by the level they reach: node 0 -> 2, group 2 -> 0."


def test_advise_rank_order_keeps_a_good_order() -> None:
    advice = advise_rank_order(frontier(4), 16)
    assert advice.rank_order == tuple(range(32))
    assert advice.reason.startswith("Keep the order")


def test_advise_rank_order_needs_a_divisor() -> None:
    with pytest.raises(ConfigError, match="ranks_per_block must divide the 16 ranks, got 3"):
        advise_rank_order(frontier(2), 3)


@given(
    st.lists(st.tuples(st.integers(1, 4), st.sampled_from("abc")), min_size=1, max_size=6),
    st.integers(1, 6),
    st.randoms(),
)
def test_advise_rank_order_is_optimal(nodes, size: int, random) -> None:
    """No order keeps more blocks in a node, nor more in a group, than rooms allow."""
    topology = frontier(1).lay_out([n for n, _ in nodes], groups=[group for _, group in nodes])
    num_ranks = topology.num_ranks // size * size
    if num_ranks == 0:
        return
    chosen = random.sample(range(topology.num_ranks), num_ranks)
    topology = topology.select(chosen)
    advice = advise_rank_order(topology, size)
    assert sorted(advice.rank_order) == list(range(num_ranks))
    in_node = sum(len(node.ranks) // size for node in topology.nodes)
    in_group = sum(
        sum(len(topology.nodes[n].ranks) for n in topology.group_nodes(group)) // size
        for group in topology.group_names
    )
    assert advice.after["self"] + advice.after["node"] == in_node
    assert num_ranks // size - advice.after["far"] == in_group


def brute_force_fewest(rooms: list[int], num_nodes: int) -> int:
    for count in range(1, len(rooms) + 1):
        if any(sum(chosen) >= num_nodes for chosen in itertools.combinations(rooms, count)):
            return count
    raise AssertionError((rooms, num_nodes))


@given(st.lists(st.integers(0, 9), min_size=1, max_size=5), st.integers(1, 4), st.data())
def test_advise_nodes_takes_the_fewest_groups(rooms: list[int], block: int, data) -> None:
    most = sum(rooms) // block
    if most == 0:
        return
    num_nodes = block * data.draw(st.integers(1, most))
    free = {f"g{i}": [f"g{i}n{k}" for k in range(room)] for i, room in enumerate(rooms)}
    advice = advise_nodes(free, num_nodes, nodes_per_block=block)
    assert len(set(advice.hosts)) == num_nodes
    assert all(host in free[group] for host, group in zip(advice.hosts, advice.groups, strict=True))
    fewest = brute_force_fewest(rooms, num_nodes)
    assert len(set(advice.groups)) == fewest
    whole = [room // block * block for room in rooms]
    if sum(whole) >= num_nodes and brute_force_fewest(whole, num_nodes) == fewest:
        assert advice.num_split_blocks == 0


def test_advise_nodes_fits_the_smallest_group() -> None:
    free = {"big": list("abcdef"), "small": ["x", "y", "z"]}
    advice = advise_nodes(free, 3)
    assert advice.groups == ("small",) * 3
    assert advice.reason.startswith("3 nodes in 1 of 2 groups; 0 of 3 blocks of 1 nodes")


def test_advise_nodes_instructs() -> None:
    with pytest.raises(ConfigError, match=r"num_nodes must be in 1 .. 2 free, got 3"):
        advise_nodes({"a": ["x"], "b": ["y"]}, 3)
    with pytest.raises(ConfigError, match="nodes_per_block must divide num_nodes = 2, got 4"):
        advise_nodes({"a": ["x", "z"], "b": ["y"]}, 2, nodes_per_block=4)
