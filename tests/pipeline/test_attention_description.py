"""Attentions as data: exact parameters, and what tensor parallelism leaves on a rank."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from piper_kernels.errors import ConfigError
from piper_kernels.pipeline.attention_description import (
    GroupedAttention,
    LatentAttention,
    Projection,
    require_size,
)

# DeepSeek-V3: 128 heads, latent vectors of 1536 and 512, heads of 128 + 64, values of 128
DEEPSEEK_V3 = LatentAttention(
    num_heads=128,
    kv_lora_rank=512,
    q_lora_rank=1536,
    qk_nope_head_dim=128,
    qk_rope_head_dim=64,
    v_head_dim=128,
)


def test_grouped_attention_counts_biases_norms_and_sinks() -> None:
    plain = GroupedAttention(num_heads=4, num_kv_heads=2, head_dim=8)
    # queries 32 x 32, keys and values 32 x 16 each, output 32 x 32
    assert plain.num_parameters(32) == 32 * 32 + 2 * 32 * 16 + 32 * 32
    full = GroupedAttention(
        num_heads=4,
        num_kv_heads=2,
        head_dim=8,
        has_qkv_bias=True,
        has_output_bias=True,
        qk_norm="head",
        has_sinks=True,
    )
    biases, norms, sinks = 32 + 16 + 16 + 32, 8 + 8, 4
    assert full.num_parameters(32) == plain.num_parameters(32) + biases + norms + sinks


def test_grouped_attention_norms_span_a_head_or_all() -> None:
    widths = {"none": (), "head": (8, 8), "all_heads": (32, 16)}
    for kind, sizes in widths.items():
        attention = GroupedAttention(
            num_heads=4,
            num_kv_heads=2,
            head_dim=8,
            qk_norm=kind,  # type: ignore[arg-type]
        )
        assert attention.norm_sizes == sizes


def test_latent_attention_counts_deepseek_v3() -> None:
    weights = 7168 * 1536 + 1536 * 128 * 192 + 7168 * 576 + 512 * 128 * 256 + 128 * 128 * 7168
    assert DEEPSEEK_V3.num_parameters(7168) == weights + 1536 + 512
    assert [one.name for one in DEEPSEEK_V3.projections(7168)] == [
        "q_a_proj",
        "q_b_proj",
        "kv_a_proj_with_mqa",
        "kv_b_proj",
        "o_proj",
    ]


@given(st.sampled_from(["out", "in", "whole"]), st.booleans(), st.sampled_from([1, 2, 4]))
def test_projection_ranks_hold_it_all(cut: str, has_bias: bool, tp_size: int) -> None:
    one = Projection(
        name="p",
        in_size=8,
        out_size=12,
        has_bias=has_bias,
        cut=cut,  # type: ignore[arg-type]
    )
    weight, bias = 96, 12 * has_bias
    per_rank = one.parameters_per_rank(tp_size)
    if cut == "whole":
        assert per_rank == weight + bias
    elif cut == "out":
        assert per_rank * tp_size == weight + bias
    else:
        assert per_rank == weight / tp_size + bias
    assert one.parameters_per_rank(1) == one.num_parameters


@pytest.mark.parametrize("value", [0, -1, 1.0, True, "8", None])
def test_require_size_refuses(value: object) -> None:
    with pytest.raises(ConfigError, match="num_heads must be an integer >= 1, got"):
        require_size("GroupedAttention", "num_heads", value)


def test_grouped_attention_refuses_heads_that_do_not_divide() -> None:
    with pytest.raises(ConfigError, match="num_kv_heads must divide num_heads = 4, got 3"):
        GroupedAttention(num_heads=4, num_kv_heads=3, head_dim=8)
