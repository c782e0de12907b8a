"""Collectives and sends: bytes over the right link, and who shares a NIC."""

import pytest

from piper_kernels.errors import ConfigError
from piper_kernels.pipeline.collective_time import Group, all_reduce_s, reduce_scatter_s, send_s
from piper_kernels.pipeline.platform_presets import load_platform

H100, FRONTIER = load_platform("h100"), load_platform("frontier")


def test_all_reduce_s_inside_a_node() -> None:
    group = Group(size=8, stride=1, world_size=64)
    assert all_reduce_s(H100, group, 450e6) == pytest.approx(2 * (20e-6 + 7 / 8 * 1e-3))


def test_all_reduce_s_along_a_rail_uses_the_nic() -> None:
    group = Group(size=8, stride=8, world_size=64)
    assert all_reduce_s(H100, group, 50e6) == pytest.approx(2 * (20e-6 + 7 / 8 * 1e-3))
    # on Frontier two GCDs share 25 GB/s
    assert reduce_scatter_s(FRONTIER, group, 12.5e6) == pytest.approx(10e-6 + 7 / 8 * 1e-3)


def test_reduce_scatter_s_over_nodes_sends_a_nodes_part() -> None:
    group = Group(size=32, stride=1, world_size=32)
    inside, outside = 20e-6 + 7 / 8 * 1.0, 20e-6 + 3 / 4 * 450 / 8 / 50
    assert reduce_scatter_s(H100, group, 450e9) == pytest.approx(inside + outside)


def test_collectives_of_one_rank_are_free() -> None:
    alone = Group(size=1, stride=4, world_size=8)
    assert all_reduce_s(H100, alone, 1e9) == 0
    assert all_reduce_s(H100, Group(size=8, stride=1, world_size=8), 0) == 0


def test_group_must_fit() -> None:
    with pytest.raises(ConfigError, match="fit into 16 ranks, got 8 ranks, 4 apart"):
        Group(size=8, stride=4, world_size=16)


def test_send_s_shares_nics_between_nodes() -> None:
    assert send_s(H100, 1, 8, 450e6) == pytest.approx(20e-6 + 1e-3)
    assert send_s(H100, 8, 64, 50e6) == pytest.approx(20e-6 + 1e-3)
    # two GCDs a NIC: twice 5 us and twice 1 ms
    assert send_s(FRONTIER, 8, 64, 25e6) == pytest.approx(10e-6 + 2 * (5e-6 + 1e-3))
    # one rank a stage and sixteen of them: the hop between nodes decides
    assert send_s(FRONTIER, 1, 16, 25e6) < send_s(FRONTIER, 8, 64, 25e6)
