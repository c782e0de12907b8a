"""From measured points to a :class:`Link`: latency, bandwidth, gap per message, efficiency curve.

A point says how long it took until ``k`` messages of ``b`` bytes had passed one port. The model is
that of :class:`Link`: ``latency + k * (gap + b / bandwidth)``, linear in its three unknowns, fitted
by least squares of the relative errors. What large messages take longer than that becomes the
efficiency curve.

Pure: no torch, no process group.
"""

import itertools
from collections.abc import Sequence

import numpy as np

from piper_kernels.dist.links import FloatArray, Level, Link
from piper_kernels.errors import require
from piper_kernels.strict_model import PositiveFloat, PositiveInt, StrictModel

# a curve is worth having where bytes are nearly all of the time and the line is off by more
_CURVE_SHARE = 0.75
_CURVE_ERROR = 0.05


class Point(StrictModel):
    """One measurement at one level.

    Attributes:
        level: whose link it is.
        num_messages: that passed each port, one way.
        size_bytes: of each.
        seconds: from the first byte sent to the last received.
    """

    level: Level
    num_messages: PositiveInt
    size_bytes: PositiveInt
    seconds: PositiveFloat


def fit_link(points: Sequence[Point]) -> Link:
    """Fit one level's link.

    Args:
        points: of two sizes and two numbers of messages at least.

    Raises:
        ConfigError: too few kinds of points, or times that do not grow with the bytes.

    Example:
        >>> truth = Link(latency_s=1e-3, bandwidth_bytes_per_s=1e8, message_gap_s=1e-4)
        >>> points = [
        ...     Point(level="node", num_messages=k, size_bytes=b, seconds=truth.seconds(k * b, k))
        ...     for k in (1, 8) for b in (100, 10_000, 1_000_000)]
        >>> link = fit_link(points)
        >>> round(link.latency_s, 6), round(link.message_gap_s, 6)
        (0.001, 0.0001)
        >>> round(link.bandwidth_bytes_per_s)
        100000000
    """
    name = "fit_link"
    sizes = {point.size_bytes for point in points}
    counts = {point.num_messages for point in points}
    fits = len(sizes) >= 2 and len(counts) >= 2
    found = f"sizes {sorted(sizes)} and numbers {sorted(counts)}"
    requirement = "have two sizes and two numbers of messages at least"
    require(fits, name, "points", requirement, found, "Measure more.")
    seconds = np.array([point.seconds for point in points])
    messages = np.array([float(point.num_messages) for point in points])
    num_bytes = messages * [point.size_bytes for point in points]
    latency_s, gap_s, byte_s = _least_squares(messages, num_bytes, seconds)
    remedy = "Measure larger messages, or on a quieter machine."
    requirement = "take longer for more bytes"
    require(byte_s > 0, name, "points", requirement, "times that do not", remedy)
    bandwidth, curve = 1 / byte_s, _curve(points, latency_s, gap_s, byte_s)
    if curve:
        # what the largest size gets is the bandwidth: no size has more than all of it
        largest = curve[-1][1]
        bandwidth *= largest
        curve = [(size, min(share / largest, 1.0)) for size, share in curve]
    return Link(
        latency_s=latency_s,
        bandwidth_bytes_per_s=bandwidth,
        message_gap_s=gap_s,
        efficiency=tuple(curve),
    )


def relative_errors(link: Link, points: Sequence[Point]) -> FloatArray:
    """How much longer each point took than ``link`` says, as a share of what it took."""
    said = [link.seconds(p.num_messages * p.size_bytes, p.num_messages) for p in points]
    measured = np.array([point.seconds for point in points])
    return 1 - np.array(said) / measured


def _least_squares(
    messages: FloatArray, num_bytes: FloatArray, seconds: FloatArray
) -> tuple[float, float, float]:
    """Latency, gap and seconds per byte, none below 0.

    With three unknowns all choices of those that are 0 can be tried.
    """
    columns = np.stack([np.ones_like(messages), messages, num_bytes], axis=1) / seconds[:, None]
    best, best_error = np.zeros(3), np.inf
    for kept in itertools.chain.from_iterable(
        itertools.combinations(range(3), count) for count in (1, 2, 3)
    ):
        chosen = columns[:, kept]
        # bytes and counts differ by many powers of ten
        scale = np.abs(chosen).max(axis=0)
        found, *_ = np.linalg.lstsq(chosen / scale, np.ones_like(seconds), rcond=None)
        error = float(np.square(chosen / scale @ found - 1).sum())
        if (found >= 0).all() and error < best_error:
            best, best_error = np.zeros(3), error
            best[list(kept)] = found / scale
    return float(best[0]), float(best[1]), float(best[2])


def _curve(
    points: Sequence[Point], latency_s: float, gap_s: float, byte_s: float
) -> list[tuple[float, float]]:
    """Share of ``1 / byte_s`` that each size gets, where bytes are nearly all of its time.

    Empty if the straight line does for all of them.
    """
    shares: dict[int, list[float]] = {}
    for point in points:
        left_s = point.seconds - latency_s - point.num_messages * gap_s
        line_s = point.num_messages * point.size_bytes * byte_s
        if left_s > _CURVE_SHARE * point.seconds:
            shares.setdefault(point.size_bytes, []).append(line_s / left_s)
    curve = [(float(size), float(np.median(each))) for size, each in sorted(shares.items())]
    is_straight = all(abs(share - 1) <= _CURVE_ERROR for _, share in curve)
    return [] if is_straight else curve
