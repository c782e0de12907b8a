"""The Chrome trace: every step once, in microseconds."""

import json

from piper_kernels.pipeline.plan_trace import chrome_trace
from piper_kernels.pipeline.schedule import make_schedule
from piper_kernels.pipeline.timeline import PassTime, StageTime, simulate


def test_chrome_trace_has_every_step() -> None:
    unit = PassTime(compute_s=1.0)
    stage = StageTime(forward=unit, backward_input=unit, backward_weight=unit)
    timeline = simulate(make_schedule("dualpipev", 1, 2), [stage] * 2)
    trace = json.loads(chrome_trace(timeline, "a (modelled)"))
    events = [e for e in trace["traceEvents"] if e["ph"] == "X"]
    assert [e["name"] for e in events] == [str(e.step) for e in timeline.events[0]]
    assert events[1]["ts"] == 1e6
    assert "forward + backward" in {e["cat"] for e in events}
    assert trace["traceEvents"][0]["args"]["name"] == "a (modelled)"
