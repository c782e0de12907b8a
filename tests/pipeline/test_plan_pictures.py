"""Pictures: PNGs of a real plan, and a note where nothing is exchanged."""

import pytest

from piper_kernels.pipeline.exchange_time import ExchangePrices
from piper_kernels.pipeline.model_config import load_model
from piper_kernels.pipeline.plan_pictures import Pictures
from piper_kernels.pipeline.planner import search
from piper_kernels.pipeline.platform_presets import load_platform
from piper_kernels.pipeline.rank_memory import RankMemory
from piper_kernels.pipeline.search_space import SearchSpace
from piper_kernels.pipeline.step_time import StepModel

pytest.importorskip("matplotlib")


def test_draw_without_an_exchange() -> None:
    prices = ExchangePrices(load_platform("h200"))
    model = load_model("granite-3.1-1b-a400m")
    steps, memory = StepModel(model, prices), RankMemory(model, prices)
    space = SearchSpace(
        num_gpus=2,
        global_batch=4,
        seq_len=512,
        microbatch_sizes=(1,),
        schedules=("1f1b",),
        fixed={"ep": 1},
    )
    best = search(steps, memory.peak_bytes, space, num_best=1).best[0]
    drawn = Pictures(steps, memory, space, best).draw()
    assert set(drawn) == {"memory", "timeline", "exchange", "gpus"}
    assert all(data.startswith(b"\x89PNG") for data in drawn.values())
