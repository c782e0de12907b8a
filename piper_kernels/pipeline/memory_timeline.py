"""Memory of a rank over time: peak of what is alive together, not the sum of maxima.

Pure: no torch, no process group. What happens when is given from outside, as the actions of a
schedule: ``(stage, kind, microbatch)`` with F forward, B whole backward, I gradient of the input, W
gradient of the weights.
"""

from collections.abc import Iterable, Mapping
from typing import NamedTuple

from piper_kernels.errors import PlanError, require
from piper_kernels.pipeline.stage_memory import StageMemory


class MemoryEvent(NamedTuple):
    """A change of the bytes in use.

    Attributes:
        label: what happens, e.g. ``0F1 keeps``.
        delta_bytes: more, or less if negative.
    """

    label: str
    delta_bytes: float


class MemoryPeak(NamedTuple):
    """The highest point of a timeline.

    Attributes:
        peak_bytes: most that is in use together.
        label: of the event that reaches it first.
    """

    peak_bytes: float
    label: str


def memory_events(
    stages: Mapping[int, StageMemory], actions: Iterable[tuple[int, str, int]]
) -> list[MemoryEvent]:
    """What one rank allocates and frees in one step, in order.

    Static bytes and communication buffers are there first. A forward needs its workspace and keeps
    its activations; a backward brings back what was recomputed and then frees all; a split one
    frees at its W.

    Args:
        stages: the rank's stages.
        actions: its part of the schedule.

    Raises:
        PlanError: an action names a stage that the rank has not.

    Example:
        >>> stage = StageMemory(parameter_bytes=8, gradient_bytes=8, master_bytes=0,
        ...     optimizer_bytes=0, activation_bytes=3, recompute_bytes=2, workspace_bytes=1,
        ...     communication_bytes=0)
        >>> events = memory_events({0: stage}, [(0, "F", 0), (0, "F", 1), (0, "B", 0)])
        >>> memory_peak(events)
        MemoryPeak(peak_bytes=25.0, label='0B0 works')
    """
    events = []
    for stage, memory in stages.items():
        events.append(MemoryEvent(f"{stage} static", memory.static_bytes))
        events.append(MemoryEvent(f"{stage} buffers", memory.communication_bytes))
    for stage, kind, microbatch in actions:
        name = f"{stage}{kind}{microbatch}"
        fits = stage in stages
        requirement = f"be of this rank's stages {sorted(stages)}"
        require(fits, "memory_events", "action", requirement, name, error=PlanError)
        memory = stages[stage]
        works = memory.workspace_bytes if kind == "F" else memory.transient_bytes
        if kind == "F":
            events.append(MemoryEvent(f"{name} keeps", memory.activation_bytes))
        events.append(MemoryEvent(f"{name} works", works))
        events.append(MemoryEvent(f"{name} is done", -works))
        if kind in ("B", "W"):
            events.append(MemoryEvent(f"{name} frees", -memory.activation_bytes))
    return events


def memory_peak(events: Iterable[MemoryEvent]) -> MemoryPeak:
    """The highest point of a timeline.

    Example:
        >>> memory_peak([MemoryEvent("a", 2.0), MemoryEvent("b", 3.0), MemoryEvent("c", -4.0)])
        MemoryPeak(peak_bytes=5.0, label='b')
    """
    now, peak = 0.0, MemoryPeak(0.0, "nothing")
    for event in events:
        now += event.delta_bytes
        if now > peak.peak_bytes:
            peak = MemoryPeak(now, event.label)
    return peak
