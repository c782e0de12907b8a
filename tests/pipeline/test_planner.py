"""The planner: equal to trying everything, honest about what does not fit."""

import functools
from collections import Counter
from collections.abc import Sequence
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from piper_kernels.errors import PlanError
from piper_kernels.pipeline.attention_description import GroupedAttention
from piper_kernels.pipeline.exchange_time import ExchangePrices
from piper_kernels.pipeline.model_description import Experts, FeedForward, Layer, ModelDescription
from piper_kernels.pipeline.plan import Plan
from piper_kernels.pipeline.planner import (
    FRONT_SLACK,
    InfeasiblePlanError,
    _splits,
    search,
    to_plan,
)
from piper_kernels.pipeline.platform_presets import load_platform
from piper_kernels.pipeline.search_space import SearchSpace, valid_strategies
from piper_kernels.pipeline.step_time import StepModel
from piper_kernels.pipeline.strategy import Strategy

H100 = load_platform("h100")
MODEL = ModelDescription(
    name="small",
    family="piper",
    vocab_size=32000,
    hidden_size=1024,
    layers=(
        Layer(
            attention=GroupedAttention(num_heads=8, num_kv_heads=8, head_dim=128),
            experts=Experts(num_experts=8, top_k=2, network=FeedForward(intermediate_size=512)),
        ),
    )
    * 8,
)
STEPS = StepModel(MODEL, ExchangePrices(H100))


def memory_of(scale: float):
    """A simple memory: layers over ranks, and live microbatches, in units of ``scale`` bytes."""

    def peak_bytes(strategy: Strategy) -> Sequence[float]:
        live = strategy.microbatch_size * (1 if strategy.checkpointing == "full" else 4)
        return [
            scale
            * (
                sum(strategy.layers_per_stage) / strategy.pp * (8 / strategy.ep / strategy.tp)
                + live * (strategy.pp - rank)
            )
            for rank in range(strategy.pp)
        ]

    return peak_bytes


SPACE = SearchSpace(num_gpus=8, global_batch=32, seq_len=1024, microbatch_sizes=(1, 2))


@functools.cache
def seconds(strategy: Strategy) -> float:
    return STEPS.predict(strategy).step_s


@given(
    gpus=st.sampled_from([1, 2, 4, 6, 8]),
    batch=st.sampled_from([8, 12]),
    num_best=st.integers(1, 4),
    scale=st.sampled_from([1e8, 2e9, 6e9]),
)
def test_search_equals_trying_everything(
    gpus: int, batch: int, num_best: int, scale: float
) -> None:
    space = replace(SPACE, num_gpus=gpus, global_batch=batch, microbatch_sizes=(1,))
    peak_bytes, available = memory_of(scale), H100.device.usable_bytes
    every = [
        (seconds(strategy), max(peak_bytes(strategy)))
        for even in valid_strategies(MODEL, H100, space, Counter())
        for strategy in _splits(STEPS, even, {})
        if max(peak_bytes(strategy)) <= available
    ]
    if not every:
        with pytest.raises(InfeasiblePlanError):
            search(STEPS, peak_bytes, space, num_best=num_best)
        return
    result = search(STEPS, peak_bytes, space, num_best=num_best)
    assert [one.step_s for one in result.best] == sorted(t for t, _ in every)[:num_best]
    front = {
        (t, m)
        for t, m in every
        if t <= FRONT_SLACK * min(every)[0]
        and not any(a <= t and b <= m and (a, b) != (t, m) for a, b in every)
    }
    assert {(one.step_s, one.most_bytes) for one in result.front} == front
    assert result.num_simulated <= len(every)


def test_search_result_is_a_plan() -> None:
    result = search(STEPS, memory_of(1e9), SPACE)
    best = result.best[0]
    plan = to_plan(STEPS, best)
    assert Plan.from_json(plan.to_json()) == plan
    assert plan.predicted is not None
    assert plan.predicted.step_s == pytest.approx(best.step_s)
    assert plan.global_batch == 32
    plan.check_model(MODEL.digest(), 8, 8)
    if best.strategy.ep > 1:
        prediction = STEPS.layer_time(MODEL.layers[0], best.strategy).exchange
        assert prediction is not None
        assert plan.exchange.algorithm == prediction.prediction.algorithm


def test_search_does_not_simulate_everything() -> None:
    result = search(STEPS, memory_of(1e8), replace(SPACE, num_gpus=16), num_best=1)
    assert result.num_simulated < result.num_seen
    every = list(valid_strategies(MODEL, H100, replace(SPACE, num_gpus=16), Counter()))
    assert result.num_seen < len(every) / 2


def test_search_says_what_is_missing_and_what_would_fit() -> None:
    # eight layers' experts need 64 units on one GPU; more GPUs hold less each
    space = replace(SPACE, num_gpus=2, checkpointing=("full",), microbatch_sizes=(1,))
    with pytest.raises(InfeasiblePlanError) as caught:
        search(STEPS, memory_of(6e9), space)
    message = str(caught.value)
    assert "none fits. The nearest is pp" in message
    assert "needed" in message
    assert f"available {H100.device.usable_bytes / 2**30:.1f} GiB" in message
    assert "The nearest change that fits: on 8 GPUs." in message
    with pytest.raises(InfeasiblePlanError):
        search(STEPS, memory_of(6e9), replace(space, num_gpus=4))
    assert search(STEPS, memory_of(6e9), replace(space, num_gpus=8)).best
    nearest = caught.value.nearest
    assert nearest is not None
    assert nearest.needed_bytes == max(memory_of(6e9)(nearest.strategy)) > nearest.available_bytes


def test_search_says_when_no_rule_lets_anything_run() -> None:
    space = replace(SPACE, num_gpus=16, global_batch=3, fixed={"pp": 1, "tp": 1})
    with pytest.raises(InfeasiblePlanError, match=r"None of the rules lets one run") as caught:
        search(STEPS, memory_of(1e8), space)
    assert any("global_batch = 3 is no multiple" in reason for reason, _ in caught.value.reasons)
    assert "The nearest change that fits: without fixed axes." in str(caught.value)
    assert caught.value.nearest is None


def test_search_refuses_what_the_platform_does_not_reach() -> None:
    links = H100.topology.links.replace(group=None, far=None)
    alone = H100.replace(topology=H100.topology.replace(links=links, fabric=None))
    with pytest.raises(PlanError, match="describes one node only, got 16"):
        search(StepModel(MODEL, ExchangePrices(alone)), memory_of(1e8), replace(SPACE, num_gpus=16))


def test_search_offers_no_change_beyond_the_platform() -> None:
    links = H100.topology.links.replace(group=None, far=None)
    alone = H100.replace(topology=H100.topology.replace(links=links, fabric=None))
    steps = StepModel(MODEL, ExchangePrices(alone))
    with pytest.raises(InfeasiblePlanError) as caught:
        search(steps, memory_of(4e10), replace(SPACE, num_gpus=8))
    message = str(caught.value)
    assert "none fits" in message
    assert "on 16 GPUs" not in message
    assert "on 32 GPUs" not in message


def test_search_finds_the_same_with_a_bound_on_memory() -> None:
    for limit in (1e9, 6e9, 4e10):
        memory = memory_of(limit)
        space = replace(SPACE, num_gpus=8)
        results = []
        for least_bytes in (None, lambda one, memory=memory: max(memory(one)) / 2):
            try:
                found = search(STEPS, memory, space, least_bytes=least_bytes)
                results.append([(one.strategy, one.step_s) for one in found.best])
            except InfeasiblePlanError as error:
                results.append(str(error).split("none fits")[1])
        assert results[0] == results[1]
