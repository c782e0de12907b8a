"""The simulator against hand counts, the closed form, and its own exact mode."""

import time

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from piper_kernels.dist.exchange_counts import count_rows
from piper_kernels.dist.halo_plan import make_plan
from piper_kernels.dist.links import Fabric, Link, Links
from piper_kernels.dist.phase_time import phase_time
from piper_kernels.dist.placement_map import PlacementMap
from piper_kernels.dist.simulate import simulate
from piper_kernels.dist.topology import Topology
from piper_kernels.dist.topology_advice import advise_nodes, advise_rank_order
from piper_kernels.dist.topology_presets import frontier
from piper_kernels.errors import ConfigError
from piper_kernels.testing.exchange import COUNTS_KINDS, make_cluster, make_counts


def bandwidth_only(topology: Topology, node: float, nic: float, fabric: Fabric | None = None):
    """The same ranks with links that cost nothing but bytes."""
    inside = Link(latency_s=0.0, bandwidth_bytes_per_s=node)
    outside = Link(latency_s=0.0, bandwidth_bytes_per_s=nic)
    return topology.replace(links=Links(node=inside, group=outside, far=outside), fabric=fabric)


def test_simulate_phases_by_hand() -> None:
    """Two nodes of two ranks, own NICs, 1 byte/s outside and 10 inside."""
    base = frontier(1)
    base = base.replace(nodes=(base.nodes[0].replace(nics=tuple(range(8))),))
    topology = bandwidth_only(base.lay_out((2, 2)), 10.0, 1.0)
    counts = np.zeros((4, 4), dtype=int)
    counts[0, 1], counts[0, 3], counts[1, 3], counts[3, 0] = 20, 6, 4, 5
    result = simulate(make_plan(topology, counts, 1), is_exact=True)
    by_name = {phase.name: phase for phase in result.phases}
    # I: 20 bytes inside node 0. II: 6 bytes by rail 0, 4 and 5 by rail 1
    assert by_name["I"].seconds == pytest.approx(2.0)
    assert by_name["II"].seconds == pytest.approx(6.0)
    # III: node 0 from 5 s (its 5 bytes are there), node 1 from 6 s; 5 and 6 bytes at 10 bytes/s
    assert by_name["III"].start_s == pytest.approx(5.0)
    assert by_name["III"].end_s == pytest.approx(6.6)
    assert result.seconds == pytest.approx(6.6)
    assert result.level_bytes == {"self": 4.0, "node": 20 + 5 + 6, "group": 15, "far": 0}
    assert (result.label, result.links[0].name) == ("modelled", "NIC 0 out on node0")
    assert result.links[0].busy_s == pytest.approx(6.0)
    assert result.links[0].share == pytest.approx(6 / 6.6)


def test_simulate_way_back_starts_inside() -> None:
    topology = bandwidth_only(frontier(1).lay_out((2, 2)), 10.0, 1.0)
    plan = make_plan(topology, np.ones((4, 4), dtype=int), 10)
    there, back = simulate(plan), simulate(plan.reverse())
    assert back.seconds == pytest.approx(there.seconds)
    phases = {phase.name: phase for phase in back.phases}
    assert [phase.name for phase in back.phases] == ["III", "II", "I"]
    # I uses the ports first, III after it, then everything crosses
    assert phases["II"].start_s == pytest.approx(phases["III"].end_s)
    assert phases["II"].end_s == pytest.approx(back.seconds)


@given(
    st.lists(st.tuples(st.integers(1, 3), st.integers(0, 1)), min_size=1, max_size=4),
    st.sampled_from(COUNTS_KINDS),
    st.sampled_from(["flat", "halo"]),
    st.booleans(),
    st.integers(0, 99),
)
def test_simulate_is_never_faster_than_the_busiest_port(
    cluster, kind, algorithm, is_exact, seed
) -> None:
    topology = make_cluster(*zip(*cluster, strict=True), seed)
    plan = make_plan(topology, make_counts(kind, topology.num_ranks, seed), 1e5, algorithm)
    result = simulate(plan, is_exact=is_exact)
    for phase, found in zip(plan.phases, result.phases, strict=True):
        port = phase_time(topology, phase, 1e5)
        # the closed form adds the furthest latency to the busiest port, whoever's they are
        bound = port.gap_s + port.transfer_s
        assert found.seconds >= bound * (1 - 1e-6)
        # no flow waits longer than both its ports have work
        assert found.seconds <= 2 * bound * 1.02 + port.latency_s
    assert result.seconds >= max(phase.seconds for phase in result.phases)


def test_simulate_uniform_equals_the_closed_form() -> None:
    """Where all ports are equally busy, nobody waits for another."""
    topology = frontier(8)
    for algorithm in ("flat", "halo"):
        plan = make_plan(topology, np.full((64, 64), 3), 1e6, algorithm)
        result = simulate(plan)
        for phase, found in zip(plan.phases, result.phases, strict=True):
            assert found.seconds == pytest.approx(phase_time(topology, phase, 1e6).seconds)


KINDS_64 = [
    ("skewed", "flat"),
    ("skewed", "halo"),
    ("sparse", "halo"),
    ("all_to_one", "flat"),
    pytest.param("one_silent", "flat", marks=pytest.mark.slow),
    pytest.param("uniform", "flat", marks=pytest.mark.slow),
    pytest.param("uniform", "halo", marks=pytest.mark.slow),
]


@pytest.mark.parametrize(("kind", "algorithm"), KINDS_64)
def test_simulate_aggregated_is_within_2_percent_of_exact(kind: str, algorithm: str) -> None:
    """64 ranks in four groups with narrow uplinks. Source: issue's table."""
    fabric = Fabric(kind="dragonfly", uplink_bytes_per_s=1.2e11, num_groups=5)
    topology = frontier(8, nodes_per_group=2).replace(fabric=fabric)
    plan = make_plan(topology, make_counts(kind, 64, 0), 1e5, algorithm, has_blocks=False)
    exact, joined = simulate(plan, is_exact=True), simulate(plan)
    assert joined.num_flows <= exact.num_flows
    assert joined.seconds == pytest.approx(exact.seconds, rel=0.02)


def test_simulate_1024_skewed_ranks_in_10_seconds() -> None:
    """Source: issue's table. Measured 1.1 s and 3 s on one core of a 2-core machine."""
    topology = frontier(128, nodes_per_group=16)
    counts = make_counts("skewed", 1024, 0)
    start = time.perf_counter()
    plan = make_plan(topology, counts, 1e5, "flat", has_blocks=False)
    result = simulate(plan)
    assert time.perf_counter() - start < 10
    assert result.num_flows > 200_000
    bound = phase_time(topology, plan.phases[0], 1e5).seconds
    assert bound * 0.999 < result.seconds < 1.2 * bound


@pytest.mark.slow
@pytest.mark.parametrize("algorithm", ["flat", "halo"])
def test_simulate_4096_ranks(algorithm: str) -> None:
    topology = frontier(512)
    counts = np.ones((4096, 4096), dtype=np.int64)
    result = simulate(make_plan(topology, counts, 1e5, algorithm, has_blocks=False))
    assert result.level_bytes["far"] == 4096 * 3072 * 1e5
    # the uplinks of four groups: 1024 x 3072 rows each
    assert result.links[0].name.startswith(("link group", "uplink of group"))


def test_simulate_halo_wins_by_messages_and_loses_by_bytes() -> None:
    topology = frontier(16)

    def ratio(row_bytes: float) -> float:
        counts = np.ones((128, 128), dtype=int)
        flat, halo = (
            simulate(make_plan(topology, counts, row_bytes, algorithm, has_blocks=False))
            for algorithm in ("flat", "halo")
        )
        assert flat.level_bytes["group"] == halo.level_bytes["group"]
        return flat.seconds / halo.seconds

    assert ratio(8.0) > 4
    assert ratio(1e9) == pytest.approx(0.82, abs=0.005)


def test_simulate_dedup_saves_bytes() -> None:
    """K = 8 on two nodes: about four times fewer bytes and as much time, when NIC-bound."""
    topology = bandwidth_only(frontier(1).lay_out((4, 4)), 1e12, 1e9)
    ids = np.random.default_rng(0).random((8, 512, 64)).argsort(axis=2)[:, :, :8]
    counts = count_rows(topology, PlacementMap.contiguous(64, 8), list(ids))
    flat, dedup = (
        simulate(make_plan(topology, counts, 4096, algorithm))
        for algorithm in ("flat", "halo_dedup")
    )
    saved = flat.level_bytes["group"] / dedup.level_bytes["group"]
    assert saved == pytest.approx(counts.dedup_factor(topology))
    assert saved > 3.9
    assert flat.seconds / dedup.seconds > 3.5


def test_simulate_affinity_uses_every_nic() -> None:
    """Two NICs a node: half of the ranks on each, or all on the first."""
    own = bandwidth_only(frontier(1).lay_out((4, 4)), 1e12, 1e9)
    one = own.replace(nodes=tuple(node.replace(nics=(0,) * 4) for node in own.nodes))
    counts = np.ones((8, 8), dtype=int)
    times = [simulate(make_plan(topology, counts, 1e6)).seconds for topology in (own, one)]
    assert times[1] / times[0] == pytest.approx(2.0, rel=0.01)


def test_simulate_shared_links() -> None:
    counts = np.ones((32, 32), dtype=int)
    base = frontier(4, nodes_per_group=2)
    fat = Fabric(kind="fat_tree", uplink_bytes_per_s=1e9)
    topology = bandwidth_only(base, 1e12, 1e9, fat)
    plan = make_plan(topology, counts, 1e6)
    # 16 ranks send 16 MB each over 1 GB/s
    result = simulate(plan)
    assert result.phases[1].seconds == pytest.approx(0.256)
    assert result.links[0].name == "uplink of group0 out"
    loaded = simulate(plan, background_share=0.75)
    assert loaded.phases[1].seconds == pytest.approx(4 * 0.256)
    # a quarter of the uplink for the one pair of groups
    pairs = Fabric(kind="dragonfly", uplink_bytes_per_s=1e9, num_groups=5)
    topology = bandwidth_only(base, 1e12, 1e9, pairs)
    result = simulate(make_plan(topology, counts, 1e6))
    assert result.phases[1].seconds == pytest.approx(4 * 0.256)
    assert result.links[0].name == "link group0 to group1"
    # detours take the packets off the direct link
    detour = pairs.replace(non_minimal_share=0.5)
    topology = bandwidth_only(base, 1e12, 1e9, detour)
    result = simulate(make_plan(topology, counts, 1e6))
    assert result.phases[1].seconds == pytest.approx(2 * 0.256)


def test_simulate_vendor_calibration_slows_flat_only() -> None:
    topology, counts = frontier(8, nodes_per_group=2), np.ones((64, 64), dtype=int)
    flat, halo = (make_plan(topology, counts, 1e7, name) for name in ("flat", "halo"))
    ratio = simulate(flat, flat_far_efficiency=0.25).seconds / simulate(flat).seconds
    # 48 of 56 messages leave the group and take four times as long
    assert ratio == pytest.approx((48 * 4 + 8) / 56, rel=0.01)
    assert simulate(halo, flat_far_efficiency=0.25).seconds == simulate(halo).seconds


def test_advice_on_rank_order_pays() -> None:
    """Groups of eight ranks dealt out over eight nodes, or kept inside one."""
    cyclic = frontier(8).select([r % 8 * 8 + r // 8 for r in range(64)])
    advice = advise_rank_order(cyclic, 8)
    blocks = np.kron(np.eye(8, dtype=int), np.ones((8, 8), dtype=int))
    times = [
        simulate(make_plan(topology, blocks, 1e7, "flat")).seconds
        for topology in (cyclic, cyclic.select(advice.rank_order))
    ]
    assert (advice.before["group"], advice.after["node"]) == (8, 8)
    assert times[0] / times[1] > 2


def test_advice_on_nodes_pays() -> None:
    """Eight nodes from one rack, or scattered over four with busy links between."""
    free = {f"rack{r}": [f"rack{r}n{k}" for k in range(8 if r == 3 else 4)] for r in range(4)}
    advice = advise_nodes(free, 8)
    assert advice.groups == ("rack3",) * 8
    counts = np.ones((64, 64), dtype=int)
    fabric = Fabric(kind="dragonfly", uplink_bytes_per_s=7.3e12, num_groups=74)
    racks = [f"rack{n // 2}" for n in range(8)]
    compact, scattered = (
        frontier(1).lay_out([8] * 8, groups=groups).replace(fabric=fabric)
        for groups in (advice.groups, racks)
    )
    results = [
        simulate(make_plan(topology, counts, 1e7), background_share=0.8)
        for topology in (compact, scattered)
    ]
    assert results[0].level_bytes["far"] == 0
    assert results[1].seconds / results[0].seconds > 2


@pytest.mark.parametrize("algorithm", ["flat", "halo"])
def test_simulation_result_describe(algorithm: str) -> None:
    hosts = [f"frontier{n:05d}.olcf.ornl.gov" for n in range(4)]
    topology = frontier(1).lay_out([8] * 4, hosts=hosts)
    text = simulate(make_plan(topology, np.ones((32, 32), dtype=int), 1e9, algorithm)).describe()
    assert text.startswith(f"modelled: {algorithm} takes ")
    assert max(map(len, text.splitlines())) <= 100
    nothing = simulate(make_plan(topology, np.zeros((32, 32), dtype=int), 1e9, algorithm))
    assert nothing.seconds == 0
    assert "sent: nothing" in nothing.describe()


def test_simulate_instructs() -> None:
    plan = make_plan(frontier(1), np.ones((8, 8), dtype=int), 1)
    with pytest.raises(ConfigError, match=r"background_share must be in \[0, 1\), got 1.0"):
        simulate(plan, background_share=1.0)
    with pytest.raises(ConfigError, match="flat_far_efficiency must be above 0, at most 1, got 0"):
        simulate(plan, flat_far_efficiency=0)
