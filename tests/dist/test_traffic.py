"""Predictions against the papers' closed forms, and choices where theory knows the winner."""

import numpy as np
import pytest

from piper_kernels.dist.exchange_counts import expect_rows, plain_counts
from piper_kernels.dist.links import Link, Links
from piper_kernels.dist.placement_map import PlacementMap
from piper_kernels.dist.topology import Topology
from piper_kernels.dist.topology_presets import frontier, one_box
from piper_kernels.dist.traffic import choose, predict
from piper_kernels.dist.traffic_tasks import Traffic
from piper_kernels.errors import ConfigError


def uniform(topology: Topology, bytes_per_rank: float, **fields) -> Traffic:
    """Every rank sends as much to every rank, one row to each."""
    counts = plain_counts(topology, np.ones((topology.num_ranks, topology.num_ranks)))
    row = bytes_per_rank / topology.num_ranks
    return Traffic(
        topology=topology, counts=counts, dispatch_row_bytes=row, combine_row_bytes=row, **fields
    )


def speed_up(traffic: Traffic) -> float:
    return predict(traffic, "flat").seconds / predict(traffic, "halo").seconds


def test_halo_cannot_win_by_bandwidth() -> None:
    """0.82: 12.5 GB/s per GCD outside, and 7/8 of it once more at 50 GB/s inside.

    Source: facts on Piper, section 1.8 (derived there).
    """
    expected = (1 / 12.5) / (1 / 12.5 + 7 / 8 / 50)
    assert expected == pytest.approx(0.82, abs=0.001)
    assert speed_up(uniform(frontier(16), 1e12)) == pytest.approx(expected, rel=1e-3)
    assert choose(uniform(frontier(16), 1e12), chunk_options=(1,)).best.algorithm == "flat"


def test_halo_wins_ranks_per_node_by_messages() -> None:
    """Towards g = 8 as 8 (N - 1) messages become N - 1. Source: as above."""
    ratios = [speed_up(uniform(frontier(n), 8.0 * n)) for n in (2, 8, 32, 64)]
    assert ratios == sorted(ratios)
    assert 7.0 < ratios[-1] < 8.0
    choice = choose(uniform(frontier(64), 512.0))
    assert choice.best.algorithm == "halo"
    assert choice.best.num_chunks == 1
    assert "8.00 times fewer messages between nodes" in choice.reason


def test_flat_is_chosen_where_halo_only_adds_a_pass() -> None:
    """Latency and bandwidth alone, no gap: HALO pays latency twice and moves the same bytes."""
    topology = frontier(4)
    nic = Link(latency_s=1e-3, bandwidth_bytes_per_s=5e7)
    links = Links(node=Link(latency_s=1e-5, bandwidth_bytes_per_s=1e10), group=nic, far=nic)
    topology = topology.replace(links=links)
    for size in (1e2, 1e4, 1e6):
        choice = choose(uniform(topology, size, has_combine=False))
        assert choice.best.name == "flat"
        assert (
            "though it sends 8.00 times fewer messages between nodes; limited by" in choice.reason
        )
        assert choice.candidates[0] is choice.best is choice.baseline


def test_dedup_saves_its_factor() -> None:
    """K = 8, 2 nodes of 4 ranks, link-bound: close to the bytes' factor. Source: issue's table."""
    topology = frontier(1).lay_out((4, 4))
    nic = Link(latency_s=1e-4, bandwidth_bytes_per_s=1.25e7)
    links = Links(node=Link(latency_s=1e-5, bandwidth_bytes_per_s=1e10), group=nic, far=nic)
    topology = topology.replace(links=links)
    counts = expect_rows(topology, PlacementMap.contiguous(64, 8), 4096, 8)
    traffic = Traffic(
        topology=topology, counts=counts, dispatch_row_bytes=2048, combine_row_bytes=2048, top_k=8
    )
    choice = choose(traffic)
    assert choice.best.algorithm == "halo_dedup"
    factor = counts.dedup_factor(topology)
    assert factor == pytest.approx(4.0, abs=0.02)
    ratio = choice.baseline.crossing_bytes / choice.best.crossing_bytes
    assert ratio == pytest.approx(factor, rel=1e-9)
    assert 0.95 * factor < choice.baseline.seconds / choice.best.seconds < factor
    assert f"{factor:.2f} times fewer bytes between nodes" in choice.reason


# Source: facts on MoNTA, section 2.2: 8K x 8192 bf16, two nodes of 8, 200 GB/s inside, 20 us
@pytest.mark.parametrize(
    ("copies", "node_gb_per_s", "gain", "num_chunks"),
    [
        (1, 25, 7.4, 5),
        (1, 50, 6.8, 5),
        (1, 100, 5.9, 5),
        (1, 200, 3.5, 4),
        (2, 25, 7.5, 8),
        (2, 50, 7.1, 8),
        (2, 100, 6.4, 8),
        (2, 200, 3.8, 6),
    ],
)
def test_sliced_chunks_reproduce_the_closed_form(copies, node_gb_per_s, gain, num_chunks) -> None:
    inside = Link(latency_s=20e-6, bandwidth_bytes_per_s=200e9)
    nic = Link(latency_s=20e-6, bandwidth_bytes_per_s=node_gb_per_s * 1e9 / 8)
    base = frontier(1)
    node = base.nodes[0].replace(nics=tuple(range(8)))
    base = base.replace(nodes=(node,), links=Links(node=inside, group=nic), fabric=None)
    topology = base.lay_out((8, 8))
    rows = 8192 * copies
    counts = plain_counts(topology.select([0, 8]), np.full((2, 2), rows / 2))
    traffic = Traffic(
        topology=topology,
        counts=counts,
        dispatch_row_bytes=2 * 8192,
        combine_row_bytes=2 * 8192,
        tp_size=8,
        has_combine=False,
    )
    choice = choose(traffic, algorithms=("flat",), chunk_options=range(1, 13))
    assert (choice.best.tp_mode, choice.best.num_chunks) == ("sliced", num_chunks)
    ratio = choice.baseline.seconds / choice.best.seconds
    assert ratio == pytest.approx(gain, abs=0.06)


def test_pipelining_does_not_pay_for_small_messages() -> None:
    topology = frontier(2)
    counts = plain_counts(topology.select(range(0, 16, 8)), np.full((2, 2), 4.0))
    traffic = Traffic(
        topology=topology, counts=counts, dispatch_row_bytes=64, combine_row_bytes=64, tp_size=8
    )
    assert choose(traffic).best.num_chunks == 1


def test_predict_overlaps_chunks_with_experts() -> None:
    """Never less than the longest resource, never more than all in a row."""
    topology = frontier(4)
    traffic = uniform(topology, 1e8, expert_s=5e-3)
    whole = predict(traffic, "halo").seconds
    times = {n: predict(traffic, "halo", num_chunks=n) for n in (2, 4, 8)}
    for prediction in times.values():
        nic = sum(s for name, s in prediction.stage_s.items() if name.endswith(" II"))
        assert max(nic, 5e-3) * (1 - 1e-9) <= prediction.seconds < whole
        assert prediction.stage_s["experts"] == pytest.approx(5e-3)
    alone = predict(uniform(topology, 1e8), "halo").seconds
    assert whole == pytest.approx(alone + 5e-3)


def test_predict_bytes_and_messages_per_link() -> None:
    topology = frontier(2, nodes_per_group=1)
    prediction = predict(uniform(topology, 16e6), "halo", num_chunks=2)
    # there and back, 8 rows of 1 MB from each of 16 ranks; 2 chunks double messages, not bytes
    assert prediction.level_bytes["far"] == pytest.approx(2 * 16 * 8e6)
    assert prediction.level_bytes["group"] == 0
    assert prediction.level_messages["far"] == 2 * 16 * 2
    assert prediction.crossing_bytes == prediction.level_bytes["far"]
    np.testing.assert_allclose(prediction.nic_out_bytes, 2 * 2 * 8e6)
    assert prediction.limit.startswith("dispatch II on NIC 0 out, 9")


def test_flat_far_efficiency_slows_flat_between_groups_only() -> None:
    """Facts on Piper, section 1.8: with 0.25 beyond a rack the model gives more than 3."""
    near, far = frontier(16), frontier(16, nodes_per_group=2)
    for topology, is_slower in ((near, False), (far, True)):
        physics = predict(uniform(topology, 1e8), "flat").seconds
        vendor = predict(uniform(topology, 1e8, flat_far_efficiency=0.25), "flat").seconds
        assert (vendor > 3 * physics) == is_slower
        assert (vendor == physics) != is_slower
    assert 3.0 < speed_up(uniform(far, 1e8, flat_far_efficiency=0.25)) < 4.0


def test_choose_on_one_node_is_flat() -> None:
    choice = choose(uniform(one_box(4), 1e6))
    assert choice.best.name == "flat"
    assert choice.best.crossing_bytes == 0


def test_choose_of_nothing() -> None:
    topology = frontier(2)
    counts = plain_counts(topology, np.zeros((16, 16), dtype=int))
    traffic = Traffic(topology=topology, counts=counts, dispatch_row_bytes=1, combine_row_bytes=1)
    choice = choose(traffic)
    assert (choice.best.name, choice.best.seconds) == ("flat", 0.0)
    assert choice.best.limit == "nothing is sent"


def test_choice_describe_fits_100_columns() -> None:
    text = choose(uniform(frontier(8, nodes_per_group=2), 1e9)).describe()
    assert "modelled" in text
    assert len(text.splitlines()) >= 13
    assert max(map(len, text.splitlines())) <= 100


def test_traffic_choices_instruct() -> None:
    traffic = uniform(frontier(2), 1e6)
    with pytest.raises(
        ConfigError, match="tp_mode must be none exactly if tp_size is 1, and tp_si"
    ):
        predict(traffic, "flat", "sliced")
    with pytest.raises(ConfigError, match="num_chunks must be at least 1, got 0"):
        predict(traffic, "flat", num_chunks=0)
    with pytest.raises(ConfigError, match="algorithms must name one at least"):
        choose(traffic, algorithms=())
    with pytest.raises(ConfigError, match="chunk_options must name one at least"):
        choose(traffic, chunk_options=())
    only = choose(traffic, algorithms=("flat",), chunk_options=(1,))
    assert only.reason.endswith("nothing else is allowed.")
