"""Orders written down by hand; test_schedule.py compares all of them with torch's."""

from piper_kernels.pipeline.schedule_orders import (
    dual_pipe_v,
    gpipe,
    interleaved,
    one_forward_one_backward,
    zbv,
)


def words(steps: list) -> str:
    return " ".join(map(str, steps))


def test_gpipe_is_forwards_then_backwards() -> None:
    assert words(gpipe(1, 2)) == "1F0 1F1 1B0 1B1"


def test_one_forward_one_backward_runs_ahead_by_its_distance_from_the_end() -> None:
    assert words(one_forward_one_backward(0, 3, 3)) == "0F0 0F1 0F2 0B0 0B1 0B2"
    assert words(one_forward_one_backward(2, 3, 3)) == "2F0 2B0 2F1 2B1 2F2 2B2"


def test_interleaved_takes_earlier_microbatches_first() -> None:
    assert words(interleaved(1, 2, 2, 2)) == "1F0 1F1 3F0 3B0 3F1 3B1 1B0 1B1"


def test_zbv_leaves_out_microbatches_that_do_not_exist() -> None:
    assert words(zbv(0, 1, 1)) == "0F0 1F0 1I0 1W0 0I0 0W0"
    assert words(zbv(1, 2, 1)) == "1F0 2F0 2I0 2W0 1I0 1W0"


def test_dual_pipe_v_overlaps_forward_and_backward() -> None:
    assert words(dual_pipe_v(0, 1, 2)) == ("0F0 1F0 0F1 1B0 (1F1;0B0)OVERLAP_F_B 1B1 0I1 0W1")
