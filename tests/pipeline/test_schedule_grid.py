"""The printed grid."""

from piper_kernels.pipeline.schedule import make_schedule
from piper_kernels.pipeline.schedule_grid import draw_grid


def test_draw_grid_shows_idle_time() -> None:
    lines = draw_grid(make_schedule("gpipe", 3, 2)).splitlines()
    assert lines[0] == "rank 0 | 0F0 0F1  .   .   .   .   .   .  0B0 0B0 0B1 0B1"
    assert lines[2].startswith("rank 2 |  .   .  2F0 2F1 2B0 2B0 2B1 2B1")


def test_draw_grid_says_what_it_leaves_out() -> None:
    lines = draw_grid(make_schedule("1f1b", 2, 8), max_columns=5).splitlines()
    assert all(line.endswith("... 22 more") for line in lines)


def test_draw_grid_shows_overlapped_pairs() -> None:
    assert "1F1+0B0" in draw_grid(make_schedule("dualpipev", 1, 2))
