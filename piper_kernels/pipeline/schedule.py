"""Schedules: which rank passes which microbatch through which stage, in which order.

Pure: no torch, no process group. Letters: P ranks of the pipeline, M microbatches.
"""

import functools
from collections.abc import Iterator, Sequence
from typing import Literal, get_args

from piper_kernels.config import check_choice
from piper_kernels.errors import PlanError, require
from piper_kernels.pipeline.schedule_actions import Action, Schedule, Step
from piper_kernels.pipeline.schedule_orders import (
    dual_pipe_v,
    gpipe,
    interleaved,
    num_rounds,
    one_forward_one_backward,
    zbv,
)

__all__ = [
    "SCHEDULES",
    "Action",
    "Schedule",
    "ScheduleName",
    "Step",
    "live_microbatches",
    "make_schedule",
    "peak_live",
    "stage_owners",
    "stages_per_rank",
    "why_impossible",
]

ScheduleName = Literal["gpipe", "1f1b", "interleaved_1f1b", "zbv", "dualpipev"]
SCHEDULES: tuple[ScheduleName, ...] = get_args(ScheduleName)
V_SHAPED = ("zbv", "dualpipev")


def stages_per_rank(name: ScheduleName) -> int:
    """1 for GPipe and 1F1B, 2 on a V; an interleaved schedule may have more than its 2 here."""
    return 1 if name in ("gpipe", "1f1b") else 2


def why_impossible(name: ScheduleName, num_ranks: int, num_microbatches: int) -> str:
    """Why torch would refuse this schedule, or hang in it; empty if it would not.

    Example:
        >>> why_impossible("1f1b", 4, 3)
        '1f1b needs at least as many microbatches as stages: 3 < 4'
    """
    if name == "1f1b" and num_microbatches < num_ranks:
        return (
            f"1f1b needs at least as many microbatches as stages: {num_microbatches} < {num_ranks}"
        )
    rounds = num_rounds(num_ranks, num_microbatches)
    if name == "interleaved_1f1b" and num_microbatches % rounds:
        return (
            f"interleaved_1f1b works in {rounds} rounds of equal size: {num_microbatches} "
            f"microbatches do not divide by {rounds}"
        )
    if name == "dualpipev" and num_microbatches < 2 * num_ranks:
        return (
            "dualpipev needs at least as many microbatches as stages: "
            f"{num_microbatches} < {2 * num_ranks}"
        )
    return ""


@functools.lru_cache(maxsize=64)
def make_schedule(
    name: ScheduleName, num_ranks: int, num_microbatches: int, num_local: int | None = None
) -> Schedule:
    """The action lists of a schedule.

    Args:
        name: of the schedule.
        num_ranks: P.
        num_microbatches: M.
        num_local: stages a rank, for ``interleaved_1f1b``; default :func:`stages_per_rank`.

    Raises:
        ConfigError: the name is unknown.
        PlanError: this schedule cannot run with these numbers.

    Example:
        >>> [str(step) for step in make_schedule("1f1b", 2, 2).steps[0]]
        ['0F0', '0F1', '0B0', '0B1']
    """
    check_choice("make_schedule", "name", name, ScheduleName)
    for argument, value in (("num_ranks", num_ranks), ("num_microbatches", num_microbatches)):
        require(value >= 1, "make_schedule", argument, "be at least 1", value, error=PlanError)
    reason = why_impossible(name, num_ranks, num_microbatches)
    if reason:
        remedy = "Use more microbatches, or gpipe, which takes any number."
        raise PlanError(f"make_schedule: {reason}. {remedy}")
    usual = stages_per_rank(name)
    num_local = usual if num_local is None else num_local
    fits = num_local == usual or (name == "interleaved_1f1b" and num_local >= 1)
    requirement = f"be {usual} under {name}"
    require(fits, "make_schedule", "num_local", requirement, num_local, error=PlanError)
    return Schedule(
        name=name,
        num_ranks=num_ranks,
        num_microbatches=num_microbatches,
        stage_to_rank=stage_owners(name, num_ranks, num_local),
        steps=tuple(
            tuple(_order(name, rank, num_ranks, num_local, num_microbatches))
            for rank in range(num_ranks)
        ),
    )


def _order(
    name: ScheduleName, rank: int, num_ranks: int, num_local: int, num_microbatches: int
) -> list[Step]:
    match name:
        case "gpipe":
            return gpipe(rank, num_microbatches)
        case "1f1b":
            return one_forward_one_backward(rank, num_ranks, num_microbatches)
        case "interleaved_1f1b":
            return interleaved(rank, num_ranks, num_local, num_microbatches)
        case "zbv":
            return zbv(rank, num_ranks, num_microbatches)
        case "dualpipev":
            return dual_pipe_v(rank, num_ranks, num_microbatches)


def stage_owners(name: ScheduleName, num_ranks: int, num_local: int) -> tuple[int, ...]:
    """Which rank runs each stage: round after round; on a V the second round runs backwards.

    Example:
        >>> stage_owners("interleaved_1f1b", 2, 2), stage_owners("zbv", 2, 2)
        ((0, 1, 0, 1), (0, 1, 1, 0))
    """
    down = tuple(range(num_ranks))
    return down + down[::-1] if name in V_SHAPED else down * num_local


def live_microbatches(schedule: Schedule) -> tuple[int, ...]:
    """Most microbatches whose activations each stage keeps at a time, ``[num_stages]``.

    A microbatch is alive from its forward to the end of its backward; where the backward is split,
    to the end of its weight gradient.

    Example:
        >>> live_microbatches(make_schedule("1f1b", 4, 8))  # min(P - i, M)
        (4, 3, 2, 1)
        >>> live_microbatches(make_schedule("gpipe", 2, 8))
        (8, 8)
    """
    most = [0] * schedule.num_stages
    for steps in schedule.steps:
        for now in _live_counts(steps):
            for stage, count in now.items():
                most[stage] = max(most[stage], count)
    return tuple(most)


def peak_live(schedule: Schedule, stage_weights: Sequence[float]) -> tuple[float, ...]:
    """Most that each rank keeps at a time, ``[num_ranks]``: peak over time, not sum of maxima.

    Args:
        schedule: of the pipeline.
        stage_weights: ``[num_stages]`` what one live microbatch weighs in each stage, e.g. bytes.

    Example:
        >>> peak_live(make_schedule("1f1b", 2, 4), (10.0, 7.0))
        (20.0, 7.0)
    """
    return tuple(
        max(
            sum(stage_weights[s] * count for s, count in now.items()) for now in _live_counts(steps)
        )
        for steps in schedule.steps
    )


def _live_counts(steps: Sequence[Step]) -> Iterator[dict[int, int]]:
    """After each action of one rank, the live microbatches of its stages."""
    now: dict[int, int] = {}
    for action in (action for step in steps for action in step.actions):
        if action.kind == "F":
            now[action.stage] = now.get(action.stage, 0) + 1
        elif action.kind in ("B", "W"):
            now[action.stage] -= 1
        yield now
