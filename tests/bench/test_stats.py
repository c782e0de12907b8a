"""Quantiles, intervals and ratios against values known by hand or by enumeration."""

import itertools
import statistics

import pytest
from hypothesis import given
from hypothesis import strategies as st

from bench.stats import (
    Interval,
    geometric_mean,
    median,
    median_interval,
    paired_ratios,
    quantile,
)
from piper_kernels.errors import ConfigError


def test_quantile_is_linear_between_order_statistics() -> None:
    samples = [5.0, 1.0, 3.0, 2.0, 4.0, 6.0]
    assert quantile(samples, 0.2) == 2.0
    assert quantile(samples, 0.5) == 3.5
    assert quantile(samples, 0.0) == 1.0
    assert quantile(samples, 1.0) == 6.0
    with pytest.raises(ConfigError, match=r"quantile: samples must not be empty, got \[\]\."):
        quantile([], 0.5)


@given(st.lists(st.floats(0.001, 1000.0), min_size=1, max_size=30))
def test_median_equals_the_standard_librarys(samples: list[float]) -> None:
    assert median(samples) == pytest.approx(statistics.median(samples))


@pytest.mark.parametrize(
    ("num", "rank", "coverage"),
    # binomial tables: the ranks every textbook gives for a 95 % interval of the median
    [(6, 1, 0.96875), (9, 2, 0.9609375), (12, 3, 0.96142578125), (25, 8, 0.956714630126953)],
)
def test_median_interval_takes_the_ranks_of_the_table(num: int, rank: int, coverage: float) -> None:
    interval = median_interval([float(i) for i in range(1, num + 1)])
    assert (interval.low, interval.high) == (rank, num + 1 - rank)
    assert interval.coverage == pytest.approx(coverage)


def test_median_interval_covers_what_it_says() -> None:
    # every assignment of 8 samples to either side of the median, equally likely
    ranks = median_interval([float(i) for i in range(1, 9)])
    low, high = int(ranks.low), int(ranks.high)
    hits = [low <= sum(below) < high for below in itertools.product((0, 1), repeat=8)]
    assert sum(hits) / len(hits) == pytest.approx(ranks.coverage)


def test_median_interval_of_few_samples_says_how_little_it_covers() -> None:
    assert median_interval([3.0, 1.0, 2.0]) == Interval(1.0, 3.0, 0.75)
    assert median_interval([7.0]) == Interval(7.0, 7.0, 0.0)


def test_paired_ratios_pairs_rounds() -> None:
    assert paired_ratios([2.0, 9.0, 8.0], [1.0, 3.0]) == [2.0, 3.0]


def test_geometric_mean_of_a_ratio_and_its_inverse_is_one() -> None:
    assert geometric_mean([4.0, 0.25]) == pytest.approx(1.0)
    with pytest.raises(ConfigError, match="geometric_mean: values must not be empty"):
        geometric_mean([])
