"""Which tiles are fastest: measured in interleaved rounds, and only if they compute the same.

Nothing here knows a GPU: what runs and what times it are given.
"""

import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from piper_kernels.triton.tiles import TileConfig

Run = Callable[[TileConfig], tuple[Tensor, ...]]
Timer = Callable[[Callable[[], object]], float]

NUM_ROUNDS = 7
# a winner's lead must exceed what two measurements of the same kernel differ by
LEAST_GAIN = 1.02


@dataclass(frozen=True, slots=True)
class Skipped:
    """Tiles that were not measured, and why."""

    tiles: TileConfig
    reason: str


@dataclass(frozen=True, kw_only=True, slots=True)
class Outcome:
    """What tuning one GEMM found.

    Attributes:
        default: the tiles it would have taken untuned.
        winner: the fastest right ones; the default unless beaten by 2 %.
        default_s: median seconds of the default.
        winner_s: median seconds of the winner.
        num_measured: candidates that ran and were right, the default included.
        skipped: the others.
    """

    default: TileConfig
    winner: TileConfig
    default_s: float
    winner_s: float
    num_measured: int
    skipped: tuple[Skipped, ...]

    @property
    def speedup(self) -> float:
        """Seconds of the default over those of the winner, at least 1."""
        return self.default_s / self.winner_s


def is_same(found: Sequence[Tensor], expected: Sequence[Tensor]) -> bool:
    """Whether two tilings computed the same numbers, but for the order of their sums.

    The distance of each result is bounded by 4 ulp of its norm in 16 bits, and by 1e-5 of it in
    fp32 (80 ulp: contractions of some thousand terms). A wrong tile is off by the norm itself.

    Example:
        >>> one = torch.ones(4)
        >>> is_same([one], [one + 1e-7]), is_same([one], [one * torch.nan])
        (True, False)
    """
    for a, b in zip(found, expected, strict=True):
        bound = max(4 * torch.finfo(b.dtype).eps, 1e-5) * b.double().norm()
        # not >, so that NaN is not the same
        if not (a.double() - b.double()).norm() <= bound:
            return False
    return True


def tune(
    candidates: Sequence[TileConfig],
    run: Run,
    timer: Timer,
    *,
    num_rounds: int = NUM_ROUNDS,
    on_step: Callable[[TileConfig], None] = lambda _: None,
) -> Outcome:
    """Measure candidates and pick one.

    Every round times every candidate once, so that a clock that drifts is fair to all; medians
    decide.

    Args:
        candidates: the default first.
        run: computes the GEMM with some tiles and returns its results.
        timer: seconds that one call takes.
        num_rounds: how often each candidate is timed.
        on_step: called before a candidate is tried.

    Returns:
        The outcome. Candidates that raise or compute something else are skipped with a reason.

    Raises:
        Exception: whatever the default raises, since then nothing can be compared.
    """
    default, *others = candidates
    on_step(default)
    expected = run(default)
    right, skipped = [default], []
    for tiles in others:
        on_step(tiles)
        reason = _reason_against(run, tiles, expected)
        if reason is None:
            right.append(tiles)
        else:
            skipped.append(Skipped(tiles, reason))
    seconds: dict[TileConfig, list[float]] = {tiles: [] for tiles in right}
    for _ in range(num_rounds):
        for tiles, times in seconds.items():
            times.append(timer(lambda tiles=tiles: run(tiles)))  # type: ignore[misc]
    medians = {tiles: statistics.median(times) for tiles, times in seconds.items()}
    # the first of equals, so that equal measurements give equal winners
    winner = min(medians, key=lambda tiles: medians[tiles])
    if medians[default] < LEAST_GAIN * medians[winner]:
        winner = default
    return Outcome(
        default=default,
        winner=winner,
        default_s=medians[default],
        winner_s=medians[winner],
        num_measured=len(right),
        skipped=tuple(skipped),
    )


def _reason_against(run: Run, tiles: TileConfig, expected: Sequence[Tensor]) -> str | None:
    """Why these tiles cannot win, or ``None``."""
    try:
        found = run(tiles)
    # compilers and drivers raise what they like: too many resources, no memory, unsupported
    except Exception as error:
        first_line = (str(error).splitlines() or [""])[0]
        return f"{type(error).__name__}: {first_line}"
    return None if is_same(found, expected) else "computes something else"
