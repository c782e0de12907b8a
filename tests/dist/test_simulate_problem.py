"""The problems that piper simulate runs: expected counts, refusals, and a run."""

from typing import Any

import numpy as np
import pytest

from piper_kernels.dist.exchange_counts import count_rows, dedup_factor
from piper_kernels.dist.placement_map import PlacementMap
from piper_kernels.dist.simulate_problem import Problem, expected_counts, zipf_popularity
from piper_kernels.dist.topology_presets import frontier
from piper_kernels.errors import ConfigError


def make_problem(**changes: Any) -> Problem:
    fields: dict[str, Any] = {
        "topology": frontier(2),
        "num_experts": 32,
        "num_tokens": 1000,
        "top_k": 4,
        "row_bytes": 1024.0,
    }
    return Problem(**{**fields, **changes})


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"topology": frontier(513)}, "topology must have at most 4096 ranks, got 4104"),
        ({"num_experts": 15}, "num_experts must be at least 16, one a rank, got 15"),
        ({"top_k": 33}, r"top_k must be in 1 \.\. 32, got 33"),
        ({"num_tokens": 0}, "num_tokens must be at least 1"),
        ({"row_bytes": 0.0}, "row_bytes must be above 0"),
        ({"skew": 5.0}, r"skew must be in 0 \.\. 4, got 5.0"),
    ],
)
def test_problem_refuses(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        make_problem(**changes)


def test_zipf_popularity_is_a_share_and_is_skewed() -> None:
    popularity = zipf_popularity(64, 1.0, seed=3)
    assert popularity.sum() == pytest.approx(1.0)
    assert popularity.max() / popularity.min() == pytest.approx(64.0)
    assert (zipf_popularity(64, 0.0) == 1 / 64).all()
    assert (zipf_popularity(64, 1.0, seed=3) == popularity).all()
    assert (zipf_popularity(64, 1.0, seed=4) != popularity).any()


@pytest.mark.parametrize("skew", [0.0, 1.0])
def test_expected_counts_are_the_mean_of_drawn_ones(skew: float) -> None:
    topology, num_tokens, top_k = frontier(1).lay_out((2, 2)), 4000, 3
    placement = PlacementMap.contiguous(8, 4)
    popularity = zipf_popularity(8, skew)
    counts = expected_counts(topology, placement, popularity, num_tokens=num_tokens, top_k=top_k)
    counts.check("test", topology)
    random = np.random.default_rng(0)
    ids = [random.choice(8, (num_tokens, top_k), p=popularity) for _ in range(4)]
    drawn = count_rows(topology, placement, ids)
    for name in ("rows", "rank_rows", "node_rows"):
        expected, found = getattr(counts, name), getattr(drawn, name)
        # four standard deviations of a count of so many draws
        assert np.abs(found - expected).max() < 4 * np.sqrt(num_tokens * top_k / 4)


def test_expected_counts_save_what_the_formula_says() -> None:
    problem = make_problem(topology=frontier(4), num_experts=64, top_k=8)
    assert problem.counts().dedup_factor(problem.topology) == pytest.approx(dedup_factor(8, 4))


def test_problem_run_moves_the_bytes_that_the_counts_say() -> None:
    problem = make_problem(skew=0.5)
    flat, halo, dedup = problem.run()
    assert [flat.algorithm, halo.algorithm, dedup.algorithm] == ["flat", "halo", "halo_dedup"]
    crossing = problem.num_tokens * problem.top_k * problem.row_bytes
    assert sum(flat.level_bytes.values()) == pytest.approx(16 * crossing)
    assert halo.level_bytes["group"] == pytest.approx(flat.level_bytes["group"])
    saved = problem.counts().dedup_factor(problem.topology)
    assert flat.level_bytes["group"] / dedup.level_bytes["group"] == pytest.approx(saved)
    assert [result.label for result in (flat, halo, dedup)] == ["modelled"] * 3
    assert problem.run(("halo",))[0].seconds == halo.seconds


def test_problem_run_background_slows_far_links_only() -> None:
    scattered = frontier(4, nodes_per_group=1)
    slow = scattered.fabric
    assert slow is not None
    narrow = scattered.replace(fabric=slow.replace(uplink_bytes_per_s=100e9))
    for topology, is_slower in ((frontier(4), False), (narrow, True)):
        quiet, busy = (
            make_problem(topology=topology, background_share=share).run(("flat",))[0].seconds
            for share in (0.0, 0.5)
        )
        assert (busy > 1.5 * quiet) == is_slower
        assert busy >= quiet
