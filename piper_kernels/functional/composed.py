"""composed_experts: experts with a free choice of what happens between and after the GEMMs.

For model classes that bring an activation of their own, or a norm on each expert's output: gather,
grouped GEMM, the caller's function under ordinary autograd, grouped GEMM, the caller's second
function, weighted sum. Slower than ``experts`` and keeps more: rows, pre-activation, activation
and output, and whatever the callables keep.
"""

from collections.abc import Callable

from torch import Tensor

from piper_kernels.config import Backend, WeightLayout
from piper_kernels.errors import check_shape
from piper_kernels.functional.backend import choose_for
from piper_kernels.functional.checks import check_experts
from piper_kernels.functional.dtypes import choose_dtypes, gate_dtype
from piper_kernels.functional.grouped_gemm import grouped_gemm
from piper_kernels.functional.permute import permute
from piper_kernels.functional.routing_metadata import build_permutation
from piper_kernels.functional.unpermute import unpermute


def composed_experts(
    x: Tensor,
    expert_ids: Tensor,
    gates: Tensor,
    gate_up_proj: Tensor,
    down_proj: Tensor,
    apply_gate: Callable[[Tensor], Tensor],
    *,
    layout: WeightLayout | None = None,
    gate_up_bias: Tensor | None = None,
    down_bias: Tensor | None = None,
    post_expert: Callable[[Tensor], Tensor] | None = None,
    backend: Backend = "auto",
) -> Tensor:
    """``y[t] = sum_k gates[t,k] * post_expert(down_e(apply_gate(gate_up_e(x[t]))))``.

    Args:
        x: ``[T, H]``.
        expert_ids: ``[T, K]`` int64 or int32; ids ``>= E`` are sentinels. The callables see their
            rows as zeros; what they make of them is not used.
        gates: ``[T, K]``.
        gate_up_proj: ``[E, 2I, H]``, or as ``layout`` says.
        down_proj: ``[E, H, I]``, or as ``layout`` says.
        apply_gate: ``(preact [R, 2I]) -> [R, I]``, row by row.
        layout: how the weights are stored; default: Hugging Face's halves.
        gate_up_bias: ``[E, 2I]`` (``[E, I]`` ungated) or ``None``.
        down_bias: ``[E, H]`` or ``None``.
        post_expert: ``(out [R, H]) -> [R, H]``, row by row, before the gates; e.g. a norm.
        backend: of the GEMMs and moves: ``auto``, ``triton``, ``cpu`` or ``reference``.

    Returns:
        ``[T, H]``, in the dtype that ``experts`` would return.

    Raises:
        ShapeError: a shape does not fit, or a callable returned another shape.
        DtypeError: a dtype is not supported, or the weights' dtypes differ.
        DeviceError: two tensors lie on different devices.
        BackendError: the backend cannot run here.

    Example:
        >>> import torch
        >>> x, weight = torch.tensor([[2.0]]), torch.tensor([[[3.0]]])
        >>> composed_experts(x, torch.tensor([[0]]), torch.tensor([[0.5]]), weight, weight,
        ...                  torch.relu, layout=WeightLayout(is_gated=False))
        tensor([[9.]])
    """
    name = "composed_experts"
    layout = layout or WeightLayout()
    check_experts(
        name,
        x,
        expert_ids,
        gates,
        gate_up_proj,
        down_proj,
        gate_up_bias,
        down_bias,
        layout,
    )
    dtype, out_dtype = choose_dtypes(x, gate_up_proj)
    backend = choose_for(name, backend, x, dtype).backend
    permutation = build_permutation(expert_ids, gate_up_proj.shape[0], backend)
    offsets, num_rows = permutation.expert_offsets, permutation.num_rows
    rows = permute(x.to(dtype), permutation, backend=backend)
    preact = grouped_gemm(
        rows,
        gate_up_proj,
        offsets,
        bias=gate_up_bias,
        is_transposed=layout.is_transposed,
        backend=backend,
    )
    act = apply_gate(preact)
    size = down_proj.shape[1 if layout.is_transposed else 2]
    check_shape(name, "what apply_gate returns", act, ("R", "I"), (num_rows, size))
    out = grouped_gemm(
        act.to(dtype),
        down_proj,
        offsets,
        bias=down_bias,
        is_transposed=layout.is_transposed,
        backend=backend,
    )
    if post_expert is not None:
        out = post_expert(out)
        shape = (num_rows, x.shape[1])
        check_shape(name, "what post_expert returns", out, ("R", "H"), shape)
        out = out.to(dtype)
    y = unpermute(out, gates.to(gate_dtype(dtype)), permutation, backend=backend)
    return y.to(out_dtype)
