"""A step: stages from layers, the bubble, what is counted as useful, what it costs."""

from dataclasses import replace

import pytest

from piper_kernels.errors import PlanError
from piper_kernels.pipeline.attention_description import GroupedAttention
from piper_kernels.pipeline.exchange_time import ExchangePrices
from piper_kernels.pipeline.layer_kinds import LayerKinds
from piper_kernels.pipeline.model_description import (
    Experts,
    FeedForward,
    Layer,
    ModelDescription,
)
from piper_kernels.pipeline.platform_presets import load_platform
from piper_kernels.pipeline.step_time import StepModel, model_flops
from piper_kernels.pipeline.strategy import Strategy

ATTENTION = GroupedAttention(num_heads=8, num_kv_heads=2, head_dim=128)
MOE = Layer(
    attention=ATTENTION,
    experts=Experts(num_experts=16, top_k=2, network=FeedForward(intermediate_size=512)),
)
DENSE = Layer(attention=ATTENTION, dense=FeedForward(intermediate_size=2048))
MODEL = ModelDescription(
    name="m", family="piper", vocab_size=32000, hidden_size=1024, layers=(DENSE, *[MOE] * 7)
)
H100 = load_platform("h100").replace(price_per_gpu_hour=2.0)
LAYERS = LayerKinds(MODEL)
STEPS = StepModel(MODEL, ExchangePrices(H100))
STRATEGY = Strategy(pp=4, ep=8, num_microbatches=8, seq_len=4096, layers_per_stage=(2, 2, 2, 2))


def test_model_flops_are_of_active_weights() -> None:
    # field report A88: the experts that rest cost memory, not compute
    layer = MODEL.layer_parameters(3)
    more = replace(
        MODEL, layers=(DENSE, *[replace(MOE, experts=replace(MOE.experts, num_experts=32))] * 7)
    )
    router = 7 * 16 * 1024
    assert model_flops(more, 1, 1) - model_flops(MODEL, 1, 1) == 6 * router
    active = sum(MODEL.layer_parameters(i).active for i in range(8)) + 32000 * 1024
    assert layer.active < layer.total
    assert model_flops(MODEL, 10, 256) == 10 * (6 * active + 3 * 8 * 256 * 8 * 256)


def test_stage_times_add_up_their_layers() -> None:
    stages = STEPS.stage_times(STRATEGY)
    dense, moe = (STEPS.layer_time(layer, STRATEGY).passes() for layer in (DENSE, MOE))
    middle = stages[1]
    assert middle.forward.compute_s == pytest.approx(2 * moe[0].compute_s)
    assert middle.forward.exchange_s == pytest.approx(2 * moe[0].exchange_s)
    lookup = STEPS.embedding_s(STRATEGY)
    assert stages[0].forward.seconds == pytest.approx(dense[0].seconds + moe[0].seconds + lookup)
    head = [sum(terms.values()) for terms in STEPS.head_terms(STRATEGY)]
    assert stages[3].forward.seconds == pytest.approx(middle.forward.seconds + head[0])
    assert stages[3].backward_weight.seconds == pytest.approx(
        middle.backward_weight.seconds + head[2]
    )
    assert stages[3].send_s == 0
    assert stages[0].send_s == STEPS.boundary_s(STRATEGY) > 0


def test_stage_times_refuse_other_layers() -> None:
    # field report A72: no layer may be lost
    with pytest.raises(PlanError, match="be the model's 8 layers in all, got 7"):
        STEPS.stage_times(replace(STRATEGY, layers_per_stage=(2, 2, 2, 1)))


def test_predict_counts_tokens_flops_and_money() -> None:
    step = STEPS.predict(STRATEGY)
    tokens = 8 * 8 * 4096
    assert step.tokens_per_s == pytest.approx(tokens / step.step_s)
    peak = 32 * H100.device.peak_flops_per_s
    assert step.mfu == pytest.approx(model_flops(MODEL, tokens, 4096) / step.step_s / peak)
    assert step.cost_per_million_tokens == pytest.approx(2 * 32 * step.step_s / 3600 / tokens * 1e6)
    assert 0 < step.mfu < 1
    assert STEPS.seconds(STRATEGY) == step.step_s
    assert STEPS.bound_s(STRATEGY) <= step.step_s


def test_predict_the_bubble_shrinks_with_microbatches() -> None:
    few, many = (
        STEPS.predict(replace(STRATEGY, num_microbatches=m)).timeline.bubble_share for m in (4, 64)
    )
    assert 0 < many < few < 0.6


def test_predict_a_heavy_head_is_relieved_by_another_split() -> None:
    wide = replace(MODEL, vocab_size=256_000)
    steps = StepModel(wide, ExchangePrices(H100))
    even = replace(STRATEGY, num_microbatches=64)
    relieved = replace(even, layers_per_stage=(3, 2, 2, 1))
    assert steps.seconds(relieved) < steps.seconds(even)


def test_finish_terms_reduce_what_is_replicated() -> None:
    # experts have no copies with dp = 1, attention has eight
    terms = STEPS.finish_terms(STRATEGY, LAYERS.stage(0, 2))
    assert terms["reduce expert gradients"] == 0
    assert terms["reduce dense gradients"] > 0
    alone = STEPS.finish_terms(replace(STRATEGY, ep=1), LAYERS.stage(0, 2))
    assert alone["reduce dense gradients"] == 0
    sharded = STEPS.finish_terms(replace(STRATEGY, is_optimizer_sharded=True), LAYERS.stage(0, 2))
    assert sharded["optimizer"] < terms["optimizer"]


def test_finish_terms_tied_embeddings_meet_across_the_pipeline() -> None:
    tied = StepModel(replace(MODEL, has_tied_embeddings=True), ExchangePrices(H100))
    first, middle = (
        tied.finish_terms(STRATEGY, LAYERS.stage(first, first + 2)) for first in (0, 2)
    )
    assert first["reduce tied embedding"] > 0
    assert "reduce tied embedding" not in middle


def test_layer_time_is_priced_once() -> None:
    assert STEPS.layer_time(MOE, STRATEGY) is STEPS.layer_time(MOE, replace(STRATEGY, pp=2, dp=2))
