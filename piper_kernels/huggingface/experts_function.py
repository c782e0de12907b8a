"""The experts function: what a transformers model calls when ``"piper"`` is selected."""

from typing import Any

from torch import Tensor

from piper_kernels.config import Save
from piper_kernels.functional.composed import composed_experts
from piper_kernels.functional.experts import experts
from piper_kernels.functional.explain import Explanation, explain_experts
from piper_kernels.huggingface.layouts import own_activation, read_activation, read_layout


def _read_weights(module: Any) -> dict[str, Any]:
    """The weights of an experts module, named as ``functional.experts`` takes them.

    Each parameter is read once: under a parametrization (PEFT) every read computes it.
    """
    first = "gate_up_proj" if module.has_gate else "up_proj"
    return {
        "gate_up_proj": getattr(module, first),
        "down_proj": module.down_proj,
        "gate_up_bias": getattr(module, f"{first}_bias") if module.has_bias else None,
        "down_bias": module.down_proj_bias if module.has_bias else None,
        "layout": read_layout(module),
    }


def _has_post_expert_norm(module: Any) -> bool:
    # the flag came after transformers 5.17
    return getattr(module, "has_post_expert_norm", False)


def experts_function(
    self: Any, hidden_states: Tensor, top_k_index: Tensor, top_k_weights: Tensor
) -> Tensor:
    """Run the experts of one layer of a transformers model.

    The module's flags give layout and activation, its parameters the weights: plain tensors, the
    local part of a DTensor, or what a parametrization makes of them (LoRA, whose cost is told in
    ``piper_kernels.huggingface.lora``). A module with a gate of its own that is not known by name,
    or with a norm on each expert's output, runs as two grouped GEMMs with the module's own code
    between and after them.

    Args:
        self: an instance of a class decorated with ``@use_experts_implementation``.
        hidden_states: ``[T, H]``, any strides; T may be 0 or 1.
        top_k_index: ``[T, K]`` integer. Ids ``>= self.num_experts`` mark slots whose expert another
            rank owns: output 0, no gradient to the input nor to the weight of that slot.
        top_k_weights: ``[T, K]``, any floating dtype; used in fp32 (fp64 with fp64 weights).

    Returns:
        ``[T, H]`` in the dtype of ``hidden_states``.

    Raises:
        ShapeError, DtypeError, DeviceError: as for :func:`piper_kernels.functional.experts`.

    Source: the contract is transformers 5.24, ``integrations/moe.py``.
    """
    routed = (hidden_states, top_k_index, top_k_weights)
    weights = _read_weights(self)
    if _has_post_expert_norm(self):
        y = composed_experts(
            *routed,
            apply_gate=own_activation(self),
            post_expert=self.post_expert_norm,
            **weights,
        )
    else:
        # what is kept for the backward: a runtime sets it, models know nothing of it
        save: Save = getattr(self, "experts_save", "preact")
        y = experts(*routed, activation=read_activation(self), save=save, **weights)
    return y.to(hidden_states.dtype)


def explain_experts_function(
    module: Any, hidden_states: Tensor, top_k_index: Tensor, top_k_weights: Tensor
) -> Explanation:
    """Say what :func:`experts_function` would do with these arguments, without doing it.

    Args:
        module: an experts module of a transformers model.
        hidden_states: ``[T, H]``.
        top_k_index: ``[T, K]``.
        top_k_weights: ``[T, K]``.

    Returns:
        Backend and why, the path (``composed`` is the slow one), dtypes, bytes kept for the
        backward; ``print`` it.

    Raises:
        PiperError: what the function itself would raise.
    """
    activation = read_activation(module)
    if _has_post_expert_norm(module):
        activation = own_activation(module)
    routed = (hidden_states, top_k_index, top_k_weights)
    return explain_experts(*routed, activation=activation, **_read_weights(module))
