"""Interleaving with a clock that the test moves by hand."""

from collections.abc import Callable

import pytest

from bench.timing import Budget, Stopwatch, Variant, interleave, wall_clock
from piper_kernels.errors import ConfigError


def fake_stopwatch(seconds: float) -> Stopwatch:
    def time_call(run: Callable[[], object]) -> float:
        run()
        return seconds

    return time_call


def spy(name: str, calls: list[str], max_rounds: int | None = None) -> Variant:
    return Variant(
        name=name,
        run=lambda: calls.append(name),
        prepare=lambda: calls.append(f"prepare {name}"),
        max_rounds=max_rounds,
    )


def test_interleave_goes_round_and_moves_the_first_on() -> None:
    calls: list[str] = []
    budget = Budget(warm_up_rounds=0, min_rounds=3, max_rounds=3)
    variants = [spy(name, calls) for name in "abc"]
    samples = interleave(variants, budget, fake_stopwatch(1.0))
    assert [call for call in calls if "prepare" not in call] == list("abcbcacab")
    assert calls[:2] == ["prepare a", "a"]
    assert samples == {name: [1.0, 1.0, 1.0] for name in "abc"}


def test_interleave_warms_up_without_timing() -> None:
    calls: list[str] = []
    timed: list[int] = []

    def stopwatch(run: Callable[[], object]) -> float:
        timed.append(1)
        run()
        return 1.0

    budget = Budget(warm_up_rounds=2, min_rounds=1, max_rounds=1)
    interleave([spy("a", calls)], budget, stopwatch)
    assert calls.count("a") == 3
    assert len(timed) == 1


def test_interleave_stops_when_the_seconds_are_spent() -> None:
    budget = Budget(warm_up_rounds=0, min_rounds=2, max_rounds=100, seconds=7.0)
    samples = interleave([spy("a", []), spy("b", [])], budget, fake_stopwatch(1.0))
    # 2 seconds a round: the round in which the seventh second falls is the last
    assert len(samples["a"]) == len(samples["b"]) == 4


def test_interleave_keeps_min_rounds_whatever_they_cost() -> None:
    budget = Budget(warm_up_rounds=0, min_rounds=7, max_rounds=9, seconds=0.0)
    assert len(interleave([spy("a", [])], budget, fake_stopwatch(60.0))["a"]) == 7


def test_interleave_lets_a_slow_variant_sit_out() -> None:
    calls: list[str] = []
    budget = Budget(warm_up_rounds=1, min_rounds=4, max_rounds=4)
    variants = [spy("fast", calls), spy("slow", calls, max_rounds=1)]
    samples = interleave(variants, budget, fake_stopwatch(1.0))
    assert {name: len(seconds) for name, seconds in samples.items()} == {"fast": 4, "slow": 1}
    assert calls.count("slow") == 1, "the gate has warmed it up"


def test_interleave_refuses_equal_names() -> None:
    with pytest.raises(ConfigError, match=r"interleave: variants must differ in name"):
        interleave([spy("a", []), spy("a", [])], Budget())
    with pytest.raises(ConfigError, match=r"interleave: variants must not be empty"):
        interleave([], Budget())


def test_budget_refuses_more_rounds_at_least_than_at_most() -> None:
    with pytest.raises(ConfigError, match=r"min_rounds must be in \[1, max_rounds\], got 9"):
        Budget(min_rounds=9, max_rounds=3)


def test_wall_clock_runs_once_and_measures() -> None:
    calls: list[int] = []
    assert wall_clock(lambda: calls.append(sum(range(10000)))) > 0.0
    assert len(calls) == 1
