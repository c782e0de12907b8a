"""The experts function: what a transformers model calls when ``"piper"`` is selected."""

from typing import Any

from torch import Tensor

from piper_kernels.functional.composed import composed_experts
from piper_kernels.functional.experts import experts
from piper_kernels.huggingface.layouts import own_activation, read_activation, read_layout


def experts_function(
    self: Any, hidden_states: Tensor, top_k_index: Tensor, top_k_weights: Tensor
) -> Tensor:
    """Run the experts of one layer of a transformers model.

    The module's flags give layout and activation, its parameters the weights: plain tensors, the
    local part of a DTensor, or whatever a parametrization makes of them (PEFT's LoRA on
    ``target_parameters``: the adapted weight ``W + s * B A`` of all experts is then made for each
    call and lives until the backward; docs/huggingface.md has the cost). Modules with a gate of
    their own or a norm on each expert's output run as two grouped GEMMs with the module's own code
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
    first = "gate_up_proj" if self.has_gate else "up_proj"
    # each parameter is read once: under a parametrization every read computes it
    weights = getattr(self, first), self.down_proj
    biases = (
        (getattr(self, f"{first}_bias"), self.down_proj_bias) if self.has_bias else (None, None)
    )
    # the flag came after 5.17
    if getattr(self, "has_post_expert_norm", False):
        y = composed_experts(
            hidden_states,
            top_k_index,
            top_k_weights,
            *weights,
            own_activation(self),
            layout=read_layout(self),
            gate_up_bias=biases[0],
            down_bias=biases[1],
            post_expert=self.post_expert_norm,
        )
    else:
        y = experts(
            hidden_states,
            top_k_index,
            top_k_weights,
            *weights,
            layout=read_layout(self),
            activation=read_activation(self),
            gate_up_bias=biases[0],
            down_bias=biases[1],
        )
    return y.to(hidden_states.dtype)
