"""Which MoE blocks of transformers a PiperMoE can stand in for, and what each of them is.

Everything is read from attributes that the block's parts carry; nothing is guessed from shapes.
"""

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

from torch import nn

from piper_kernels.config import Activation, MoEConfig, RouterConfig, SharedExpertsConfig
from piper_kernels.errors import ConfigError, instruction
from piper_kernels.huggingface.layouts import is_experts_module, read_activation, read_layout


@dataclass(frozen=True, kw_only=True, slots=True)
class BlockFamily:
    """Where a block class keeps its parts, and how its router chooses.

    Attributes:
        read_router: ``(block, its router) -> RouterConfig``.
        router: name of the child that is called ``(x) -> (logits, gates, expert_ids)``.
        shared_experts: name of the child that every token passes.
        shared_gate: name of the child whose sigmoid weighs the shared experts per token.
        returns_scores: the block returns ``(y, gates)`` instead of y.
    """

    read_router: Callable[[Any, Any], RouterConfig]
    router: str = "gate"
    shared_experts: str | None = None
    shared_gate: str | None = None
    returns_scores: bool = False


def _softmax(block: Any, router: Any) -> RouterConfig:
    """Qwen's and OLMoE's: softmax over E, then the K best, normalised if ``norm_topk_prob``."""
    return RouterConfig(kind="softmax_topk", is_normalized=router.norm_topk_prob)


def _normalized_softmax(block: Any, router: Any) -> RouterConfig:
    return RouterConfig(kind="softmax_topk", is_normalized=True)


def _mixtral(block: Any, router: Any) -> RouterConfig:
    return RouterConfig(kind="softmax_topk", is_normalized=True, jitter=block.jitter_noise)


def _topk_softmax(block: Any, router: Any) -> RouterConfig:
    return RouterConfig(kind="topk_softmax", has_bias=True)


def _sigmoid(block: Any, router: Any) -> RouterConfig:
    """DeepSeek-V3's: sigmoid, a correction bias, groups by the sum of their best two."""
    return RouterConfig(
        kind="sigmoid_topk",
        is_normalized=router.norm_topk_prob,
        scaling_factor=router.routed_scaling_factor,
        num_groups=router.num_group,
        num_selected_groups=router.topk_group,
        group_score="top2_sum",
        has_correction_bias=True,
    )


_PLAIN = BlockFamily(read_router=_softmax)
_QWEN_SHARED = BlockFamily(
    read_router=_softmax, shared_experts="shared_expert", shared_gate="shared_expert_gate"
)
_DEEPSEEK = BlockFamily(read_router=_sigmoid, shared_experts="shared_experts")

# By the block's exact class: another class may compute something else.
# Source: transformers 5.24, models/<family>/modeling_<family>.py.
FAMILIES: dict[str, BlockFamily] = {
    f"transformers.models.{name}": family
    for name, family in {
        "deepseek_v3.modeling_deepseek_v3.DeepseekV3MoE": _DEEPSEEK,
        "flex_olmo.modeling_flex_olmo.FlexOlmoSparseMoeBlock": _PLAIN,
        "glm4_moe.modeling_glm4_moe.Glm4MoeMoE": _DEEPSEEK,
        "gpt_oss.modeling_gpt_oss.GptOssMLP": BlockFamily(
            read_router=_topk_softmax, router="router", returns_scores=True
        ),
        "mixtral.modeling_mixtral.MixtralSparseMoeBlock": BlockFamily(read_router=_mixtral),
        "olmoe.modeling_olmoe.OlmoeSparseMoeBlock": _PLAIN,
        "qwen2_moe.modeling_qwen2_moe.Qwen2MoeSparseMoeBlock": _QWEN_SHARED,
        "qwen3_5_moe.modeling_qwen3_5_moe.Qwen3_5MoeSparseMoeBlock": replace(
            _QWEN_SHARED, read_router=_normalized_softmax
        ),
        "qwen3_moe.modeling_qwen3_moe.Qwen3MoeSparseMoeBlock": _PLAIN,
        "qwen3_next.modeling_qwen3_next.Qwen3NextSparseMoeBlock": _QWEN_SHARED,
        "qwen3_vl_moe.modeling_qwen3_vl_moe.Qwen3VLMoeTextSparseMoeBlock": replace(
            _PLAIN, read_router=_normalized_softmax
        ),
    }.items()
}


def find_family(block: nn.Module) -> BlockFamily | None:
    """The family of a block, or ``None`` if its class is not in the table."""
    return FAMILIES.get(f"{type(block).__module__}.{type(block).__qualname__}")


def without_adapters(module: Any) -> Any:
    """The module below PEFT's wrappers, which keep it as ``base_layer``."""
    while hasattr(module, "base_layer"):
        module = module.base_layer
    return module


def read_config(block: nn.Module, family: BlockFamily) -> MoEConfig:
    """What a block of transformers computes, as a config of ours.

    Args:
        block: an MoE block.
        family: its entry of ``FAMILIES``.

    Raises:
        ConfigError: its activation is none that ``Activation`` can name.
    """
    experts: Any = without_adapters(block.experts)
    assert is_experts_module(experts), f"{type(experts)=} is not on the experts registry"
    router = without_adapters(getattr(block, family.router))
    layout, activation = read_layout(experts), read_activation(experts)
    if not isinstance(activation, Activation):
        requirement = "be one that piper_kernels.Activation can name"
        given = type(getattr(experts, "act_fn", experts)).__name__
        remedy = 'Select experts_implementation="piper" instead: it runs any activation.'
        raise ConfigError(
            instruction("replace_moe_blocks", "the activation", requirement, given, remedy)
        )
    shared = None
    if family.shared_experts is not None:
        mlp = without_adapters(getattr(block, family.shared_experts))
        shared = SharedExpertsConfig(
            intermediate_size=mlp.intermediate_size,
            is_gated_by_token=family.shared_gate is not None,
        )
    hidden_dim, intermediate_dim = (1, 2) if not layout.is_transposed else (2, 1)
    return MoEConfig(
        hidden_size=experts.down_proj.shape[hidden_dim],
        intermediate_size=experts.down_proj.shape[intermediate_dim],
        num_experts=router.num_experts,
        top_k=router.top_k,
        router=family.read_router(block, router),
        activation=activation,
        layout=layout,
        has_expert_bias=experts.has_bias,
        shared_experts=shared,
    )
