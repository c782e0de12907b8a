"""The simulation: published bubble formulas, waiting, overlap, and no order that hangs."""

import itertools
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from piper_kernels.errors import PlanError
from piper_kernels.pipeline.schedule import SCHEDULES, make_schedule, why_impossible
from piper_kernels.pipeline.schedule_actions import Action, Schedule, Step
from piper_kernels.pipeline.timeline import (
    PassTime,
    StageTime,
    simulate,
    step_bound_s,
    step_seconds,
)


def stage(forward: float, inputs: float, weights: float, **more: float) -> StageTime:
    return StageTime(
        forward=PassTime(compute_s=forward),
        backward_input=PassTime(compute_s=inputs),
        backward_weight=PassTime(compute_s=weights),
        **more,
    )


@pytest.mark.parametrize("name", ["gpipe", "1f1b"])
@pytest.mark.parametrize(("ranks", "microbatches"), [(1, 3), (2, 4), (4, 4), (4, 9), (8, 16)])
def test_simulate_has_the_bubble_of_one_stage_a_rank(
    name: str, ranks: int, microbatches: int
) -> None:
    # (P - 1)(F + B): Narayanan et al. 2021 (2104.04473), section 2.2
    f, b = 1.0, 2.5
    timeline = simulate(make_schedule(name, ranks, microbatches), [stage(f, 1.5, 1.0)] * ranks)
    assert timeline.step_s == pytest.approx((microbatches + ranks - 1) * (f + b))
    assert timeline.bubble_share == pytest.approx((ranks - 1) / (microbatches + ranks - 1))
    # equal stages and free sends: the bound is exact
    equal = [stage(f, 1.5, 1.0)] * ranks
    assert step_bound_s(name, ranks, microbatches, equal) == pytest.approx(timeline.step_s)


@pytest.mark.parametrize(("ranks", "microbatches"), [(2, 4), (4, 4), (4, 8), (8, 16)])
@pytest.mark.parametrize("local", [2, 3])
def test_simulate_interleaving_divides_the_bubble(
    ranks: int, microbatches: int, local: int
) -> None:
    # (P - 1)(F + B) / V: Narayanan et al. 2021 (2104.04473), section 2.2
    schedule = make_schedule("interleaved_1f1b", ranks, microbatches, local)
    timeline = simulate(schedule, [stage(1.0 / local, 1.0 / local, 1.0 / local)] * ranks * local)
    assert timeline.step_s == pytest.approx(3 * (microbatches + (ranks - 1) / local))


@pytest.mark.parametrize(("ranks", "microbatches"), [(2, 4), (4, 8), (4, 16), (8, 16)])
def test_simulate_zbv_has_no_bubble_but_the_warm_up(ranks: int, microbatches: int) -> None:
    # equal F, I and W: the only idle slots are P - 1 before the first forward and after the last
    # pass (Qi et al. 2024, 2405.15362: ZB-V reaches zero bubble under this condition)
    timeline = simulate(make_schedule("zbv", ranks, microbatches), [stage(1, 1, 1)] * 2 * ranks)
    assert max(timeline.rank_end_s) == pytest.approx(6 * microbatches + ranks - 1)


@pytest.mark.parametrize(("ranks", "microbatches"), [(2, 6), (4, 10), (4, 20), (8, 20)])
def test_simulate_dual_pipe_v_has_the_published_bubble(ranks: int, microbatches: int) -> None:
    # (P/2 - 1)(F&B + B - 3W) for P = 2 * ranks stages: README of deepseek-ai/DualPipe. With
    # F = I = W and pairs that take F + B that is 2 * (ranks - 1) stage passes.
    timeline = simulate(
        make_schedule("dualpipev", ranks, microbatches), [stage(1, 1, 1)] * 2 * ranks
    )
    bubble = max(timeline.rank_end_s) - 6 * microbatches
    assert bubble == pytest.approx((ranks - 1) * (3 + 2 - 3))


def test_simulate_waits_for_sends() -> None:
    # one microbatch through two stages: F, send, F, B, send, B
    timeline = simulate(make_schedule("gpipe", 2, 1), [stage(1, 1, 1, send_s=0.25)] * 2)
    assert timeline.step_s == pytest.approx(1 + 0.25 + 1 + 2 + 0.25 + 2)


def test_simulate_sends_nothing_inside_a_rank() -> None:
    timeline = simulate(make_schedule("zbv", 1, 1), [stage(1, 1, 1, send_s=5.0)] * 2)
    assert timeline.step_s == pytest.approx(6)


def test_simulate_a_heavy_last_stage_sets_the_pace() -> None:
    slow = stage(2, 2, 2)
    timeline = simulate(make_schedule("1f1b", 4, 16), [stage(1, 1, 1)] * 3 + [slow])
    # the last stage works without a pause between its first forward and its last backward
    assert timeline.rank_busy_s[3] == 16 * 6
    assert timeline.step_s == pytest.approx(3 + 16 * 6 + 3 * 2)


def test_simulate_adds_what_a_rank_does_once() -> None:
    timeline = simulate(make_schedule("1f1b", 2, 2), [stage(1, 1, 1), stage(1, 1, 1, finish_s=4)])
    # rank 1 is done first, so its reduction partly hides behind rank 0's last backward
    assert timeline.rank_end_s == (9, 7)
    assert timeline.step_s == 11


def test_simulate_overlapped_pair_hides_exchanges() -> None:
    forward = PassTime(compute_s=1.0, exchange_s=1.0)
    half = PassTime(compute_s=1.0, exchange_s=0.5)
    assert forward.beside(half) == 2.0
    assert forward.beside(PassTime(compute_s=0.1, exchange_s=4.0)) == 5.0
    hidden = StageTime(forward=forward, backward_input=half, backward_weight=half)
    schedule = make_schedule("dualpipev", 2, 8)
    assert (
        simulate(schedule, [hidden] * 4).step_s
        < simulate(schedule, [stage(2.0, 1.5, 1.5)] * 4).step_s
    )


def test_simulate_refuses_ranks_that_wait_for_one_another() -> None:
    swapped = (Step((Action(0, "B", 0),)), Step((Action(0, "F", 0),)))
    good = (Step((Action(1, "F", 0),)), Step((Action(1, "B", 0),)))
    schedule = Schedule(
        name="x", num_ranks=2, num_microbatches=1, stage_to_rank=(0, 1), steps=(swapped, good)
    )
    with pytest.raises(PlanError, match=r"let every rank go on, got \['0B0', '1F0'\]"):
        simulate(schedule, [stage(1, 1, 1)] * 2)
    with pytest.raises(PlanError, match="one entry for each of the 2 stages, got 3"):
        simulate(make_schedule("gpipe", 2, 1), [stage(1, 1, 1)] * 3)


@given(
    name=st.sampled_from(SCHEDULES),
    ranks=st.integers(1, 4),
    microbatches=st.integers(1, 9),
    data=st.data(),
)
def test_simulate_respects_order_and_bounds(
    name: str, ranks: int, microbatches: int, data: st.DataObject
) -> None:
    if why_impossible(name, ranks, microbatches):
        return
    schedule = make_schedule(name, ranks, microbatches)
    time = st.floats(0.1, 3.0)
    stages = [
        replace(stage(data.draw(time), data.draw(time), data.draw(time)), send_s=data.draw(time))
        for _ in range(schedule.num_stages)
    ]
    timeline = simulate(schedule, stages)
    for events in timeline.events:
        for a, b in itertools.pairwise(events):
            assert b.start_s >= a.end_s - 1e-9
    ends = {a: e.end_s for events in timeline.events for e in events for a in e.step.actions}
    for events in timeline.events:
        for event in events:
            for s, kind, microbatch in event.step.actions:
                if kind == "F" and s:
                    assert event.start_s >= ends[Action(s - 1, "F", microbatch)] - 1e-9
    assert step_seconds(schedule, stages) == timeline.step_s
    assert step_bound_s(name, ranks, microbatches, stages) <= timeline.step_s + 1e-9
