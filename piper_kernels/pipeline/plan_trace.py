"""A predicted step as a Chrome trace: open it in Perfetto or chrome://tracing.

Pure: no torch, no process group.
"""

import json

from piper_kernels.pipeline.timeline import Timeline

NAMES = {"F": "forward", "B": "backward", "I": "input gradient", "W": "weight gradient"}


def chrome_trace(timeline: Timeline, title: str) -> str:
    """The trace's JSON: one process for the step, one thread for each pipeline rank.

    Args:
        timeline: of the predicted step.
        title: of the process; it should say that this is modelled.
    """
    events: list[dict[str, object]] = [
        {"ph": "M", "pid": 0, "name": "process_name", "args": {"name": title}}
    ]
    for rank, steps in enumerate(timeline.events):
        label = {"name": f"pipeline rank {rank}"}
        events.append({"ph": "M", "pid": 0, "tid": rank, "name": "thread_name", "args": label})
        for event in steps:
            kinds = " + ".join(NAMES[action.kind] for action in event.step.actions)
            events.append(
                {
                    "ph": "X",
                    "pid": 0,
                    "tid": rank,
                    "name": str(event.step),
                    "cat": kinds,
                    "ts": event.start_s * 1e6,
                    "dur": (event.end_s - event.start_s) * 1e6,
                }
            )
    return json.dumps({"traceEvents": events, "displayTimeUnit": "ms"})
