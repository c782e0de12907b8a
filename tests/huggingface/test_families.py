from typing import Any

import pytest
import torch
from peft import LoraConfig, get_peft_model
from torch import nn
from transformers.activations import ACT2FN

from piper_kernels.config import Activation, MoEConfig, RouterConfig, SharedExpertsConfig
from piper_kernels.errors import ConfigError
from piper_kernels.huggingface.families import (
    FAMILIES,
    find_family,
    read_config,
    without_adapters,
)
from piper_kernels.routing import route
from piper_kernels.testing.tiny_models import modeling_module, tiny_model

FAMILY_NAMES = sorted(key.split(".")[2] for key in FAMILIES)


def block_of(family: str, **settings: Any) -> Any:
    model = tiny_model(family, **settings)
    return next(module for module in model.modules() if find_family(module) is not None)


def config_of(block: nn.Module) -> MoEConfig:
    family = find_family(block)
    assert family is not None
    return read_config(block, family)


@pytest.mark.parametrize("key", FAMILIES)
def test_families_name_classes_that_exist(key: str) -> None:
    _, _, family, module, name = key.split(".")
    assert getattr(modeling_module(family), name).__module__.endswith(module)


def test_find_family_wants_the_exact_class() -> None:
    block = block_of("mixtral")

    class Mine(type(block)):  # type: ignore[misc]
        pass

    assert find_family(block) is not None
    block.__class__ = Mine
    assert find_family(block) is None
    assert find_family(nn.Linear(2, 2)) is None


def test_read_config_refuses_an_activation_without_a_name() -> None:
    block = block_of("mixtral")
    block.experts.act_fn = ACT2FN["mish"]
    with pytest.raises(ConfigError, match=r"got MishActivation\. Select experts_implementation"):
        config_of(block)


@pytest.mark.filterwarnings("ignore:.is_gradient_checkpointing. is dep:FutureWarning")
def test_read_config_sees_through_adapters() -> None:
    model = tiny_model("qwen2_moe")
    plain = config_of(next(m for m in model.modules() if find_family(m) is not None))
    options = {
        "target_modules": ["up_proj", "shared_expert_gate"],
        "target_parameters": ["experts.down_proj", "gate.weight"],
    }
    adapted = get_peft_model(model, LoraConfig(r=2, **options))
    block = next(m for m in adapted.modules() if find_family(m) is not None)
    assert without_adapters(block.experts) is not block.experts
    assert config_of(block) == plain


def test_read_config_of_deepseek_v3() -> None:
    block = block_of("deepseek_v3", routed_scaling_factor=1.5)
    assert config_of(block) == MoEConfig(
        hidden_size=32,
        intermediate_size=20,
        num_experts=8,
        top_k=2,
        router=RouterConfig(
            kind="sigmoid_topk",
            is_normalized=True,
            scaling_factor=1.5,
            num_groups=2,
            num_selected_groups=1,
            group_score="top2_sum",
            has_correction_bias=True,
        ),
        shared_experts=SharedExpertsConfig(intermediate_size=20),
    )


def test_read_config_of_gpt_oss_and_qwen2_moe() -> None:
    config = config_of(block_of("gpt_oss"))
    assert config.layout.is_transposed
    assert config.layout.is_interleaved
    assert config.has_expert_bias
    assert config.router == RouterConfig(kind="topk_softmax", has_bias=True)
    assert config.activation == Activation(alpha=1.702, limit=7.0, up_offset=1.0)
    config = config_of(block_of("qwen2_moe"))
    assert config.shared_experts == SharedExpertsConfig(
        intermediate_size=12, is_gated_by_token=True
    )


NORMALIZED = {
    "mixtral": (True, {}),
    "olmoe": (False, {"norm_topk_prob": False}),
    "qwen2_moe": (False, {"norm_topk_prob": False}),
    "qwen3_moe": (True, {"norm_topk_prob": True}),
    "deepseek_v3": (True, {"routed_scaling_factor": 1.0}),
    "gpt_oss": (True, {}),
}


@pytest.mark.parametrize("family", FAMILY_NAMES)
def test_router_config_chooses_and_weighs_as_the_block_does(family: str) -> None:
    is_normalized, settings = NORMALIZED.get(family, (None, {}))
    block = block_of(family, **settings)
    found, config = find_family(block), config_of(block)
    assert found is not None
    router = getattr(block, found.router)
    bias = getattr(router, "e_score_correction_bias", None)
    if bias is not None:
        bias.normal_(0.0, 0.3)
    logits, gates, expert_ids = router(torch.randn(200, 32))
    ours = route(logits, config.top_k, config.router, correction_bias=bias)
    # transformers leaves the order of the K open (topk with sorted=False)
    by_id, order = expert_ids.sort(-1)
    ours_by_id, ours_order = ours.expert_ids.sort(-1)
    assert torch.equal(ours_by_id, by_id)
    theirs = gates.gather(1, order)
    torch.testing.assert_close(ours.gates.gather(1, ours_order), theirs, rtol=1e-6, atol=1e-6)
    sums = gates.sum(-1)
    if is_normalized is not None:
        is_one = torch.allclose(sums, torch.ones_like(sums), rtol=1e-5)
        assert is_one == is_normalized
