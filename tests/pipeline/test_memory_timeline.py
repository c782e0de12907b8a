"""Peak over time: GPipe keeps all, 1F1B a few, a split backward holds on until its W."""

from collections.abc import Iterable

import pytest

from piper_kernels.errors import PlanError
from piper_kernels.pipeline.memory_timeline import memory_events, memory_peak
from piper_kernels.pipeline.stage_memory import StageMemory


def stage(kept: float, works: float = 0.0, recompute: float = 0.0) -> StageMemory:
    return StageMemory(
        parameter_bytes=10,
        gradient_bytes=10,
        master_bytes=20,
        optimizer_bytes=40,
        activation_bytes=kept,
        recompute_bytes=recompute,
        workspace_bytes=works,
        communication_bytes=5,
    )


def actions(text: str) -> Iterable[tuple[int, str, int]]:
    """``0F0 0B0`` -> (0, "F", 0), (0, "B", 0)."""
    return [(int(one[0]), one[1], int(one[2:])) for one in text.split()]


@pytest.mark.parametrize(
    ("order", "live"),
    [
        ("0F0 0F1 0F2 0F3 0B0 0B1 0B2 0B3", 4),  # GPipe
        ("0F0 0F1 0B0 0F2 0B1 0F3 0B2 0B3", 2),  # 1F1B, first of two stages: min(PP - i, M)
        ("0F0 0B0 0F1 0B1", 1),  # 1F1B, last stage
        ("0F0 0F1 0I0 0F2 0I1 0W0 0I2 0W1 0W2", 3),  # zero bubble: kept until W
    ],
)
def test_memory_peak_counts_live_microbatches(order: str, live: int) -> None:
    peak = memory_peak(memory_events({0: stage(7.0)}, actions(order)))
    assert peak.peak_bytes == 80 + 5 + 7 * live


def test_memory_peak_is_not_a_sum_of_maxima() -> None:
    # stage 0 holds two while stage 1 holds none, and the other way round
    stages = {0: stage(10.0), 1: stage(6.0)}
    order = actions("0F0 0F1 0B0 0B1 1F0 1F1 1B0 1B1")
    assert memory_peak(memory_events(stages, order)).peak_bytes == 2 * 85 + 20
    assert memory_peak(memory_events(stages, actions("0F0 1F0 1B0 0B0"))).peak_bytes == 2 * 85 + 16


def test_memory_peak_names_what_reaches_it() -> None:
    stages = {0: stage(7.0, works=2.0, recompute=100.0)}
    peak = memory_peak(memory_events(stages, actions("0F0 0F1 0B0 0B1")))
    # two are alive when the first backward brings its recomputed tensors back
    assert peak == (85 + 14 + 102, "0B0 works")


def test_memory_events_end_where_they_began() -> None:
    events = memory_events({0: stage(7.0, 2.0, 3.0)}, actions("0F0 0F1 0B0 0I1 0W1"))
    assert sum(event.delta_bytes for event in events) == 85


def test_memory_events_refuse_a_foreign_stage() -> None:
    with pytest.raises(PlanError, match=r"action must be of this rank's stages \[0\], got 1F0"):
        memory_events({0: stage(1.0)}, [(1, "F", 0)])
