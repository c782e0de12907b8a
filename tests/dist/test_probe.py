"""The probe: on one machine, and on emulated nodes whose speed is known."""

import numpy as np
import pytest
import torch.distributed as dist

from piper_kernels.dist.probe import ProbeReport, partners_at, probe
from piper_kernels.dist.topology_presets import frontier
from piper_kernels.errors import ConfigError
from piper_kernels.testing import run_ranks
from piper_kernels.testing.cluster import (
    ClusterShape,
    LinkShape,
    emulated_cluster,
    why_no_cluster,
)

needs_cluster = pytest.mark.skipif(bool(why_no_cluster()), reason=why_no_cluster())
FEW_SIZES = (256, 16_384, 262_144)


def probe_quickly(host_to_group: dict[str, str] | None = None) -> tuple[ProbeReport, list[str]]:
    said: list[str] = []
    report = probe(
        name="here",
        sizes_bytes=FEW_SIZES,
        host_to_group=host_to_group,
        on_progress=lambda what, size, count: said.append(f"{what} {count}x{size}"),
    )
    return report, said


def test_probe_measures_one_machine() -> None:
    results = run_ranks(probe_quickly, 4)
    report, said = results[0]
    assert all(other == report for other, _ in results), "ranks must agree"
    assert report.topology.num_ranks == 4
    assert report.topology.num_nodes == 1
    assert {point.level for point in report.points} == {"node"}
    # anything between a slow virtual machine and a fast one
    assert 1e7 < report.topology.links.node.bandwidth_bytes_per_s < 1e11
    assert 0 < report.topology.links.node.seconds(64) < 0.1
    assert [check.size_bytes for check in report.all_to_all] == [1024, 16_384, 262_144]
    assert said[0] == "node 1x256"
    assert said[-1] == "all-to-all 3x262144"
    assert ProbeReport.from_json(report.to_json()) == report
    assert "4 ranks, gloo, torch" in report.topology.source


@needs_cluster
def test_probe_finds_the_rate_of_emulated_links() -> None:
    rate = 12.5e6
    shape = ClusterShape(
        ranks_per_node=(2, 2), nics_per_node=2, nic=LinkShape(rate_bytes_per_s=rate)
    )
    with emulated_cluster(shape) as cluster:
        report = cluster.run_ranks(probe_quickly)[0][0]
    topology = report.topology
    assert [node.host for node in topology.nodes] == ["node0", "node1"]
    # affinity from the interface that each rank was given
    assert topology.maps.rank_to_nic.tolist() == [0, 1, 2, 3]
    assert topology.links.group is not None
    assert topology.links.group.bandwidth_bytes_per_s == pytest.approx(rate, rel=0.2)
    assert topology.links.node.bandwidth_bytes_per_s > 2 * rate


@needs_cluster
def test_probe_finds_delay_and_gap_between_groups_of_single_ranks() -> None:
    """One rank a node, so nothing is measured inside; one node a group, so all traffic is far."""
    shape = ClusterShape(
        ranks_per_node=(1, 1),
        node_to_group=(0, 1),
        nic=LinkShape(rate_bytes_per_s=50e6, gap_s=1e-3),
        uplink=LinkShape(rate_bytes_per_s=12.5e6, delay_s=2e-3),
        engine="tun",
    )
    with emulated_cluster(shape) as cluster:
        report = cluster.run_ranks(probe_quickly, {"node0": "rack0", "node1": "rack1"})[0][0]
    links = report.topology.links
    assert links.far is not None
    assert links.group == links.far
    assert links.far.bandwidth_bytes_per_s == pytest.approx(12.5e6, rel=0.2)
    # a message is at least one packet each way and a packet that invites it
    assert links.far.latency_s > 2e-3
    assert links.far.message_gap_s > 1e-3
    assert report.topology.group_names == ("rack0", "rack1")
    assert len(report.notes) == 2
    assert report.notes[0].startswith("no node has two ranks")


def test_probe_names_hosts_without_a_group() -> None:
    message = "host_to_group must name the group of each host, got none for"
    with pytest.raises(RuntimeError, match=message):
        run_ranks(probe_quickly, 1, {})


def test_probe_needs_a_process_group() -> None:
    assert not dist.is_initialized()
    with pytest.raises(ConfigError, match="probe: process group must exist, got none"):
        probe()


def test_partners_at_makes_rings_of_each_level() -> None:
    topology = frontier(1).lay_out((2, 3, 2, 1), groups=("a", "a", "b", "c"))
    near, group = partners_at(topology, "node"), partners_at(topology, "group")
    far = partners_at(topology, "far")
    assert near == [(1, 1), (0, 0), (3, 4), (4, 2), (2, 3), (6, 6), (5, 5), None]
    # rails 0 and 1 of the two nodes of group a
    assert group == [(2, 2), (3, 3), (0, 0), (1, 1), None, None, None, None]
    # rail 0 of the first node of each group: the last has one rank
    assert far == [(5, 7), None, None, None, None, (7, 0), None, (0, 5)]


@pytest.mark.parametrize("level", ["node", "group", "far"])
def test_partners_at_agree_on_both_ends_and_level(level: str) -> None:
    topology = frontier(1).lay_out((3, 2, 4, 4, 1), groups=("a", "b", "a", "b", "a"))
    partners = partners_at(topology, level)  # type: ignore[arg-type]
    assert any(partners)
    for rank, pair in enumerate(partners):
        if pair is not None:
            to, of = pair
            assert partners[to] is not None
            assert partners[of] is not None
            assert np.array(partners[to])[1] == rank
            assert np.array(partners[of])[0] == rank
            assert topology.level_of(rank, to) == level
