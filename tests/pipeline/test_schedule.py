"""Schedules: torch's own order, what is alive, what is refused."""

from collections import Counter
from typing import Any

import pytest
from torch.distributed.pipelining import schedules as torch_schedules

from piper_kernels.errors import ConfigError, PlanError
from piper_kernels.pipeline.schedule import (
    SCHEDULES,
    Schedule,
    ScheduleName,
    live_microbatches,
    make_schedule,
    peak_live,
    stages_per_rank,
    why_impossible,
)

TORCH = {
    "gpipe": torch_schedules.ScheduleGPipe,
    "1f1b": torch_schedules.Schedule1F1B,
    "interleaved_1f1b": torch_schedules.ScheduleInterleaved1F1B,
    "zbv": torch_schedules.ScheduleZBVZeroBubble,
    "dualpipev": torch_schedules.ScheduleDualPipeV,
}
SIZES = [(1, 1), (1, 3), (2, 1), (2, 2), (2, 5), (3, 6), (3, 7), (4, 4), (4, 8), (4, 10), (8, 16)]


class FakeStage:
    """As much of a stage as torch's schedules ask for when they write their order."""

    def __init__(self, index: int, num_stages: int, group_size: int) -> None:
        self.stage_index, self.num_stages = index, num_stages
        self.group_size, self.group_rank = group_size, 0
        self.has_backward, self.is_last = True, False
        self.submod = None


def torch_order(
    name: ScheduleName, num_ranks: int, num_microbatches: int, num_local: int | None = None
) -> list[list[str]]:
    """Torch's compute actions of each rank, its idle slots and gradient reductions left out."""
    count = num_local or stages_per_rank(name)
    stages = [FakeStage(index, num_ranks * count, num_ranks) for index in range(count)]
    given: Any = stages[0] if count == 1 else stages
    order = TORCH[name](given, num_microbatches, loss_fn=lambda y, t: y).pipeline_order
    lists = [
        [a for a in order[rank] if a is not None and "REDUCE_GRAD" not in str(a)]
        for rank in range(num_ranks)
    ]
    if name == "1f1b":
        # torch 2.13 prints the last stage's forwards as 1 .. M; it runs 0 .. M - 1
        last = lists[-1]
        assert [a.microbatch_index for a in last[::2]] == list(range(1, num_microbatches + 1))
        last[::2] = [a._replace(microbatch_index=a.microbatch_index - 1) for a in last[::2]]
    return [[str(action) for action in actions] for actions in lists]


@pytest.mark.parametrize("name", SCHEDULES)
@pytest.mark.parametrize(("num_ranks", "num_microbatches"), SIZES)
def test_make_schedule_is_torchs_order(
    name: ScheduleName, num_ranks: int, num_microbatches: int
) -> None:
    if why_impossible(name, num_ranks, num_microbatches):
        with pytest.raises(PlanError, match="microbatches"):
            make_schedule(name, num_ranks, num_microbatches)
        return
    ours = make_schedule(name, num_ranks, num_microbatches)
    assert [[str(step) for step in steps] for steps in ours.steps] == torch_order(
        name, num_ranks, num_microbatches
    )


def test_make_schedule_interleaves_three_stages() -> None:
    ours = make_schedule("interleaved_1f1b", 4, 8, 3)
    names = [[str(step) for step in steps] for steps in ours.steps]
    assert names == torch_order("interleaved_1f1b", 4, 8, 3)
    with pytest.raises(PlanError, match="num_local must be 1 under 1f1b, got 2"):
        make_schedule("1f1b", 4, 8, 2)


def passes(schedule: Schedule) -> Counter[tuple[int, str, int]]:
    return Counter(a for steps in schedule.steps for step in steps for a in step.actions)


@pytest.mark.parametrize("name", SCHEDULES)
def test_make_schedule_has_each_pass_once(name: ScheduleName) -> None:
    schedule = make_schedule(name, 3, 6)
    seen = passes(schedule)
    assert set(seen.values()) == {1}
    for stage in range(schedule.num_stages):
        for microbatch in range(6):
            assert seen[stage, "F", microbatch] == 1
            whole, split = seen[stage, "B", microbatch], seen[stage, "I", microbatch]
            assert whole + split == 1
            assert seen[stage, "W", microbatch] == split
    for rank, steps in enumerate(schedule.steps):
        owners = {schedule.stage_to_rank[a.stage] for step in steps for a in step.actions}
        assert owners == {rank}
        assert len(schedule.stages_of(rank)) == stages_per_rank(name)


def test_make_schedule_places_stages() -> None:
    assert make_schedule("interleaved_1f1b", 2, 2).stage_to_rank == (0, 1, 0, 1)
    assert make_schedule("zbv", 2, 2).stage_to_rank == (0, 1, 1, 0)


@pytest.mark.parametrize("num_ranks", [1, 2, 4, 8])
@pytest.mark.parametrize("num_microbatches", [8, 16])
def test_live_microbatches_have_closed_forms(num_ranks: int, num_microbatches: int) -> None:
    one = live_microbatches(make_schedule("1f1b", num_ranks, num_microbatches))
    assert one == tuple(min(num_ranks - i, num_microbatches) for i in range(num_ranks))
    all_ = live_microbatches(make_schedule("gpipe", num_ranks, num_microbatches))
    assert all_ == (num_microbatches,) * num_ranks


def test_live_microbatches_of_a_v_are_balanced() -> None:
    # both stages of each rank together keep 2P microbatches, whatever the rank (2405.15362)
    schedule = make_schedule("zbv", 4, 16)
    assert peak_live(schedule, (1,) * 8) == (8,) * 4
    # a sum of the stages' maxima would be more, as they do not peak together
    assert sum(live_microbatches(schedule)) > 32


def test_peak_live_weighs_stages() -> None:
    schedule = make_schedule("gpipe", 2, 3)
    assert peak_live(schedule, (10.0, 7.0)) == (30.0, 21.0)
    interleaved = make_schedule("interleaved_1f1b", 2, 4)
    assert peak_live(interleaved, (1, 0, 0, 0))[0] == live_microbatches(interleaved)[0]


def test_make_schedule_refuses_what_would_hang() -> None:
    with pytest.raises(PlanError, match=r"at least as many microbatches as stages: 3 < 4.*gpipe"):
        make_schedule("1f1b", 4, 3)
    with pytest.raises(PlanError, match=r"3 rounds of equal size: 7 microbatches do not divide"):
        make_schedule("interleaved_1f1b", 2, 7)
    with pytest.raises(PlanError, match=r"dualpipev .* 7 < 8"):
        make_schedule("dualpipev", 4, 7)
    with pytest.raises(PlanError, match=r"num_microbatches must be at least 1, got 0"):
        make_schedule("gpipe", 4, 0)
    with pytest.raises(ConfigError, match=r"Did you mean 'gpipe'"):
        make_schedule("g_pipe", 4, 4)  # type: ignore[arg-type]


@pytest.mark.parametrize("num_microbatches", [1, 2, 3, 4, 5])
def test_gpipe_takes_any_number_of_microbatches(num_microbatches: int) -> None:
    # field report A73: a guard for 1F1B once forbade GPipe too
    assert make_schedule("gpipe", 4, num_microbatches).num_microbatches == num_microbatches
