"""The choice is the traffic model's, worked out once for alike counts."""

import numpy as np

from piper_kernels.dist.algorithm_choice import AlgorithmChoice
from piper_kernels.dist.exchange_counts import ExchangeCounts, expect_rows, plain_counts
from piper_kernels.dist.placement_map import PlacementMap
from piper_kernels.dist.topology_presets import frontier, one_box
from piper_kernels.dist.traffic import choose
from piper_kernels.dist.traffic_tasks import Traffic


def test_choose_is_the_traffic_models() -> None:
    topology = frontier(2)
    counts = expect_rows(topology, PlacementMap.contiguous(64, 16), 4096, 8)
    traffic = Traffic(
        topology=topology, counts=counts, dispatch_row_bytes=4096.0, combine_row_bytes=4096.0
    )
    wanted = choose(traffic, chunk_options=(1,)).best.algorithm
    choice = AlgorithmChoice(topology)
    assert choice.choose(counts, 4096.0, 4096.0) == wanted == "halo_dedup"
    assert choice.last is not None
    assert "fewer bytes" in choice.last.reason


def scaled(counts: ExchangeCounts, factor: float) -> ExchangeCounts:
    return ExchangeCounts(
        rows=counts.rows * factor,
        rank_rows=counts.rank_rows * factor,
        node_rows=counts.node_rows * factor,
    )


def test_choose_remembers_alike_counts() -> None:
    topology = frontier(2)
    counts = expect_rows(topology, PlacementMap.contiguous(64, 16), 4096, 8)
    choice = AlgorithmChoice(topology)
    choice.choose(counts, 4096.0, 4096.0)
    first = choice.last
    choice.choose(scaled(counts, 1.01), 4096.0, 4096.0)
    assert choice.last is first
    choice.choose(scaled(counts, 4.0), 4096.0, 4096.0)
    assert choice.last is not first


def test_choose_takes_only_what_is_allowed() -> None:
    topology = frontier(2)
    counts = plain_counts(topology, np.full((16, 16), 100))
    assert AlgorithmChoice(topology, ("halo",)).choose(counts, 1e4, 1e4) == "halo"


def test_choose_is_flat_on_one_node() -> None:
    choice = AlgorithmChoice(one_box(4))
    assert choice.choose(plain_counts(one_box(4), np.ones((4, 4))), 8.0, 8.0) == "flat"
    assert choice.last is None
