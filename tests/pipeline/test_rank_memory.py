"""Peaks of ranks: the quick way equals the memory timeline, whatever the schedule."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from piper_kernels.pipeline.exchange_time import ExchangePrices
from piper_kernels.pipeline.memory_timeline import memory_events, memory_peak
from piper_kernels.pipeline.model_config import load_model
from piper_kernels.pipeline.plan import split_layers
from piper_kernels.pipeline.platform_presets import load_platform
from piper_kernels.pipeline.rank_memory import RankMemory, live_states
from piper_kernels.pipeline.schedule import SCHEDULES, stages_per_rank, why_impossible
from piper_kernels.pipeline.strategy import Strategy

MODEL = load_model("deepseek-v2-lite")
MEMORY = RankMemory(MODEL, ExchangePrices(load_platform("h100")))


def strategy(**changes: object) -> Strategy:
    fields = {"pp": 4, "ep": 8, "num_microbatches": 8, "seq_len": 4096}
    fields |= {"layers_per_stage": split_layers(MODEL.num_layers, 4)}
    return Strategy(**{**fields, **changes})


@given(
    name=st.sampled_from(SCHEDULES),
    pp=st.integers(1, 4),
    count=st.integers(1, 40),
    checkpointing=st.sampled_from(["none", "selective", "full"]),
)
def test_peak_bytes_is_the_timelines(name, pp: int, count: int, checkpointing) -> None:
    if why_impossible(name, pp, count):
        return
    one = strategy(
        pp=pp,
        schedule=name,
        num_microbatches=count,
        checkpointing=checkpointing,
        layers_per_stage=split_layers(MODEL.num_layers, pp * stages_per_rank(name)),
    )
    stages, schedule = MEMORY.stages(one), one.actions
    for rank, peak in enumerate(MEMORY.peak_bytes(one)):
        own = {stage: stages[stage] for stage in schedule.stages_of(rank)}
        actions = [action for step in schedule.steps[rank] for action in step.actions]
        assert peak == pytest.approx(memory_peak(memory_events(own, actions)).peak_bytes)
    assert 0 < MEMORY.least_bytes(one) <= max(MEMORY.peak_bytes(one))


def test_live_counts_microbatches() -> None:
    assert MEMORY.live(strategy()) == (4, 3, 2, 1)
    assert MEMORY.live(strategy(schedule="gpipe")) == (8, 8, 8, 8)


def test_live_states_do_not_depend_on_many_microbatches() -> None:
    assert set(live_states("zbv", 4, 16, 2)[1]) == set(live_states("zbv", 4, 500, 2)[1])


def test_peak_bytes_falls_with_ep_and_pp_and_grows_with_work() -> None:
    most = max(MEMORY.peak_bytes(strategy()))
    assert max(MEMORY.peak_bytes(strategy(ep=4))) > most
    assert max(MEMORY.peak_bytes(strategy(microbatch_size=2))) > most
    assert max(MEMORY.peak_bytes(strategy(seq_len=8192))) > most
    fewer = strategy(pp=2, layers_per_stage=split_layers(MODEL.num_layers, 2))
    assert max(MEMORY.peak_bytes(fewer)) > most
    assert max(MEMORY.peak_bytes(strategy(checkpointing="full"))) < most


def test_settings_carry_the_strategy() -> None:
    settings = MEMORY.settings(strategy(tp=2, optimizer="sgd", is_optimizer_sharded=True))
    assert (settings.ep, settings.tp, settings.optimizer.kind) == (8, 2, "sgd")
    assert settings.optimizer.is_sharded
    assert settings.activations.imbalance == 1.0
