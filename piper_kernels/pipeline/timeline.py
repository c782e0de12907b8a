"""The schedule played out in time: when each pass runs, who waits, how long a step takes.

A rank does its steps in order. A pass may start when the rank is free and what it needs has
arrived: a forward needs the stage before, a backward the stage behind. Sends run beside compute;
they only delay the receiver. Two passes that a schedule overlaps share the rank: their computations
follow each other, and so do their exchanges, while one's computation hides the other's exchange.

Pure: no torch, no process group. Letters: P ranks, M microbatches.
"""

import functools
from collections.abc import Sequence
from dataclasses import dataclass

from piper_kernels.errors import PlanError, require
from piper_kernels.pipeline.schedule import ScheduleName, stage_owners
from piper_kernels.pipeline.schedule_actions import Action, Pass, Schedule, Step


@dataclass(frozen=True, kw_only=True, slots=True)
class PassTime:
    """What one pass of one microbatch through one stage takes.

    Attributes:
        compute_s: the device computes, or waits for a collective that nothing hides.
        exchange_s: exchanges that a second pass on the same rank could hide.
    """

    compute_s: float
    exchange_s: float = 0.0

    @property
    def seconds(self) -> float:
        """Alone on its rank."""
        return self.compute_s + self.exchange_s

    def beside(self, other: "PassTime") -> float:
        """Seconds for both at once: neither resource does two things, neither pass is cut short.

        Example:
            >>> PassTime(compute_s=3.0, exchange_s=2.0).beside(PassTime(compute_s=4.0))
            7.0
        """
        compute, exchange = self.compute_s + other.compute_s, self.exchange_s + other.exchange_s
        return max(compute, exchange, self.seconds, other.seconds)


@dataclass(frozen=True, kw_only=True, slots=True)
class StageTime:
    """What a stage takes for one microbatch, and once a step.

    Attributes:
        forward: one forward.
        backward_input: gradient of the input, any recomputation included.
        backward_weight: gradient of the weights.
        send_s: to hand its output to the next stage; the gradient on the way back takes as long.
        finish_s: once, after the last backward: gradient reduction and optimizer.
    """

    forward: PassTime
    backward_input: PassTime
    backward_weight: PassTime
    send_s: float = 0.0
    finish_s: float = 0.0

    @property
    def backward(self) -> PassTime:
        """The whole backward."""
        one, two = self.backward_input, self.backward_weight
        return PassTime(
            compute_s=one.compute_s + two.compute_s, exchange_s=one.exchange_s + two.exchange_s
        )

    @property
    def busy_s(self) -> float:
        """Forward and backward of one microbatch."""
        return self.forward.seconds + self.backward.seconds

    def of(self, kind: Pass) -> PassTime:
        """The time of one kind of pass."""
        match kind:
            case "F":
                return self.forward
            case "B":
                return self.backward
            case "I":
                return self.backward_input
            case "W":
                return self.backward_weight


@dataclass(frozen=True, kw_only=True, slots=True)
class Event:
    """One step of one rank, in seconds from the start of the training step."""

    rank: int
    step: Step
    start_s: float
    end_s: float


@dataclass(frozen=True, kw_only=True, slots=True)
class Timeline:
    """A schedule in time.

    Attributes:
        events: for each rank its steps, in order.
        rank_end_s: ``[P]`` end of each rank's last pass.
        rank_busy_s: ``[P]`` time in passes.
        step_s: until the last rank has also finished what it does once a step.
    """

    events: tuple[tuple[Event, ...], ...]
    rank_end_s: tuple[float, ...]
    rank_busy_s: tuple[float, ...]
    step_s: float

    @property
    def bubble_share(self) -> float:
        """Idle share of the pipeline until its last pass: 0 if no rank ever waits."""
        end = max(self.rank_end_s)
        return 1 - sum(self.rank_busy_s) / (len(self.rank_busy_s) * end) if end else 0.0


def simulate(schedule: Schedule, stages: Sequence[StageTime]) -> Timeline:
    """Play a schedule out.

    Args:
        schedule: of the pipeline.
        stages: ``[num_stages]``.

    Raises:
        PlanError: not one time for each stage, or a schedule in which ranks wait for one another.

    Example:
        Two equal stages, F = 1 and B = 2, four microbatches: (M + P - 1) * 3.

        >>> from piper_kernels.pipeline.schedule import make_schedule
        >>> half = PassTime(compute_s=1.0)
        >>> stage = StageTime(forward=half, backward_input=half, backward_weight=half)
        >>> simulate(make_schedule("1f1b", 2, 4), [stage, stage]).step_s
        15.0
    """
    order = _compile(schedule)
    end = _end_times(order, schedule, stages)
    seconds = _seconds_of_keys(order, stages)
    events: list[list[Event]] = [[] for _ in range(schedule.num_ranks)]
    for index, (rank, step, key) in enumerate(
        zip(order.ranks, order.steps, order.keys, strict=True)
    ):
        start = end[index] - seconds[key]
        events[rank].append(Event(rank=rank, step=step, start_s=start, end_s=end[index]))
    ends = tuple(each[-1].end_s for each in events)
    busy = tuple(sum(e.end_s - e.start_s for e in each) for each in events)
    return Timeline(
        events=tuple(map(tuple, events)),
        rank_end_s=ends,
        rank_busy_s=busy,
        step_s=max(e + _finish_s(schedule, stages, r) for r, e in enumerate(ends)),
    )


def step_seconds(schedule: Schedule, stages: Sequence[StageTime]) -> float:
    """``simulate(schedule, stages).step_s`` without the events: the planner asks often."""
    order = _compile(schedule)
    end = _end_times(order, schedule, stages)
    last = dict(zip(order.ranks, end, strict=False))
    return max(last[rank] + _finish_s(schedule, stages, rank) for rank in last)


def step_bound_s(
    name: ScheduleName, num_ranks: int, num_microbatches: int, stages: Sequence[StageTime]
) -> float:
    """Seconds below which a schedule cannot go, without its action lists.

    A rank waits until a forward reaches its first stage, then does its own work. Where backwards
    are whole, its last gradient then travels back to the first stage. With equal stages and free
    sends this is what GPipe and 1F1B take.

    Example:
        >>> half = PassTime(compute_s=1.0)
        >>> stage = StageTime(forward=half, backward_input=half, backward_weight=half)
        >>> step_bound_s("1f1b", 2, 4, [stage, stage])
        15.0
    """
    is_paired, is_whole = name == "dualpipev", name not in ("zbv", "dualpipev")
    owners = stage_owners(name, num_ranks, len(stages) // num_ranks)
    work, finish = [0.0] * num_ranks, [0.0] * num_ranks
    for owner, stage in zip(owners, stages, strict=True):
        # exchanges of a pair may hide altogether
        hidden = stage.forward.exchange_s + stage.backward.exchange_s if is_paired else 0.0
        work[owner] += stage.busy_s - hidden
        finish[owner] += stage.finish_s
    reach, back, bound = 0.0, finish[0], 0.0
    for rank in range(num_ranks):
        end = max(finish[rank], back if is_whole else 0.0)
        bound = max(bound, reach + num_microbatches * work[rank] + end)
        # the first stage of rank r is stage r in every schedule
        reach += stages[rank].forward.seconds
        back += stages[rank].backward.seconds
    return bound


@dataclass(frozen=True, kw_only=True, slots=True)
class _Order:
    """All steps of a schedule so that each comes after what it needs.

    Attributes:
        ranks: ``[n]`` who does it.
        steps: ``[n]``.
        keys: ``[n]`` index into ``kinds``: how long it takes.
        kinds: the different steps, microbatches aside: ``((stage, kind), ...)``.
        waits: ``[n]`` pairs (index of an earlier step, boundary that its result crosses); boundary
            b lies between stages b and b + 1, ``num_stages`` where nothing is sent.
    """

    ranks: tuple[int, ...]
    steps: tuple[Step, ...]
    keys: tuple[int, ...]
    kinds: tuple[tuple[tuple[int, Pass], ...], ...]
    waits: tuple[tuple[tuple[int, int], ...], ...]


@functools.lru_cache(maxsize=32)
def _compile(schedule: Schedule) -> _Order:
    """Sort the steps of all ranks, round after round; cached, as durations do not matter."""
    done: dict[Action, int] = {}
    at = [0] * schedule.num_ranks
    before: list[int | None] = [None] * schedule.num_ranks
    ranks: list[int] = []
    steps: list[Step] = []
    waits: list[tuple[tuple[int, int], ...]] = []
    kinds: dict[tuple[tuple[int, Pass], ...], int] = {}
    keys: list[int] = []
    total = sum(map(len, schedule.steps))
    while len(steps) < total:
        num_before = len(steps)
        for rank, mine in enumerate(schedule.steps):
            while at[rank] < len(mine):
                step = mine[at[rank]]
                needs = _needs(schedule, step)
                if any(need not in done for need, _ in needs):
                    break
                own = before[rank]
                waiting = [(done[need], boundary) for need, boundary in needs]
                waiting += [(own, schedule.num_stages)] if own is not None else []
                before[rank] = len(steps)
                done.update(dict.fromkeys(map(_as_backward, step.actions), len(steps)))
                kind = tuple((action.stage, action.kind) for action in step.actions)
                keys.append(kinds.setdefault(kind, len(kinds)))
                ranks.append(rank)
                steps.append(step)
                waits.append(tuple(waiting))
                at[rank] += 1
        if len(steps) == num_before:
            stuck = [str(mine[at[r]]) for r, mine in enumerate(schedule.steps) if at[r] < len(mine)]
            requirement = "let every rank go on"
            require(False, "simulate", "schedule", requirement, stuck, error=PlanError)
    return _Order(
        ranks=tuple(ranks),
        steps=tuple(steps),
        keys=tuple(keys),
        kinds=tuple(kinds),
        waits=tuple(waits),
    )


def _as_backward(action: Action) -> Action:
    """What others wait for: a whole backward, or its input gradient, is ``B``."""
    return action._replace(kind="B") if action.kind == "I" else action


def _needs(schedule: Schedule, step: Step) -> list[tuple[Action, int]]:
    """What a step waits for on other stages, and the boundary it crosses to another rank."""
    owner, nothing = schedule.stage_to_rank, schedule.num_stages
    needs = []
    for stage, kind, microbatch in step.actions:
        if kind == "W":
            continue
        source = stage - 1 if kind == "F" else stage + 1
        if 0 <= source < schedule.num_stages:
            boundary = min(stage, source) if owner[source] != owner[stage] else nothing
            needs.append((Action(source, "F" if kind == "F" else "B", microbatch), boundary))
    return needs


def _seconds_of_keys(order: _Order, stages: Sequence[StageTime]) -> list[float]:
    """How long each kind of step takes."""
    seconds = []
    for kind in order.kinds:
        first, *rest = (stages[stage].of(name) for stage, name in kind)
        seconds.append(first.beside(rest[0]) if rest else first.seconds)
    return seconds


def _end_times(order: _Order, schedule: Schedule, stages: Sequence[StageTime]) -> list[float]:
    """When each step ends."""
    requirement = f"have one entry for each of the {schedule.num_stages} stages"
    fits = len(stages) == schedule.num_stages
    require(fits, "simulate", "stages", requirement, len(stages), error=PlanError)
    seconds = _seconds_of_keys(order, stages)
    send = [*(stage.send_s for stage in stages), 0.0]
    end: list[float] = []
    for key, waits in zip(order.keys, order.waits, strict=True):
        start = 0.0
        for index, boundary in waits:
            arrival = end[index] + send[boundary]
            start = max(start, arrival)
        end.append(start + seconds[key])
    return end


def _finish_s(schedule: Schedule, stages: Sequence[StageTime], rank: int) -> float:
    return sum(stages[stage].finish_s for stage in schedule.stages_of(rank))
