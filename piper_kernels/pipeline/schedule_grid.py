"""A schedule as text: one line a rank, one column a unit of time.

Pure: no torch, no process group.
"""

from piper_kernels.pipeline.schedule_actions import Schedule, Step
from piper_kernels.pipeline.timeline import PassTime, StageTime, simulate


def draw_grid(schedule: Schedule, max_columns: int = 24) -> str:
    """The schedule with every pass one unit long (a whole backward two); ``.`` is idle time.

    Args:
        schedule: of the pipeline.
        max_columns: units of time shown; what follows is counted.

    Example:
        >>> from piper_kernels.pipeline.schedule import make_schedule
        >>> print(draw_grid(make_schedule("1f1b", 2, 2)))
        rank 0 | 0F0 0F1  .   .  0B0 0B0  .  0B1 0B1
        rank 1 |  .  1F0 1B0 1B0 1F1 1B1 1B1  .   .
    """
    unit = PassTime(compute_s=1.0)
    stage = StageTime(forward=unit, backward_input=unit, backward_weight=unit)
    timeline = simulate(schedule, [stage] * schedule.num_stages)
    length = round(max(timeline.rank_end_s))
    shown = min(length, max_columns)
    rows = [["."] * length for _ in range(schedule.num_ranks)]
    for rank, events in enumerate(timeline.events):
        for event in events:
            for column in range(round(event.start_s), round(event.end_s)):
                rows[rank][column] = _name(event.step)
    width = max(len(cell) for row in rows for cell in row[:shown])
    more = f" ... {length - shown} more" if length > shown else ""
    digits = len(str(schedule.num_ranks - 1))
    return "\n".join(
        f"rank {rank:>{digits}} | " + " ".join(f"{c:^{width}}" for c in row[:shown]).rstrip() + more
        for rank, row in enumerate(rows)
    )


def _name(step: Step) -> str:
    return "+".join(map(str, step.actions))
