"""Summaries of repeated timings: quantiles, paired ratios, and an interval that assumes nothing."""

import math
from collections.abc import Sequence
from dataclasses import dataclass

from piper_kernels.errors import require


@dataclass(frozen=True, slots=True)
class Interval:
    """A confidence interval; ``coverage`` is what it really covers."""

    low: float
    high: float
    coverage: float


def quantile(samples: Sequence[float], q: float) -> float:
    """The q-quantile, linear between order statistics.

    Example:
        >>> quantile([4.0, 1.0, 2.0], 0.75)
        3.0
    """
    require(len(samples) > 0, "quantile", "samples", "not be empty", samples)
    ordered = sorted(samples)
    position = q * (len(ordered) - 1)
    below = math.floor(position)
    above = min(below + 1, len(ordered) - 1)
    return ordered[below] + (position - below) * (ordered[above] - ordered[below])


def median(samples: Sequence[float]) -> float:
    """The 0.5-quantile."""
    return quantile(samples, 0.5)


def median_interval(samples: Sequence[float], coverage: float = 0.95) -> Interval:
    """An interval for the median, from order statistics: no distribution, no random numbers.

    The k-th smallest and k-th largest of n samples enclose the median with probability
    ``1 - 2 P(Binomial(n, 1/2) < k)``. The narrowest such pair that reaches ``coverage`` is taken.
    Fewer than 6 samples cannot reach 0.95: then it is the range, with its true coverage.

    Example:
        >>> median_interval([1.0, 2.0, 3.0, 4.0, 5.0, 6.0])
        Interval(low=1.0, high=6.0, coverage=0.96875)
    """
    require(len(samples) > 0, "median_interval", "samples", "not be empty", samples)
    ordered = sorted(samples)
    num = len(ordered)
    rank, missed = 0, 0
    while rank + 1 <= num // 2:
        tail = missed + math.comb(num, rank)
        if rank >= 1 and 1.0 - 2.0 * tail / 2**num < coverage:
            break
        rank, missed = rank + 1, tail
    if rank == 0:
        return Interval(ordered[0], ordered[0], 0.0)
    return Interval(ordered[rank - 1], ordered[-rank], 1.0 - 2.0 * missed / 2**num)


def paired_ratios(numerator: Sequence[float], denominator: Sequence[float]) -> list[float]:
    """Round by round ratios; rounds that only one side took part in are left out."""
    return [a / b for a, b in zip(numerator, denominator, strict=False)]


def geometric_mean(values: Sequence[float]) -> float:
    """The mean that suits ratios.

    Example:
        >>> geometric_mean([2.0, 8.0])
        4.0
    """
    require(len(values) > 0, "geometric_mean", "values", "not be empty", values)
    return math.exp(math.fsum(map(math.log, values)) / len(values))
