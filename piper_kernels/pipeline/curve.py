"""A measured share of a peak over a size, read between its points.

Pure: no torch, no process group.
"""

import bisect
import itertools
import math

from piper_kernels.errors import require
from piper_kernels.strict_model import Fraction, PositiveFloat

# (size, share of the peak), sizes rising
Curve = tuple[tuple[PositiveFloat, Fraction], ...]


def share_at(curve: Curve, size: float) -> float:
    """Share at ``size``: linear in the logarithm between points, constant beyond the ends.

    An empty curve is 1 everywhere.

    Example:
        >>> share_at(((10.0, 0.2), (1000.0, 0.6)), 100.0)
        0.4
    """
    if not curve:
        return 1.0
    place = bisect.bisect_left(curve, (size, 0.0))
    if place == 0:
        return curve[0][1]
    if place == len(curve):
        return curve[-1][1]
    (x0, y0), (x1, y1) = curve[place - 1], curve[place]
    return y0 + (y1 - y0) * math.log(size / x0) / math.log(x1 / x0)


def check_curve(owner: str, field: str, curve: Curve) -> None:
    """Raise ``ConfigError`` unless sizes rise and every share is above 0."""
    sizes = [size for size, _ in curve]
    is_rising = all(a < b for a, b in itertools.pairwise(sizes))
    require(is_rising, owner, field, "have rising sizes", sizes, "Sort the points.")
    shares = [share for _, share in curve]
    require(all(shares), owner, field, "have shares above 0", shares)
