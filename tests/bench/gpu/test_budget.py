"""The budget keeper under a clock that the test turns."""

import pytest

from bench.gpu.budget import TimeBudget, part_limit_s
from piper_kernels.errors import ConfigError


class Clock:
    def __init__(self) -> None:
        self.now_s = 100.0

    def __call__(self) -> float:
        return self.now_s


def test_time_budget_counts_down_and_stays_at_zero() -> None:
    clock = Clock()
    budget = TimeBudget(10.0, clock)
    assert (budget.left_s, budget.has(10.0)) == (10.0, True)
    clock.now_s += 4.0
    assert (budget.left_s, budget.has(6.5)) == (6.0, False)
    clock.now_s += 100.0
    assert (budget.left_s, budget.has(0.0)) == (0.0, True)
    with pytest.raises(ConfigError, match="seconds must be above 0"):
        TimeBudget(0.0, clock)


def test_part_limit_s_is_a_share_of_the_whole_and_never_more_than_is_left() -> None:
    limits = {"share": 0.25, "total_s": 400.0, "fewest_s": 5.0}
    assert part_limit_s(400.0, **limits) == 100.0
    assert part_limit_s(60.0, **limits) == 60.0
    assert part_limit_s(4.9, **limits) == 0.0
    # a small share still gets what a part needs to begin
    assert part_limit_s(60.0, share=0.001, total_s=400.0, fewest_s=5.0) == 5.0
