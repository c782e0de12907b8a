"""Plans against counts, against one another, and against brute force."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from piper_kernels.dist.exchange_counts import count_rows
from piper_kernels.dist.halo_check import check_plan
from piper_kernels.dist.halo_plan import HaloPlan, make_plan, recipe_digest
from piper_kernels.dist.link_loads import LinkLoads, link_loads
from piper_kernels.dist.placement_map import PlacementMap
from piper_kernels.dist.topology_presets import frontier
from piper_kernels.errors import ConfigError, PlanError
from piper_kernels.testing.exchange import COUNTS_KINDS, make_cluster, make_counts


def loads_of(plan: HaloPlan) -> LinkLoads:
    return link_loads(plan.topology, plan.phases, plan.row_bytes)


CLUSTERS = st.lists(st.tuples(st.integers(1, 4), st.integers(0, 2)), min_size=1, max_size=5)


@given(CLUSTERS, st.sampled_from(COUNTS_KINDS), st.booleans(), st.integers(0, 99))
def test_make_plan_halo_equals_brute_force(cluster, kind, is_far_first, seed) -> None:
    """Message for message, from the definition of the three phases."""
    topology = make_cluster(*zip(*cluster, strict=True), seed)
    num_ranks = topology.num_ranks
    counts = make_counts(kind, num_ranks, seed)
    plan = make_plan(topology, counts, 16, is_far_first=is_far_first)
    check_plan(plan)
    expected: dict[str, dict[tuple[int, int], int]] = {"I": {}, "II": {}, "III": {}}

    def add(phase: str, src: int, dst: int, rows: int) -> None:
        if rows:
            expected[phase][src, dst] = expected[phase].get((src, dst), 0) + rows

    node_of, local_of = topology.maps.rank_to_node, topology.maps.rank_to_local
    for src in range(num_ranks):
        for dst in range(num_ranks):
            rows = int(counts[src, dst])
            if node_of[src] == node_of[dst]:
                add("I", src, dst, rows)
                continue
            there = topology.nodes[node_of[dst]].ranks
            relay = there[local_of[src] % len(there)]
            add("II", src, relay, rows)
            add("III", relay, dst, rows)
    for phase in plan.phases:
        pairs = zip(phase.src.tolist(), phase.dst.tolist(), strict=True)
        assert dict(zip(pairs, phase.num_rows.tolist(), strict=True)) == expected[phase.name]
        # by sender, then posting order
        keys = list(zip(phase.src.tolist(), phase.step.tolist(), strict=True))
        assert keys == sorted(set(keys))


@given(CLUSTERS, st.sampled_from(COUNTS_KINDS), st.integers(0, 99))
def test_halo_moves_the_bytes_of_flat_in_fewer_messages(cluster, kind, seed) -> None:
    topology = make_cluster(*zip(*cluster, strict=True), seed)
    counts = make_counts(kind, topology.num_ranks, seed)
    flat_plan = make_plan(topology, counts, 16, "flat")
    check_plan(flat_plan)
    flat, halo = loads_of(flat_plan), loads_of(make_plan(topology, counts, 16))
    np.testing.assert_array_equal(flat.node_pair_bytes, halo.node_pair_bytes)
    assert (halo.rank_messages <= flat.rank_messages).all()
    assert halo.rank_messages.max() <= topology.num_nodes - 1
    assert flat.level_bytes["far"] == halo.level_bytes["far"]


def test_halo_messages_per_rank_are_nodes_minus_one() -> None:
    topology = frontier(4)
    counts = np.ones((32, 32), dtype=int)
    flat = loads_of(make_plan(topology, counts, 1, "flat"))
    halo = loads_of(make_plan(topology, counts, 1))
    assert set(flat.rank_messages.tolist()) == {32 - 8}
    assert set(halo.rank_messages.tolist()) == {4 - 1}
    # two GCDs to a NIC: every NIC carries the same
    assert set(halo.nic_out_bytes.tolist()) == {2 * 24.0}


@given(CLUSTERS, st.integers(1, 4), st.integers(0, 99))
def test_make_plan_dedup_crosses_once_per_node(cluster, top_k, seed) -> None:
    topology = make_cluster(*zip(*cluster, strict=True), seed)
    num_ranks = topology.num_ranks
    rng = np.random.default_rng(seed)
    placement = PlacementMap.contiguous(2 * num_ranks, num_ranks)
    ids = [
        rng.integers(0, 2 * num_ranks + 1, (rng.integers(0, 5), top_k)) for _ in range(num_ranks)
    ]
    counts = count_rows(topology, placement, ids)
    plan = make_plan(topology, counts, 16, "halo_dedup")
    check_plan(plan)
    check_plan(plan.reverse())
    crossing: dict[tuple[int, int], set[int]] = {}
    node_of = topology.maps.rank_to_node
    for src, rows in enumerate(ids):
        physical = placement.choose(topology, src, rows)
        for token, slots in enumerate(physical):
            for slot in slots:
                if slot < placement.num_slots:
                    node = int(node_of[placement.maps.physical_to_rank[slot]])
                    if node != node_of[src]:
                        crossing.setdefault((src, node), set()).add(token)
    second = plan.phase("II")
    got = {
        (int(s), int(node_of[d])): int(r)
        for s, d, r in zip(second.src, second.dst, second.num_rows, strict=True)
    }
    assert got == {pair: len(tokens) for pair, tokens in crossing.items()}


@given(
    CLUSTERS, st.sampled_from(["flat", "halo"]), st.sampled_from(COUNTS_KINDS), st.integers(0, 99)
)
def test_reverse_turns_every_message_round(cluster, algorithm, kind, seed) -> None:
    topology = make_cluster(*zip(*cluster, strict=True), seed)
    plan = make_plan(topology, make_counts(kind, topology.num_ranks, seed), 16, algorithm)
    back = plan.reverse()
    check_plan(back)
    assert [phase.name for phase in back.phases] == [phase.name for phase in plan.phases][::-1]
    for phase in plan.phases:
        there = back.phase(phase.name)
        forth = zip(phase.src.tolist(), phase.dst.tolist(), phase.num_rows.tolist(), strict=True)
        home = zip(there.dst.tolist(), there.src.tolist(), there.num_rows.tolist(), strict=True)
        assert sorted(forth) == sorted(home)
    again = back.reverse()
    for phase, same in zip(plan.phases, again.phases, strict=True):
        assert (phase.name, phase.after) == (same.name, same.after)
        for field in ("src", "dst", "num_rows", "step"):
            np.testing.assert_array_equal(getattr(phase, field), getattr(same, field))
        for field in ("offsets", "origin", "target", "num_rows"):
            np.testing.assert_array_equal(getattr(phase.blocks, field), getattr(same.blocks, field))
    assert again.digest() == plan.digest() != back.digest()


def test_reverse_waits_the_other_way() -> None:
    plan = make_plan(frontier(2), np.ones((16, 16), dtype=int), 1)
    assert {phase.name: phase.after for phase in plan.phases} == {"I": (), "II": (), "III": ("II",)}
    back = {phase.name: phase.after for phase in plan.reverse().phases}
    assert back == {"III": (), "II": ("III",), "I": ()}


def test_digest_depends_on_everything_that_matters() -> None:
    topology, counts = frontier(2), make_counts("uniform", 16, 0)
    base = make_plan(topology, counts, 16)
    assert make_plan(topology, counts.copy(), 16.0).digest() == base.digest()
    other_counts = counts.copy()
    other_counts[3, 9] += 1
    others = [
        make_plan(topology, other_counts, 16),
        make_plan(topology, counts, 32),
        make_plan(topology, counts, 16, "flat"),
        make_plan(topology, counts, 16, is_far_first=True),
        make_plan(frontier(2, nodes_per_group=1), counts, 16),
    ]
    assert len({plan.digest() for plan in [base, *others]}) == 6
    recipes = [
        recipe_digest(topology, "halo"),
        recipe_digest(topology, "halo", is_far_first=True),
        recipe_digest(topology, "halo_dedup"),
        recipe_digest(frontier(3), "halo"),
    ]
    assert len(set(recipes)) == 4


def test_expected_counts_can_be_priced_only() -> None:
    counts = np.full((16, 16), 0.5)
    plan = make_plan(frontier(2), counts, 16, has_blocks=False)
    assert loads_of(plan).level_bytes["group"] == pytest.approx(2 * 64 * 0.5 * 16)
    with pytest.raises(
        ConfigError, match="counts must be integers for a plan with blocks, got exp"
    ):
        make_plan(frontier(2), counts, 16)


def test_make_plan_instructs() -> None:
    topology, counts = frontier(2), np.ones((16, 16), dtype=int)
    with pytest.raises(
        ConfigError, match="algorithm must be one of flat, halo, halo_dedup, got 'h"
    ):
        make_plan(topology, counts, 16, "halodedup")
    with pytest.raises(
        ConfigError, match="counts must be ExchangeCounts for halo_dedup, got a mat"
    ):
        make_plan(topology, counts, 16, "halo_dedup")
    with pytest.raises(
        ConfigError, match=r"rows must have shape \(16, 16\), from rank to rank, got"
    ):
        make_plan(topology, counts[:8, :8], 16)
    with pytest.raises(ConfigError, match="rows must be >= 0, got -1"):
        make_plan(topology, -counts, 16)
    with pytest.raises(ConfigError, match="row_bytes must be above 0, got 0"):
        make_plan(topology, counts, 0)
    with pytest.raises(PlanError, match="a flat plan has flat, not II"):
        make_plan(topology, counts, 16, "flat").phase("II")
