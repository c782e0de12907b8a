"""Analytic parameter counts against the real classes on the meta device: exact, always."""

from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from piper_kernels.pipeline.model_config import load_model
from piper_kernels.pipeline.model_families import FAMILIES
from piper_kernels.testing.tiny_models import model_class, tiny_config

# what changes parameters, by family: bias flags, patterns, shared experts, ranks
VARIATIONS: dict[str, dict[str, st.SearchStrategy[Any]]] = {
    "mixtral": {"head_dim": st.sampled_from([None, 4, 8])},
    "qwen2_moe": {
        "qkv_bias": st.booleans(),
        "mlp_only_layers": st.lists(st.integers(0, 3), max_size=2),
        "decoder_sparse_step": st.integers(1, 3),
        "shared_expert_intermediate_size": st.sampled_from([4, 12]),
    },
    "qwen3_moe": {
        "attention_bias": st.booleans(),
        "mlp_only_layers": st.lists(st.integers(0, 3), max_size=2),
        "decoder_sparse_step": st.integers(1, 3),
    },
    "olmoe": {"attention_bias": st.booleans()},
    "granitemoe": {"attention_bias": st.booleans()},
    "deepseek_v2": {
        "attention_bias": st.booleans(),
        "mlp_bias": st.booleans(),
        "q_lora_rank": st.sampled_from([None, 8]),
        "first_k_dense_replace": st.integers(0, 3),
        "n_shared_experts": st.integers(1, 3),
    },
    "deepseek_v3": {
        "attention_bias": st.booleans(),
        "q_lora_rank": st.sampled_from([None, 8]),
        "first_k_dense_replace": st.integers(0, 3),
        "n_shared_experts": st.integers(1, 3),
    },
    "glm4_moe": {
        "attention_bias": st.booleans(),
        "use_qk_norm": st.booleans(),
        "first_k_dense_replace": st.integers(0, 3),
        "n_shared_experts": st.integers(1, 3),
    },
    "gpt_oss": {"attention_bias": st.booleans()},
    "phimoe": {"attention_bias": st.booleans(), "lm_head_bias": st.booleans()},
}
COMMON = {
    "tie_word_embeddings": st.booleans(),
    "num_hidden_layers": st.integers(1, 4),
    "num_key_value_heads": st.sampled_from([1, 2, 4]),
    "hidden_size": st.sampled_from([16, 32]),
    "num_experts_per_tok": st.integers(1, 4),
}


def num_real_parameters(config: Any) -> int:
    with torch.device("meta"):
        model = model_class(config.model_type)(config)
    return sum(parameter.numel() for parameter in model.parameters())


def test_families_are_the_ten() -> None:
    assert VARIATIONS.keys() == FAMILIES.keys()


@pytest.mark.parametrize("family", FAMILIES)
@given(data=st.data())
def test_families_count_as_the_real_class(family: str, data: st.DataObject) -> None:
    settings = {key: data.draw(values, key) for key, values in COMMON.items()}
    settings |= {key: data.draw(values, key) for key, values in VARIATIONS[family].items()}
    if family.startswith("deepseek"):
        # latent attention has no fewer key heads
        del settings["num_key_value_heads"]
    if family == "gpt_oss":
        # one entry a layer, or none: transformers fills it in
        settings["layer_types"] = None
    config = tiny_config(family, **settings)
    if family == "qwen3_moe":
        # no setting of the class, but one of every published config
        config.head_dim = data.draw(st.sampled_from([4, 16]), "head_dim")
    assert load_model(config.to_dict()).num_parameters == num_real_parameters(config)


@pytest.mark.parametrize(
    ("family", "router", "has_correction_bias"),
    [
        ("mixtral", "softmax_topk", False),
        ("granitemoe", "topk_softmax", False),
        ("gpt_oss", "topk_softmax", False),
        ("deepseek_v2", "softmax_topk", False),
        ("deepseek_v3", "sigmoid_topk", True),
        ("glm4_moe", "sigmoid_topk", True),
    ],
)
def test_families_know_their_router(family: str, router: str, has_correction_bias: bool) -> None:
    experts = load_model(tiny_config(family).to_dict()).layers[-1].experts
    assert experts is not None
    assert (experts.router, experts.has_correction_bias) == (router, has_correction_bias)
