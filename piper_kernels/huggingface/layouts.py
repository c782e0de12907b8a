"""What an experts module of transformers is, read from its explicit flags; never from shapes.

transformers' decorator ``use_experts_implementation`` sets ``has_gate``, ``has_bias``,
``is_transposed``, ``is_concatenated`` and (newer releases) ``has_post_expert_norm`` on every
experts module, and gives its class an ``_apply_gate``.
"""

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from piper_kernels.config import RELU2, SWIGLU, Activation, WeightLayout
from piper_kernels.huggingface.integration import activations

# Ours, or a map [R, 2I] (ungated: [R, I]) -> [R, I].
ActivationLike = Activation | Callable[[Tensor], Tensor]

# By exact class: a subclass may compute something else.
_BY_CLASS: dict[type, Activation] = {
    nn.SiLU: SWIGLU,
    activations.SiLUActivation: SWIGLU,
    activations.QuickGELUActivation: Activation(alpha=1.702),
    activations.GELUActivation: Activation(function="gelu"),
    activations.GELUTanh: Activation(function="gelu_tanh"),
    activations.NewGELUActivation: Activation(function="gelu_tanh"),
    nn.ReLU: Activation(function="relu"),
    activations.ReLUSquaredActivation: RELU2,
    activations.LinearActivation: Activation(function="identity"),
}


def _clamped(limit: str, *, alpha: str | None = None, up_offset: float = 0.0) -> Any:
    """A reader of a clamped SwiGLU whose constants are attributes of the experts module."""

    def read(module: Any) -> Activation:
        slope = 1.0 if alpha is None else float(getattr(module, alpha))
        return Activation(alpha=slope, limit=float(getattr(module, limit)), up_offset=up_offset)

    return read


# Gates that a family writes itself, by the full name of the function: a subclass or a copy in
# remote code that overrides it has another name and takes the composed path. The tests compare
# each with the function it stands for.
_BY_GATE: dict[tuple[str, str], Callable[[Any], Activation]] = {
    (f"transformers.models.{module}", f"{name}._apply_gate"): reader
    for (module, name), reader in {
        ("deepseek_v4.modeling_deepseek_v4", "DeepseekV4Experts"): _clamped("limit"),
        ("glm5_next.modeling_glm5_next", "Glm5NextTextExperts"): _clamped("swiglu_limit"),
        ("gpt_oss.modeling_gpt_oss", "GptOssExperts"): _clamped(
            "limit", alpha="alpha", up_offset=1.0
        ),
        ("hy_v4.modeling_hy_v4", "HYV4Experts"): _clamped("swiglu_limit"),
        ("hy_v4_vl.modeling_hy_v4_vl", "HYV4VLExperts"): _clamped("swiglu_limit"),
        ("minimax_m3_vl.modeling_minimax_m3_vl", "MiniMaxM3VLExperts"): _clamped(
            "swiglu_limit", alpha="swiglu_alpha", up_offset=1.0
        ),
        (
            "openai_privacy_filter.modeling_openai_privacy_filter",
            "OpenAIPrivacyFilterExperts",
        ): _clamped("limit", alpha="alpha", up_offset=1.0),
    }.items()
}
# Gates that clamp what the activation gives, where ours clamps what goes in; without a limit they
# are the default gate.
_CLAMPED_AFTER = {
    (f"transformers.models.{module}", f"{name}._apply_gate")
    for module, name in (
        ("bailing_hybrid.modeling_bailing_hybrid", "BailingHybridExperts"),
        ("step3p7.modeling_step3p7", "Step3p7Experts"),
    )
}
_DEFAULT_GATE = ("transformers.integrations.moe", "_default_apply_gate")


def is_experts_module(module: Any) -> bool:
    """Whether transformers' decorator has marked ``module`` as selectable experts."""
    return hasattr(module, "is_concatenated") and hasattr(module, "has_gate")


def read_layout(module: Any) -> WeightLayout:
    """The weight layout of an experts module, from its flags alone.

    Args:
        module: an instance of a class decorated with ``@use_experts_implementation``.

    Example:
        gpt-oss sets ``is_concatenated=False, is_transposed=True``, which reads as
        ``WeightLayout(is_transposed=True, is_interleaved=True)``.
    """
    return WeightLayout(
        is_transposed=module.is_transposed,
        is_interleaved=module.has_gate and not module.is_concatenated,
        is_gated=module.has_gate,
    )


# torch.compile (2.13) cannot follow the names of functions: it calls this while tracing
@torch.compiler.assume_constant_result  # type: ignore[untyped-decorator]
def _find_activation(module: Any) -> Activation | None:
    """Our name for what the module computes between its projections, or ``None``."""
    if module.has_gate:
        gate = module._apply_gate
        name = (gate.__module__, gate.__qualname__)
        if name in _BY_GATE:
            return _BY_GATE[name](module)
        is_default = name == _DEFAULT_GATE or (name in _CLAMPED_AFTER and module.limit is None)
        if not is_default:
            return None
    function = module.act_fn
    return SWIGLU if function is F.silu else _BY_CLASS.get(type(function))


def own_activation(module: Any) -> Callable[[Tensor], Tensor]:
    """The module's own code between its two projections: ``[R, 2I]`` (``[R, I]``) to ``[R, I]``."""
    return module._apply_gate if module.has_gate else module.act_fn


def read_activation(module: Any) -> ActivationLike:
    """The activation of an experts module.

    Args:
        module: an instance of a class decorated with ``@use_experts_implementation``.

    Returns:
        An :class:`Activation` where the module's gate and function are known by name, else
        :func:`own_activation`, which ``functional.experts`` composes with two grouped GEMMs.
    """
    return _find_activation(module) or own_activation(module)
