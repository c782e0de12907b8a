"""Counting rows, against loops and against expectation."""

import itertools

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from piper_kernels.dist.exchange_counts import (
    ExchangeCounts,
    count_rows,
    dedup_factor,
    expect_rows,
    plain_counts,
)
from piper_kernels.dist.placement_map import PlacementMap
from piper_kernels.dist.topology_presets import frontier
from piper_kernels.errors import ConfigError

RAGGED = frontier(1).lay_out((2, 1, 2))


@given(st.lists(st.integers(0, 4), min_size=5, max_size=5), st.integers(1, 3), st.integers(0, 9))
def test_count_rows_equals_loops(tokens: list[int], top_k: int, seed: int) -> None:
    rng = np.random.default_rng(seed)
    placement = PlacementMap(num_experts=6, slots=((0, 1), (2,), (3, 0), (4,), (5, 2)))
    # 6 marks dropped slots
    ids = [rng.integers(0, 7, (count, top_k)) for count in tokens]
    counts = count_rows(RAGGED, placement, ids)
    counts.check("test", RAGGED)
    node_of = RAGGED.maps.rank_to_node
    for source in range(5):
        physical = placement.choose(RAGGED, source, ids[source])
        targets = [
            [int(placement.maps.physical_to_rank[p]) for p in row if p < placement.num_slots]
            for row in physical
        ]
        for rank in range(5):
            assert counts.rows[source, rank] == sum(row.count(rank) for row in targets)
            assert counts.rank_rows[source, rank] == sum(rank in row for row in targets)
        for node in range(3):
            reached = [{int(node_of[rank]) for rank in row} for row in targets]
            assert counts.node_rows[source, node] == sum(node in nodes for nodes in reached)


def test_expect_rows_equals_enumeration() -> None:
    placement = PlacementMap.contiguous(7, 5)
    counts = expect_rows(RAGGED, placement, 1, 3)
    counts.check("test", RAGGED)
    every = np.array(list(itertools.combinations(range(7), 3)))
    counted = count_rows(RAGGED, placement, [every] * 5)
    for name in ("rows", "rank_rows", "node_rows"):
        expected = getattr(counted, name) / len(every)
        np.testing.assert_allclose(getattr(counts, name), expected, rtol=1e-12)
    assert counts.dedup_factor(RAGGED) == pytest.approx(counted.dedup_factor(RAGGED))


@pytest.mark.parametrize(
    ("top_k", "num_nodes", "factor"), [(8, 2, 4.016), (8, 4, 2.2225), (1, 9, 1)]
)
def test_dedup_factor_known_values(top_k: int, num_nodes: int, factor: float) -> None:
    assert dedup_factor(top_k, num_nodes) == pytest.approx(factor, abs=5e-4)


@pytest.mark.parametrize(("top_k", "num_nodes"), [(1, 3), (2, 2), (3, 2), (4, 3), (2, 1)])
def test_dedup_factor_equals_enumeration(top_k: int, num_nodes: int) -> None:
    """Every choice of K nodes is equally likely: rows over distinct nodes, of the remote ones."""
    choices = list(itertools.product(range(num_nodes), repeat=top_k))
    rows = sum(len(choice) for choice in choices)
    distinct = sum(len(set(choice)) for choice in choices)
    assert dedup_factor(top_k, num_nodes) == pytest.approx(rows / distinct, rel=1e-12)


def test_dedup_factor_is_the_limit_of_many_experts() -> None:
    topology = frontier(2).select(range(16))
    few = expect_rows(topology, PlacementMap.contiguous(64, 16), 1, 8).dedup_factor(topology)
    many = expect_rows(topology, PlacementMap.contiguous(16384, 16), 1, 8).dedup_factor(topology)
    assert few < many < dedup_factor(8, 2)
    assert many == pytest.approx(dedup_factor(8, 2), rel=1e-3)


def test_dedup_factor_without_crossing_is_one() -> None:
    topology = frontier(1)
    assert plain_counts(topology, np.ones((8, 8))).dedup_factor(topology) == 1.0


def test_exchange_counts_check_instructs() -> None:
    rows = np.ones((5, 5), dtype=np.int64)
    good = plain_counts(RAGGED, rows)
    for field, value, message in [
        ("rank_rows", rows * 2, "rank_rows must be at most rows"),
        ("node_rows", good.node_rows * 2, "node_rows must be at most the sum of rank_rows"),
        ("node_rows", good.node_rows * 0, "node_rows must be at least the largest"),
        ("node_rows", rows, r"node_rows must have shape \(5, 3\) for 5 ranks on 3 nodes, got"),
        ("rows", -rows, "rows must be >= 0, got -1"),
    ]:
        parts = {"rows": rows, "rank_rows": rows, "node_rows": good.node_rows, field: value}
        with pytest.raises(ConfigError, match=f"f: {message}"):
            ExchangeCounts(**parts).check("f", RAGGED)
    with pytest.raises(ConfigError, match=r"rows must have shape \(5, 5\), from rank to rank"):
        plain_counts(RAGGED, np.ones((4, 5)))


def test_count_rows_instructs() -> None:
    placement = PlacementMap.contiguous(5, 5)
    with pytest.raises(ConfigError, match="one array for each of the 5 ranks, got 1 arrays"):
        count_rows(RAGGED, placement, [[[0]]])
    with pytest.raises(ConfigError, match="placement must hold each expert once, got replicas"):
        expect_rows(RAGGED, PlacementMap(num_experts=1, slots=((0,),) * 5), 1, 1)
    with pytest.raises(ConfigError, match=r"top_k must be in 1 .. 5, the experts, got 6"):
        expect_rows(RAGGED, placement, 1, 6)
