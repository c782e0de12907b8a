"""experts as two custom ops and one autograd Function, the same for every backend.

Kept for backward: x, the pre-activation (unless ``save="x"``), the row maps, the gates and the
parameters. Work for gradients that nobody wants is skipped.
"""

import math
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from piper_kernels.autocast import without_autocast
from piper_kernels.config import Activation, WeightLayout
from piper_kernels.contracts import ExpertsNeeds, ExpertsWeights
from piper_kernels.functional.backend import load
from piper_kernels.functional.routing_metadata import maps_of, permutation_of
from piper_kernels.functional.transforms import (
    last_derivative,
    register_loop_over_batch,
)
from piper_kernels.permutation import Permutation

# What an op carries instead of ExpertsWeights, in this order.
#   tensors:   gate_up_proj, down_proj, gate_up_bias, down_bias
#   layout:    is_transposed, is_interleaved, is_gated
#   function:  the activation's
#   constants: alpha, limit (infinity for none), up_offset
# and `needs`: x, gates and the four tensors.


def _unpack(
    tensors: Sequence[Tensor | None],
    layout: Sequence[bool],
    function: str,
    constants: Sequence[float],
) -> ExpertsWeights:
    gate_up_proj, down_proj, gate_up_bias, down_bias = tensors
    assert gate_up_proj is not None, "the ops are called by run_experts only"
    assert down_proj is not None, "the ops are called by run_experts only"
    is_transposed, is_interleaved, is_gated = layout
    alpha, limit, up_offset = constants
    return ExpertsWeights(
        gate_up_proj=gate_up_proj,
        down_proj=down_proj,
        gate_up_bias=gate_up_bias,
        down_bias=down_bias,
        layout=WeightLayout(
            is_transposed=is_transposed, is_interleaved=is_interleaved, is_gated=is_gated
        ),
        activation=Activation(
            function=function,  # type: ignore[arg-type]  # checked by Activation
            alpha=alpha,
            limit=None if math.isinf(limit) else limit,
            up_offset=up_offset,
        ),
    )


def _unpack_needs(needs: Sequence[bool]) -> ExpertsNeeds:
    x, gates, gate_up_proj, down_proj, gate_up_bias, down_bias = needs
    return ExpertsNeeds(
        x=x,
        gates=gates,
        gate_up_proj=gate_up_proj,
        down_proj=down_proj,
        gate_up_bias=gate_up_bias,
        down_bias=down_bias,
    )


@torch.library.custom_op("piper::experts_forward", mutates_args=())
def _experts_forward(
    x: Tensor,
    gates: Tensor,
    maps: Sequence[Tensor],
    tensors: Sequence[Tensor | None],
    layout: Sequence[bool],
    function: str,
    constants: Sequence[float],
    needs_preact: bool,
    backend: str,
) -> tuple[Tensor, Tensor]:
    weights = _unpack(tensors, layout, function, constants)
    permutation = permutation_of(maps, weights.num_experts, gates.shape[1])
    with without_autocast(x.device):
        y, preact = load(backend, "experts").experts_forward(
            x, gates, permutation, weights, needs_preact=needs_preact
        )
    return y, x.new_empty(0) if preact is None else preact


@_experts_forward.register_fake
def _(
    x: Tensor,
    gates: Tensor,
    maps: Sequence[Tensor],
    tensors: Sequence[Tensor | None],
    layout: Sequence[bool],
    function: str,
    constants: Sequence[float],
    needs_preact: bool,
    backend: str,
) -> tuple[Tensor, Tensor]:
    y = x.new_empty(x.shape)
    if not needs_preact:
        return y, x.new_empty(0)
    weights = _unpack(tensors, layout, function, constants)
    return y, x.new_empty(gates.shape[0] * gates.shape[1], weights.preact_size)


Gradients = tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]


@torch.library.custom_op("piper::experts_backward", mutates_args=())
def _experts_backward(
    grad_y: Tensor,
    x: Tensor,
    gates: Tensor,
    maps: Sequence[Tensor],
    tensors: Sequence[Tensor | None],
    preact: Tensor,
    layout: Sequence[bool],
    function: str,
    constants: Sequence[float],
    needs: Sequence[bool],
    backend: str,
) -> Gradients:
    weights = _unpack(tensors, layout, function, constants)
    permutation = permutation_of(maps, weights.num_experts, gates.shape[1])
    kept = preact if preact.numel() else None
    with without_autocast(x.device):
        grads = load(backend, "experts").experts_backward(
            grad_y, x, gates, permutation, weights, kept, needs=_unpack_needs(needs)
        )
    return _without_none(
        x,
        grads.x,
        grads.gates,
        grads.gate_up_proj,
        grads.down_proj,
        grads.gate_up_bias,
        grads.down_bias,
    )


@_experts_backward.register_fake
def _(
    grad_y: Tensor,
    x: Tensor,
    gates: Tensor,
    maps: Sequence[Tensor],
    tensors: Sequence[Tensor | None],
    preact: Tensor,
    layout: Sequence[bool],
    function: str,
    constants: Sequence[float],
    needs: Sequence[bool],
    backend: str,
) -> Gradients:
    needs_x, needs_gates, *needs_tensors = needs
    return _without_none(
        x,
        x.new_empty(x.shape) if needs_x else None,
        gates.new_empty(gates.shape) if needs_gates else None,
        *(
            torch.empty_like(tensor) if need and tensor is not None else None
            for tensor, need in zip(tensors, needs_tensors, strict=True)
        ),
    )


def _without_none(x: Tensor, *grads: Tensor | None) -> Gradients:
    """An op cannot return ``None``: an empty tensor each stands for a gradient not wanted."""
    a, b, c, d, e, f = (x.new_empty(0) if grad is None else grad for grad in grads)
    return a, b, c, d, e, f


register_loop_over_batch(_experts_forward)
register_loop_over_batch(_experts_backward)
_experts_gradient = last_derivative("experts", _experts_backward)


class ExpertsFunction(torch.autograd.Function):
    """``(x, gates, *tensors, maps, layout, function, constants, needs_preact, backend) -> y``."""

    generate_vmap_rule = True

    @staticmethod
    def forward(
        x: Tensor,
        gates: Tensor,
        gate_up_proj: Tensor,
        down_proj: Tensor,
        gate_up_bias: Tensor | None,
        down_bias: Tensor | None,
        maps: list[Tensor],
        layout: list[bool],
        function: str,
        constants: list[float],
        needs_preact: bool,
        backend: str,
    ) -> tuple[Tensor, Tensor]:
        """Run the op."""
        tensors = [gate_up_proj, down_proj, gate_up_bias, down_bias]
        return _experts_forward(
            x, gates, maps, tensors, layout, function, constants, needs_preact, backend
        )

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
        """Keep what the backward reads."""
        maps, *weight_form, _, backend = inputs[6:]
        _, preact = output
        ctx.mark_non_differentiable(preact)
        ctx.set_materialize_grads(False)
        ctx.save_for_backward(*inputs[:6], preact, *maps)
        ctx.weight_form, ctx.backend = weight_form, backend

    @staticmethod
    def backward(ctx: Any, grad_y: Tensor | None, _: Tensor | None) -> tuple[Any, ...]:
        """Gradients of the tensors that want one."""
        needs = list(ctx.needs_input_grad[:6])
        num_others = 6
        # an undefined gradient stands for zeros
        if grad_y is None:
            return (None,) * (len(needs) + num_others)
        x, gates, gate_up_proj, down_proj, gate_up_bias, down_bias, preact, *maps = (
            ctx.saved_tensors
        )
        tensors = [gate_up_proj, down_proj, gate_up_bias, down_bias]
        found = _experts_gradient(
            grad_y, x, gates, maps, tensors, preact, *ctx.weight_form, needs, ctx.backend
        )
        grads = [grad if need else None for grad, need in zip(found, needs, strict=True)]
        return (*grads, *([None] * num_others))


def run_experts(
    x: Tensor,
    gates: Tensor,
    permutation: Permutation,
    weights: ExpertsWeights,
    *,
    needs_preact: bool,
    backend: str,
) -> Tensor:
    """Differentiable experts on a backend with the raw contract of ``piper_kernels.contracts``.

    Args:
        x: ``[T, H]`` in the weights' dtype.
        gates: ``[T, K]`` fp32 (fp64 with fp64 x).
        permutation: of the expert ids.
        weights: the experts.
        needs_preact: keep the pre-activation for the backward.
        backend: ``"cpu"`` or ``"triton"``.

    Returns:
        ``[T, H]``.
    """
    layout, activation = weights.layout, weights.activation
    tensors = [
        weights.gate_up_proj,
        weights.down_proj,
        weights.gate_up_bias,
        weights.down_bias,
    ]
    limit = math.inf if activation.limit is None else activation.limit
    rest = (
        [layout.is_transposed, layout.is_interleaved, layout.is_gated],
        activation.function,
        [activation.alpha, limit, activation.up_offset],
        needs_preact,
        backend,
    )
    maps = list(maps_of(permutation))
    if torch.is_grad_enabled():
        y, _ = ExpertsFunction.apply(x, gates, *tensors, maps, *rest)
    else:
        y, _ = _experts_forward(x, gates, maps, tensors, *rest)
    return y
