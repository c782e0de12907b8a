"""Messages as flows over named resources."""

import numpy as np
import pytest

from piper_kernels.dist.flow_network import make_flows, make_network
from piper_kernels.dist.halo_plan import make_plan
from piper_kernels.dist.links import Fabric
from piper_kernels.dist.phase_time import phase_time
from piper_kernels.dist.topology_presets import frontier
from piper_kernels.testing.exchange import make_counts

NARROW = Fabric(kind="dragonfly", uplink_bytes_per_s=1e10, num_groups=5)


def test_network_names_its_resources() -> None:
    topology = frontier(4, nodes_per_group=2).replace(fabric=NARROW)
    network = make_network(topology, 0.0)
    kinds = [kind for kind, _ in network.kinds]
    assert kinds == ["GPU out", "GPU in", "NIC out", "NIC in", "uplink out", "uplink in", "pair"]
    assert network.num_resources == 2 * 32 + 2 * 16 + 2 * 2 + 4
    assert network.name(0) == "GPU 0 out on node0"
    assert network.name(32 + 9) == "GPU 9 in on node1"
    assert network.name(network.first("NIC in") + 15) == "NIC 15 in on node3"
    assert network.name(network.first("uplink in") + 1) == "uplink of group1 in"
    assert network.name(network.first("pair") + 1) == "link group0 to group1"


def test_network_leaves_out_links_that_cannot_limit() -> None:
    # two nodes send at most 200 GB/s, Frontier's groups 7.3 TB/s; a pair of groups 1/73 of that
    kinds = dict(make_network(frontier(4, nodes_per_group=2), 0.0).kinds)
    assert "uplink out" not in kinds
    assert "pair" not in kinds
    kinds = dict(make_network(frontier(4, nodes_per_group=2), 0.9).kinds)
    assert kinds["pair"] == 4
    kinds = dict(make_network(frontier(256), 0.0).kinds)
    assert (kinds["uplink out"], kinds["pair"]) == (2, 4)
    assert "uplink out" not in dict(make_network(frontier(2), 0.99).kinds)


@pytest.mark.parametrize("algorithm", ["flat", "halo"])
def test_flows_occupy_ports_as_the_closed_form_says(algorithm: str) -> None:
    """The busiest resource of a phase is the busiest port of :func:`phase_time`."""
    topology = frontier(4, nodes_per_group=2).replace(fabric=NARROW)
    plan = make_plan(topology, make_counts("skewed", 32, 0), 1e6, algorithm)
    network = make_network(topology, 0.0)
    for phase in plan.phases:
        time = phase_time(topology, phase, 1e6)
        exact = make_flows(network, phase, 1e6, is_exact=True).flows
        joined = make_flows(network, phase, 1e6, is_exact=False).flows
        np.testing.assert_allclose(exact.busy_s(), joined.busy_s(), rtol=1e-9)
        assert exact.busy_s().max() == pytest.approx(time.gap_s + time.transfer_s)
        busiest = network.name(int(np.argmax(exact.busy_s())))
        assert busiest.startswith(time.port)
        assert exact.size_bytes.sum() == pytest.approx(joined.size_bytes.sum())
        assert len(exact.weight) == joined.weight.sum()


def test_flows_are_aggregated_by_pair_of_nics() -> None:
    topology = frontier(2)
    phase = make_plan(topology, np.ones((16, 16), dtype=int), 1e6, "flat").phase("flat")
    network = make_network(topology, 0.0)
    joined = make_flows(network, phase, 1e6, is_exact=False)
    # 2 x 16 pairs of NICs of four messages each, 2 x 56 pairs of GPUs, no move inside a rank
    assert sorted(joined.flows.weight.tolist()) == [1.0] * 112 + [4.0] * 32
    assert joined.flows.hops.shape == (2, 144)


def test_background_share_takes_from_links_between_groups_only() -> None:
    topology = frontier(4, nodes_per_group=2).replace(fabric=NARROW)
    phase = make_plan(topology, np.ones((32, 32), dtype=int), 1e6, "flat").phase("flat")
    free, busy = (
        make_flows(make_network(topology, share), phase, 1e6, is_exact=False).flows.busy_s()
        for share in (0.0, 0.5)
    )
    first = make_network(topology, 0.0).first("uplink out")
    np.testing.assert_allclose(busy[:first], free[:first])
    np.testing.assert_allclose(busy[first:], 2 * free[first:])


def test_parts_are_nodes() -> None:
    network = make_network(frontier(2), 0.0)
    assert network.parts().tolist() == [*[0] * 8, *[1] * 8, *[0] * 8, *[1] * 8, *[2] * 16]
