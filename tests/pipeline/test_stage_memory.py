"""Bytes of a stage: exact static parts, sane directions, and the field's mistakes avoided."""

from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from piper_kernels.errors import PlanError
from piper_kernels.pipeline.memory_settings import (
    ActivationRules,
    Checkpointing,
    MemorySettings,
    OptimizerRules,
)
from piper_kernels.pipeline.model_by_hand import HandModel
from piper_kernels.pipeline.model_config import load_model
from piper_kernels.pipeline.model_description import ModelDescription
from piper_kernels.pipeline.stage_memory import StageMemory, num_local_experts, stage_memory

MIXTRAL = load_model("mixtral-8x7b")
ALL = range(MIXTRAL.num_layers)
SETTINGS = MemorySettings(seq_len=4096)


def hand(**changes: Any) -> ModelDescription:
    sizes: dict[str, Any] = {
        "vocab_size": 1000,
        "hidden_size": 64,
        "num_hidden_layers": 8,
        "num_attention_heads": 4,
        "num_experts": 16,
        "num_experts_per_tok": 2,
        "moe_intermediate_size": 96,
    }
    return HandModel(model_type="piper", **(sizes | changes)).describe("hand")


def total_bytes(memory: StageMemory) -> float:
    kept = memory.activation_bytes + memory.transient_bytes
    return memory.static_bytes + kept + memory.communication_bytes


@pytest.mark.parametrize(
    ("rules", "bytes_per_parameter"),
    [
        (OptimizerRules(), 2 + 2 + 4 + 8),
        (OptimizerRules(gradient_bytes=4), 2 + 4 + 4 + 8),
        (OptimizerRules(kind="adamw_8bit"), 2 + 2 + 4 + 2.03125),
        (OptimizerRules(kind="sgd"), 2 + 2 + 4),
        (OptimizerRules(kind="sgd_momentum", has_master_weights=False), 2 + 2 + 4),
    ],
)
def test_stage_memory_static_bytes(rules: OptimizerRules, bytes_per_parameter: float) -> None:
    memory = stage_memory(MIXTRAL, ALL, replace(SETTINGS, optimizer=rules))
    assert memory.static_bytes == bytes_per_parameter * MIXTRAL.num_parameters


def test_stage_memory_fp32_has_no_master_weights() -> None:
    model = replace(MIXTRAL, dtype="float32")
    assert stage_memory(model, ALL, SETTINGS).static_bytes == 16 * model.num_parameters


def test_stage_memory_stages_add_up() -> None:
    stages = [stage_memory(MIXTRAL, range(i, i + 8), SETTINGS) for i in range(0, 32, 8)]
    assert sum(one.parameter_bytes for one in stages) == 2 * MIXTRAL.num_parameters
    tied = replace(MIXTRAL, has_tied_embeddings=True)
    halves = [stage_memory(tied, half, SETTINGS) for half in (range(16), range(16, 32))]
    # both ends need the one weight
    extra = sum(one.parameter_bytes for one in halves) / 2 - tied.num_parameters
    assert extra == tied.embedding_parameters


def test_stage_memory_sharding_divides_by_replicas() -> None:
    settings = replace(SETTINGS, dp=2, ep=4)
    whole = stage_memory(MIXTRAL, ALL, settings)
    sharded = stage_memory(
        MIXTRAL, ALL, replace(settings, optimizer=OptimizerRules(is_sharded=True))
    )
    parts = MIXTRAL.layer_parameters(0)
    experts = 32 * parts.experts / 4
    replicated = MIXTRAL.num_parameters - 32 * parts.experts
    assert whole.optimizer_bytes == 8 * (experts + replicated)
    # attention has dp * ep replicas, experts dp
    assert sharded.optimizer_bytes == 8 * (experts / 2 + replicated / 8)
    assert sharded.parameter_bytes == whole.parameter_bytes


def test_num_local_experts_is_the_most_loaded_rank() -> None:
    assert [num_local_experts(60, ep) for ep in (1, 7, 16, 60)] == [60, 9, 4, 1]


def test_stage_memory_a88_counts_total_not_active_parameters() -> None:
    # field report A88: H 4096, I 1024, K 8, E 128 against 256
    few, many = (
        hand(hidden_size=4096, moe_intermediate_size=1024, num_experts=e, num_experts_per_tok=8)
        for e in (128, 256)
    )
    for ep in (1, 8):
        settings = MemorySettings(seq_len=128, ep=ep)
        before, after = (stage_memory(model, range(8), settings) for model in (few, many))
        router = 8 * 128 * 4096
        grown = 8 * 128 * 3 * 4096 * 1024 / ep + router
        assert after.parameter_bytes - before.parameter_bytes == 2 * grown
        assert after.static_bytes - before.static_bytes == 16 * grown
    # what one token meets changes by the router alone
    assert many.num_active_parameters - few.num_active_parameters == 8 * 128 * 4096


def test_stage_memory_a89_reads_k_i_and_imbalance() -> None:
    # field report A89: activations priced as a dense MLP
    def kept(model: ModelDescription, imbalance: float = 1.0) -> float:
        settings = replace(SETTINGS, activations=ActivationRules(imbalance=imbalance))
        return stage_memory(model, range(8), settings).activation_bytes

    by_k = [kept(hand(num_experts_per_tok=k)) for k in (1, 2, 4, 8)]
    assert by_k == sorted(set(by_k))
    by_width = [kept(hand(moe_intermediate_size=width)) for width in (96, 192, 384)]
    assert by_width == sorted(set(by_width))
    assert kept(hand()) < kept(hand(), imbalance=4.0)
    assert kept(hand()) < kept(hand(shared_expert_intermediate_size=32))
    dense = hand(num_experts=0, num_experts_per_tok=0, intermediate_size=96)
    assert kept(dense) == kept(dense, imbalance=4.0)
    mixed = hand(first_k_dense_replace=4, intermediate_size=96)
    assert kept(mixed) * 2 == pytest.approx(
        kept(hand()) + kept(hand(first_k_dense_replace=8, intermediate_size=96))
    )


def test_stage_memory_checkpointing_trades_kept_for_recomputed() -> None:
    def memory(checkpointing: Checkpointing) -> StageMemory:
        rules = ActivationRules(attention="eager")
        return stage_memory(
            hand(), range(8), replace(SETTINGS, checkpointing=checkpointing, activations=rules)
        )

    none, selective, full = memory("none"), memory("selective"), memory("full")
    assert none.activation_bytes > selective.activation_bytes > full.activation_bytes
    assert none.recompute_bytes == 0 < selective.recompute_bytes < full.recompute_bytes
    # the core: 4 heads, fp32 softmax and its bf16 copy, of every layer
    core = 4 * 4096 * (4 + 2) * 4096
    assert none.activation_bytes - selective.activation_bytes == 8 * core
    assert selective.recompute_bytes == core


def test_stage_memory_expert_parallel_buffers() -> None:
    alone, shared = (stage_memory(hand(), range(8), replace(SETTINGS, ep=ep)) for ep in (1, 2))
    assert alone.communication_bytes == 0
    # K rows of H out, as many back
    assert shared.communication_bytes == 2 * 2 * 64 * 2 * 4096
    middle = stage_memory(hand(), range(2, 4), SETTINGS)
    assert middle.communication_bytes == 2 * 64 * 2 * 4096


def test_stage_memory_keeps_a_stage_s_ends_once() -> None:
    row = 64 * 2 * 4096

    def ends(layers: range, **changes: Any) -> float:
        settings = replace(SETTINGS, **changes)
        middle = stage_memory(hand(vocab_size=0), layers, settings).activation_bytes
        # without vocabulary the whole model has no ends but the ids
        whole = stage_memory(hand(vocab_size=0), range(8), settings).activation_bytes
        rotary, ids = 2 * 16 * 2 * 4096, 8 * 4096
        return middle - rotary - (whole - rotary - ids) * len(layers) / 8

    assert ends(range(2, 4)) == pytest.approx(2 * row)
    assert ends(range(6, 8)) == pytest.approx(row)
    # the first layer keeps the very tensor that came in
    assert ends(range(2, 4), checkpointing="full") == pytest.approx(row)
    fused = ActivationRules(has_fused_norms=True)
    assert ends(range(2, 4), activations=fused) == pytest.approx(row)


@given(data=st.data())
def test_stage_memory_rises_with_sizes(data: st.DataObject) -> None:
    size = {
        "num_experts": data.draw(st.sampled_from([8, 16])),
        "num_experts_per_tok": data.draw(st.integers(1, 4)),
        "moe_intermediate_size": data.draw(st.integers(1, 200)),
    }
    settings = MemorySettings(
        seq_len=data.draw(st.integers(1, 300)),
        microbatch_size=data.draw(st.integers(1, 3)),
        ep=data.draw(st.sampled_from([1, 2, 4])),
        checkpointing=data.draw(st.sampled_from(["none", "selective", "full"])),
        activations=ActivationRules(attention=data.draw(st.sampled_from(["flash", "eager"]))),
    )
    before = stage_memory(hand(**size), range(8), settings)
    assert min(getattr(before, name) for name in StageMemory.__slots__) >= 0
    name = data.draw(st.sampled_from([*size, "seq_len", "microbatch_size"]))
    if name in size:
        step = 8 if name == "num_experts" else 1
        after = stage_memory(hand(**(size | {name: size[name] + step})), range(8), settings)
    else:
        larger = {name: getattr(settings, name) + 1}
        after = stage_memory(hand(**size), range(8), replace(settings, **larger))
    assert total_bytes(after) > total_bytes(before)


@given(
    st.sampled_from([1, 2, 4, 8]),
    st.sampled_from([1, 2, 4]),
    st.sampled_from(["none", "selective", "full"]),
    st.booleans(),
)
def test_stage_memory_falls_with_ep_and_pp(
    ep: int, pp: int, checkpointing: Checkpointing, is_sharded: bool
) -> None:
    optimizer = OptimizerRules(is_sharded=is_sharded)
    settings = MemorySettings(seq_len=64, ep=ep, checkpointing=checkpointing, optimizer=optimizer)
    first = stage_memory(hand(), range(8 // pp), settings)
    more_ranks = stage_memory(hand(), range(8 // pp), replace(settings, ep=2 * ep))
    assert more_ranks.static_bytes < first.static_bytes
    more_stages = stage_memory(hand(), range(8 // (2 * pp)), settings)
    assert more_stages.static_bytes < first.static_bytes


@pytest.mark.parametrize("layers", [range(0), range(33), range(-1, 4), range(0, 4, 2)])
def test_stage_memory_refuses_impossible_ranges(layers: range) -> None:
    with pytest.raises(PlanError, match="layers must be consecutive and within the model's 32"):
        stage_memory(MIXTRAL, layers, SETTINGS)
