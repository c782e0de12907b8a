"""Fitting links: what made the points is found again, with and without noise and a curve."""

import hypothesis
import numpy as np
import pytest
from hypothesis import strategies as st

from piper_kernels.dist.links import Link
from piper_kernels.dist.probe_fit import Point, fit_link, relative_errors
from piper_kernels.errors import ConfigError

SIZES = (64, 1024, 16_384, 262_144, 4_194_304)


def make_points(link: Link, noise: float = 0.0, seed: int = 0) -> list[Point]:
    random = np.random.default_rng(seed)
    return [
        Point(
            level="group",
            num_messages=count,
            size_bytes=size,
            seconds=link.seconds(count * size, count) * float(1 + noise * random.uniform(-1, 1)),
        )
        for count in (1, 2, 8)
        for size in SIZES
    ]


@hypothesis.given(
    latency_s=st.floats(1e-6, 1e-2), gap_s=st.floats(1e-6, 1e-3), rate=st.floats(1e6, 1e11)
)
def test_fit_link_finds_what_made_the_points(latency_s: float, gap_s: float, rate: float) -> None:
    truth = Link(latency_s=latency_s, bandwidth_bytes_per_s=rate, message_gap_s=gap_s)
    link = fit_link(make_points(truth))
    assert link.efficiency == ()
    assert link.latency_s == pytest.approx(latency_s, rel=1e-6)
    assert link.message_gap_s == pytest.approx(gap_s, rel=1e-6)
    assert link.bandwidth_bytes_per_s == pytest.approx(rate, rel=1e-6)


def test_fit_link_is_never_negative() -> None:
    """Without latency and gap noise would pull one of them below 0."""
    truth = Link(latency_s=0.0, bandwidth_bytes_per_s=1e9)
    for seed in range(20):
        link = fit_link(make_points(truth, noise=0.3, seed=seed))
        assert link.latency_s >= 0
        assert link.message_gap_s >= 0
        assert 0.7e9 < link.bandwidth_bytes_per_s < 1.4e9


def test_fit_link_is_near_in_spite_of_noise() -> None:
    truth = Link(latency_s=1e-3, bandwidth_bytes_per_s=1e8, message_gap_s=3e-4)
    points = make_points(truth, noise=0.05)
    link = fit_link(points)
    assert link.latency_s == pytest.approx(1e-3, rel=0.15)
    assert link.message_gap_s == pytest.approx(3e-4, rel=0.15)
    assert link.bandwidth_bytes_per_s == pytest.approx(1e8, rel=0.1)
    assert np.abs(relative_errors(link, points)).max() < 0.12


def test_fit_link_draws_the_curve_of_large_messages() -> None:
    curve = ((262_144.0, 0.5), (4_194_304.0, 1.0))
    truth = Link(latency_s=1e-5, bandwidth_bytes_per_s=1e9, message_gap_s=1e-6, efficiency=curve)
    points = make_points(truth)
    link = fit_link(points)
    assert link.efficiency
    assert link.bandwidth_bytes_per_s == pytest.approx(1e9, rel=0.02)
    large = [point for point in points if point.size_bytes >= 262_144]
    assert np.abs(relative_errors(link, large)).max() < 0.06
    straight = link.replace(efficiency=())
    assert np.abs(relative_errors(straight, large)).max() > 0.3


def test_fit_link_gives_no_size_more_than_the_bandwidth() -> None:
    """A burst makes middle sizes quicker than the link: the bandwidth is that of the largest."""
    points = [
        point.replace(seconds=point.seconds * (0.5 if point.size_bytes == 262_144 else 1.0))
        for point in make_points(Link(latency_s=1e-6, bandwidth_bytes_per_s=1e8))
    ]
    link = fit_link(points)
    assert link.bandwidth_bytes_per_s == pytest.approx(1e8, rel=0.05)


@pytest.mark.parametrize(
    "kept",
    [
        lambda point: point.num_messages == 1,
        lambda point: point.size_bytes == 64,
    ],
)
def test_fit_link_needs_sizes_and_numbers(kept: object) -> None:
    assert callable(kept)
    points = filter(kept, make_points(Link(latency_s=1e-3, bandwidth_bytes_per_s=1e8)))
    with pytest.raises(ConfigError, match="have two sizes and two numbers of messages at least"):
        fit_link(list(points))


def test_fit_link_refuses_times_that_do_not_grow() -> None:
    points = [
        Point(level="node", num_messages=count, size_bytes=size, seconds=count * 1e-3 / size**0.5)
        for count in (1, 8)
        for size in SIZES
    ]
    with pytest.raises(ConfigError, match="points must take longer for more bytes"):
        fit_link(points)


def test_relative_errors_are_shares_of_the_measured_time() -> None:
    link = Link(latency_s=1.0, bandwidth_bytes_per_s=1e3)
    point = Point(level="node", num_messages=1, size_bytes=1000, seconds=4.0)
    assert relative_errors(link, [point]).tolist() == [0.5]
