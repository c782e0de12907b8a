"""experts: the whole expert computation of one layer, from routed tokens to their weighted sum."""

from collections.abc import Callable

import torch
from torch import Tensor

from piper_kernels.autocast import without_autocast
from piper_kernels.config import SWIGLU, Activation, Backend, Save, WeightLayout
from piper_kernels.contracts import ExpertsWeights
from piper_kernels.functional.backend import choose_for
from piper_kernels.functional.checks import check_experts, check_options
from piper_kernels.functional.composed import composed_experts
from piper_kernels.functional.dtypes import (
    choose_dtypes,
    gate_dtype,
)
from piper_kernels.functional.experts_op import run_experts
from piper_kernels.functional.routing_metadata import build_permutation
from piper_kernels.reference.experts import experts as reference_experts


def experts(
    x: Tensor,
    expert_ids: Tensor,
    gates: Tensor,
    gate_up_proj: Tensor,
    down_proj: Tensor,
    *,
    layout: WeightLayout | None = None,
    activation: Activation | Callable[[Tensor], Tensor] = SWIGLU,
    gate_up_bias: Tensor | None = None,
    down_bias: Tensor | None = None,
    save: Save = "preact",
    backend: Backend = "auto",
) -> Tensor:
    """``y[t] = sum_k gates[t,k] * down_e(act(gate_up_e(x[t])))``, e = ``expert_ids[t,k]``.

    Dtypes: the computation runs in the weights' dtype and y has x's. Under ``torch.autocast`` both
    are what ``F.linear`` would use; the weights are then cast at each call. Gates and their
    gradient are fp32 (fp64 with fp64 weights). Each gradient has the dtype of its input.

    Bit for bit reproducible: no sum depends on timing.

    Args:
        x: ``[T, H]`` fp32, bf16, fp16 or fp64, any strides.
        expert_ids: ``[T, K]`` int64 or int32; ids ``>= E`` are sentinels: they cost nothing,
            contribute nothing and get no gradient.
        gates: ``[T, K]``.
        gate_up_proj: ``[E, 2I, H]``, or as ``layout`` says; any strides.
        down_proj: ``[E, H, I]``, or as ``layout`` says; any strides.
        layout: how the weights are stored; default: Hugging Face's halves.
        activation: what happens in between. A callable ``(preact [R, 2I]) -> [R, I]`` runs as
            plain torch between two grouped GEMMs (see :func:`composed_experts`): slower, and more
            is kept.
        gate_up_bias: ``[E, 2I]`` (``[E, I]`` ungated; interleaved like the weight) or ``None``.
        down_bias: ``[E, H]`` or ``None``.
        save: ``"preact"`` keeps x and the pre-activation for the backward, ``"x"`` only x and
            repeats the first GEMM there.
        backend: ``auto``, ``triton``, ``cpu`` or ``reference``.

    Returns:
        ``[T, H]`` in x's dtype.

    Raises:
        ShapeError: a shape does not fit x, E, K or the layout.
        DtypeError: a dtype is not supported, or the weights' dtypes differ.
        DeviceError: two tensors lie on different devices.
        ConfigError: ``save``, ``backend`` or ``activation`` is impossible.
        RoutingError: an id is negative and lies on the CPU. On a GPU looking would synchronise, so
            its slot is dropped like a sentinel: no output, no gradient.
        BackendError: the backend cannot run here.

    Example:
        >>> x = torch.tensor([[2.0]])
        >>> weight = torch.tensor([[[3.0]], [[5.0]]])  # two experts, H = I = 1, ungated
        >>> experts(x, torch.tensor([[1]]), torch.tensor([[0.5]]), weight, weight,
        ...         layout=WeightLayout(is_gated=False), activation=Activation(function="relu"))
        tensor([[25.]])
    """
    name = "experts"
    layout = layout or WeightLayout()
    check_options(name, layout, activation, save)
    if not isinstance(activation, Activation):
        return composed_experts(
            x,
            expert_ids,
            gates,
            gate_up_proj,
            down_proj,
            activation,
            layout=layout,
            gate_up_bias=gate_up_bias,
            down_bias=down_bias,
            backend=backend,
        )
    tensors = (gate_up_proj, down_proj, gate_up_bias, down_bias)
    check_experts(name, x, expert_ids, gates, *tensors, layout)
    dtype, out_dtype = choose_dtypes(x, gate_up_proj)
    running = choose_for(name, backend, x, dtype).backend
    x, gates = x.to(dtype), gates.to(gate_dtype(dtype))
    gate_up_proj, down_proj = gate_up_proj.to(dtype), down_proj.to(dtype)
    gate_up_bias = None if gate_up_bias is None else gate_up_bias.to(dtype)
    down_bias = None if down_bias is None else down_bias.to(dtype)
    if running == "reference":
        with without_autocast(x.device):
            y = reference_experts(
                x,
                expert_ids,
                gates,
                gate_up_proj,
                down_proj,
                layout=layout,
                activation=activation,
                gate_up_bias=gate_up_bias,
                down_bias=down_bias,
            )
        return y.to(out_dtype)
    weights = ExpertsWeights(
        gate_up_proj=gate_up_proj,
        down_proj=down_proj,
        gate_up_bias=gate_up_bias,
        down_bias=down_bias,
        layout=layout,
        activation=activation,
    )
    permutation = build_permutation(expert_ids, weights.num_experts, running)
    needs_preact = save == "preact" and is_gradient_wanted(
        x, gates, gate_up_proj, down_proj, gate_up_bias, down_bias
    )
    y = run_experts(x, gates, permutation, weights, needs_preact=needs_preact, backend=running)
    return y.to(out_dtype)


def is_gradient_wanted(*tensors: Tensor | None) -> bool:
    """Whether a backward may follow."""
    return torch.is_grad_enabled() and any(t is not None and t.requires_grad for t in tensors)
