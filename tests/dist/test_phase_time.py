"""Closed-form phases, by hand and port by port."""

import numpy as np
import pytest

from piper_kernels.dist.halo_plan import make_plan
from piper_kernels.dist.links import Fabric, Link, Links
from piper_kernels.dist.phase_time import chunk_times, message_costs, phase_time
from piper_kernels.dist.topology import Topology
from piper_kernels.dist.topology_presets import frontier
from piper_kernels.testing.exchange import make_cluster, make_counts

CURVE = ((1e3, 0.25), (1e6, 1.0))


def make_topology(fabric: Fabric | None = None, efficiency=()) -> Topology:
    """Three nodes of two ranks in two groups; both ranks of a node share a NIC."""
    base = frontier(1).lay_out((2, 2, 2), groups=("a", "a", "b"))
    links = Links(
        node=Link(latency_s=1.0, bandwidth_bytes_per_s=100.0, message_gap_s=0.1),
        group=Link(
            latency_s=2.0, bandwidth_bytes_per_s=10.0, message_gap_s=0.2, efficiency=efficiency
        ),
        far=Link(latency_s=4.0, bandwidth_bytes_per_s=5.0, message_gap_s=0.4),
    )
    return base.replace(links=links, fabric=fabric)


def flat_phase_of(topology: Topology, messages: dict[tuple[int, int], int]):
    counts = np.zeros((6, 6), dtype=np.int64)
    for pair, rows in messages.items():
        counts[pair] = rows
    return make_plan(topology, counts, 1, "flat").phase("flat")


def test_phase_time_sums_a_shared_nic() -> None:
    topology = make_topology()
    # ranks 0 and 1 share a NIC: 30 + 20 bytes at 10 B/s and one far message of 10 at 5 B/s
    phase = flat_phase_of(topology, {(0, 2): 30, (1, 3): 20, (1, 4): 10, (0, 1): 1, (0, 0): 999})
    time = phase_time(topology, phase, 1)
    assert time.port == "NIC 0 out"
    assert time.transfer_s == pytest.approx(3 + 2 + 2)
    assert time.gap_s == pytest.approx(0.2 + 0.2 + 0.4)
    assert time.latency_s == 4.0
    assert time.seconds == pytest.approx(4 + 0.8 + 7)


def test_phase_time_finds_the_busiest_receiver() -> None:
    topology = make_topology()
    time = phase_time(topology, flat_phase_of(topology, {(0, 2): 30, (4, 3): 20, (5, 2): 1}), 1)
    assert time.port == "NIC 1 in"
    assert time.transfer_s == pytest.approx(3 + 4 + 0.2)
    time = phase_time(topology, flat_phase_of(topology, {(0, 1): 30}), 1)
    assert (time.port, time.seconds) == ("GPU 0 out", pytest.approx(1 + 0.1 + 0.3))


def test_phase_time_shared_links() -> None:
    fat = Fabric(kind="fat_tree", uplink_bytes_per_s=1.0)
    messages = {(0, 4): 10, (2, 5): 10}
    topology = make_topology(fat)
    time = phase_time(topology, flat_phase_of(topology, messages), 1)
    assert (time.port, time.transfer_s, time.gap_s) == ("uplink of a out", 20.0, 0.0)
    dragonfly = Fabric(kind="dragonfly", uplink_bytes_per_s=3.0, num_groups=4)
    topology = make_topology(dragonfly)
    time = phase_time(topology, flat_phase_of(topology, messages), 1)
    # a pair of groups has a third of the uplink
    assert (time.port, time.transfer_s) == ("link a to b", 20.0)


def test_phase_time_of_nothing_is_zero() -> None:
    topology = make_topology()
    for messages in ({}, {(3, 3): 7}):
        time = phase_time(topology, flat_phase_of(topology, messages), 1)
        assert (time.seconds, time.port) == (0.0, "")


def test_message_costs_use_the_efficiency_curve_and_the_calibration() -> None:
    topology = make_topology(efficiency=CURVE)
    phase = flat_phase_of(topology, {(0, 2): 1000, (0, 4): 50})
    costs = message_costs(topology, phase, 1, flat_far_efficiency=0.25)
    assert costs.transfer_s.tolist() == pytest.approx([1000 / (10 * 0.25), 50 / 5 / 0.25])
    # the calibration is one of flat exchanges: HALO's phases do not pay it
    second = make_plan(topology, np.eye(6, k=4, dtype=int) * 50, 1).phase("II")
    costs = message_costs(topology, second, 1, flat_far_efficiency=0.25)
    assert costs.transfer_s.tolist() == [10.0, 10.0]


@pytest.mark.parametrize("efficiency", [(), CURVE])
def test_chunk_times_equal_phases_of_smaller_rows(efficiency) -> None:
    topology = make_cluster((3, 2, 2), (0, 0, 1), 0)
    links = topology.links
    assert links.group is not None
    nic = links.group.replace(efficiency=efficiency)
    topology = topology.replace(links=links.replace(group=nic, far=nic))
    for phase in make_plan(topology, make_counts("skewed", 7, 0), 1e5).phases:
        times = chunk_times(topology, phase, 1e5, (1, 2, 5))
        for num_chunks, time in zip((1, 2, 5), times, strict=True):
            part = phase_time(topology, phase, 1e5 / num_chunks)
            assert time.port == part.port
            assert time.seconds == pytest.approx(part.seconds, rel=1e-12)
