"""Interleaved timing: every variant once per round, so that noise falls on all of them alike."""

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from piper_kernels.errors import require

# runs a call and says how many seconds it took; tests inject a clock of their own
Stopwatch = Callable[[Callable[[], object]], float]


def wall_clock(run: Callable[[], object]) -> float:
    """Seconds that ``run`` took by the monotonic clock; for work done when the call returns."""
    start = time.perf_counter()
    run()
    return time.perf_counter() - start


def _nothing() -> None:
    """Prepare nothing."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Variant:
    """One way to do the work.

    Attributes:
        name: as printed and recorded.
        run: what is timed.
        prepare: called before each run, not timed: clears gradients, flushes caches.
        outputs: runs once and returns named tensors for the gate; ``None`` for a roof, which
            computes something else on purpose.
        max_rounds: a very slow variant takes part in that many rounds only and, since the gate
            has run it already, in no warm-up; ``None`` takes part in all.
    """

    name: str
    run: Callable[[], object]
    prepare: Callable[[], None] = _nothing
    outputs: Callable[[], Mapping[str, Any]] | None = None
    max_rounds: int | None = None


@dataclass(frozen=True, kw_only=True, slots=True)
class Budget:
    """How long one case is timed.

    Attributes:
        warm_up_rounds: untimed rounds first.
        min_rounds: timed rounds whatever they cost; 6 is the fewest for a 95 % interval.
        max_rounds: timed rounds at most.
        seconds: no further round starts once the timed runs add up to this.
    """

    warm_up_rounds: int = 1
    min_rounds: int = 7
    max_rounds: int = 51
    seconds: float = 4.0

    def __post_init__(self) -> None:
        ordered = 1 <= self.min_rounds <= self.max_rounds
        remedy = f"max_rounds is {self.max_rounds}."
        require(ordered, "Budget", "min_rounds", "be in [1, max_rounds]", self.min_rounds, remedy)

    def is_spent(self, num_rounds: int, seconds: float) -> bool:
        """Whether to stop after ``num_rounds`` timed rounds that took ``seconds``."""
        if num_rounds < self.min_rounds:
            return False
        return num_rounds >= self.max_rounds or seconds >= self.seconds


def interleave(
    variants: Sequence[Variant], budget: Budget, stopwatch: Stopwatch = wall_clock
) -> dict[str, list[float]]:
    """Time all variants round robin in this process.

    The round's first variant moves on by one each round, so none always follows the same neighbour
    in the caches.

    Args:
        variants: at least one, with different names.
        budget: rounds and seconds.
        stopwatch: the timer.

    Returns:
        Name -> seconds of each round it took part in; entry r belongs to round r.
    """
    names = [variant.name for variant in variants]
    require(len(names) > 0, "interleave", "variants", "not be empty", names)
    require(len(set(names)) == len(names), "interleave", "variants", "differ in name", names)
    for _ in range(budget.warm_up_rounds):
        for variant in variants:
            if variant.max_rounds is None:
                variant.prepare()
                variant.run()
    samples: dict[str, list[float]] = {name: [] for name in names}
    num_rounds, spent_s = 0, 0.0
    while not budget.is_spent(num_rounds, spent_s):
        first = num_rounds % len(variants)
        for variant in (*variants[first:], *variants[:first]):
            if variant.max_rounds is not None and num_rounds >= variant.max_rounds:
                continue
            variant.prepare()
            seconds = stopwatch(variant.run)
            samples[variant.name].append(seconds)
            spent_s += seconds
        num_rounds += 1
    return samples
