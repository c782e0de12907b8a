"""Seconds as a resource: how many are left, and how many a part may take."""

import time
from collections.abc import Callable

from piper_kernels.errors import require

Clock = Callable[[], float]


class TimeBudget:
    """Counts down from its creation.

    Example:
        >>> clock = iter([0.0, 4.0, 4.0]).__next__
        >>> budget = TimeBudget(10.0, clock)
        >>> budget.left_s, budget.has(7.0)
        (6.0, False)
    """

    def __init__(self, seconds: float, clock: Clock = time.monotonic) -> None:
        require(seconds > 0, "TimeBudget", "seconds", "be above 0", seconds)
        self._clock = clock
        self._end_s = clock() + seconds

    @property
    def left_s(self) -> float:
        """Seconds left, 0 when spent."""
        return max(0.0, self._end_s - self._clock())

    def has(self, seconds: float) -> bool:
        """Whether as many are left."""
        return self.left_s >= seconds


def part_limit_s(left_s: float, share: float, total_s: float, fewest_s: float) -> float:
    """Seconds that a part may take: its share of the whole, never more than what is left.

    Args:
        left_s: seconds left of the whole.
        share: of the whole that the part is meant to have.
        total_s: the whole.
        fewest_s: a part with less is not worth starting.

    Returns:
        The limit, or 0 if the part is not to be started.

    Example:
        >>> part_limit_s(left_s=100.0, share=0.5, total_s=480.0, fewest_s=5.0)
        100.0
        >>> part_limit_s(left_s=4.0, share=0.5, total_s=480.0, fewest_s=5.0)
        0.0
    """
    if left_s < fewest_s:
        return 0.0
    return min(left_s, max(share * total_s, fewest_s))
