"""grouped_gemm: one GEMM per expert over that expert's rows; and its weight gradient."""

from typing import Any

import torch
from torch import Tensor

from piper_kernels.autocast import is_autocast_active, without_autocast
from piper_kernels.config import Backend
from piper_kernels.errors import check_dtype, check_same_device, check_shape
from piper_kernels.functional.backend import choose_for, load
from piper_kernels.functional.dtypes import (
    check_one_dtype,
    choose_dtypes,
)
from piper_kernels.functional.transforms import register_loop_over_batch
from piper_kernels.permutation import ID_DTYPES
from piper_kernels.reference import grouped_gemm as reference


@torch.library.custom_op("piper::grouped_gemm", mutates_args=())
def _grouped_gemm(
    rows: Tensor,
    weight: Tensor,
    expert_offsets: Tensor,
    bias: Tensor | None,
    is_transposed: bool,
    backend: str,
) -> Tensor:
    run = load(backend, "grouped_gemm").grouped_gemm
    with without_autocast(rows.device):
        return run(rows, weight, expert_offsets, bias=bias, is_transposed=is_transposed)


@_grouped_gemm.register_fake
def _(
    rows: Tensor,
    weight: Tensor,
    expert_offsets: Tensor,
    bias: Tensor | None,
    is_transposed: bool,
    backend: str,
) -> Tensor:
    return rows.new_empty(rows.shape[0], weight.shape[2 if is_transposed else 1])


@torch.library.custom_op("piper::grouped_gemm_wgrad", mutates_args=())
def _wgrad(
    grad_out: Tensor, rows: Tensor, expert_offsets: Tensor, is_transposed: bool, backend: str
) -> Tensor:
    run = load(backend, "grouped_gemm").grouped_gemm_wgrad
    with without_autocast(rows.device):
        return run(grad_out, rows, expert_offsets, is_transposed=is_transposed)


@_wgrad.register_fake
def _(
    grad_out: Tensor, rows: Tensor, expert_offsets: Tensor, is_transposed: bool, backend: str
) -> Tensor:
    sizes = (grad_out.shape[1], rows.shape[1])
    num_experts = expert_offsets.shape[0] - 1
    return rows.new_empty(num_experts, *(sizes[::-1] if is_transposed else sizes))


register_loop_over_batch(_grouped_gemm)
register_loop_over_batch(_wgrad)


class GroupedGemmFunction(torch.autograd.Function):
    """``(rows, weight, bias, expert_offsets, is_transposed, backend) -> out``."""

    generate_vmap_rule = True

    @staticmethod
    def forward(
        rows: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        expert_offsets: Tensor,
        is_transposed: bool,
        backend: str,
    ) -> Tensor:
        """Run the op."""
        return _grouped_gemm(rows, weight, expert_offsets, bias, is_transposed, backend)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
        """Keep what the backward reads."""
        rows, weight, _, expert_offsets, ctx.is_transposed, ctx.backend = inputs
        ctx.save_for_backward(rows, weight, expert_offsets)

    @staticmethod
    def backward(ctx: Any, grad_out: Tensor) -> tuple[Any, ...]:
        """Both factors' gradients are grouped GEMMs again, so they can be differentiated again."""
        rows, weight, expert_offsets = ctx.saved_tensors
        needs_rows, needs_weight, needs_bias = ctx.needs_input_grad[:3]
        is_transposed, backend = ctx.is_transposed, ctx.backend
        grad_rows = grad_weight = grad_bias = None
        if needs_rows:
            grad_rows = GroupedGemmFunction.apply(
                grad_out, weight, None, expert_offsets, not is_transposed, backend
            )
        if needs_weight:
            grad_weight = WgradFunction.apply(
                grad_out, rows, expert_offsets, is_transposed, backend
            )
        if needs_bias:
            # the bias is the weight of one more input that is always 1
            ones = torch.ones_like(rows[:, :1])
            grad_bias = WgradFunction.apply(grad_out, ones, expert_offsets, False, backend)
            grad_bias = grad_bias.squeeze(2)
        return grad_rows, grad_weight, grad_bias, None, None, None


class WgradFunction(torch.autograd.Function):
    """``(grad_out, rows, expert_offsets, is_transposed, backend) -> grad_weight``."""

    generate_vmap_rule = True

    @staticmethod
    def forward(
        grad_out: Tensor, rows: Tensor, expert_offsets: Tensor, is_transposed: bool, backend: str
    ) -> Tensor:
        """Run the op."""
        return _wgrad(grad_out, rows, expert_offsets, is_transposed, backend)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
        """Keep what the backward reads."""
        grad_out, rows, expert_offsets, ctx.is_transposed, ctx.backend = inputs
        ctx.save_for_backward(grad_out, rows, expert_offsets)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Any, ...]:
        """``grad_weight = grad_out.T @ rows`` is linear in both."""
        grad_out, rows, expert_offsets = ctx.saved_tensors
        needs_grad_out, needs_rows = ctx.needs_input_grad[:2]
        for_grad_out = for_rows = None
        if needs_grad_out:
            for_grad_out = GroupedGemmFunction.apply(
                rows, grad, None, expert_offsets, ctx.is_transposed, ctx.backend
            )
        if needs_rows:
            for_rows = GroupedGemmFunction.apply(
                grad_out, grad, None, expert_offsets, not ctx.is_transposed, ctx.backend
            )
        return for_grad_out, for_rows, None, None, None


def grouped_gemm(
    rows: Tensor,
    weight: Tensor,
    expert_offsets: Tensor,
    *,
    bias: Tensor | None = None,
    is_transposed: bool = False,
    backend: Backend = "auto",
) -> Tensor:
    """``out[r] = rows[r] @ weight[e].T (+ bias[e])`` for every row r of expert e.

    Computes in the weights' dtype and returns that of ``rows``; under autocast both are what
    ``F.linear`` uses.

    Args:
        rows: ``[R, in]`` in expert-sorted order, any strides.
        weight: ``[E, out, in]``, or ``[E, in, out]`` if ``is_transposed``; any strides.
        expert_offsets: ``[E + 1]`` int32, exclusive.
        bias: ``[E, out]`` or ``None``.
        is_transposed: how ``weight`` is stored.
        backend: ``auto``, ``triton``, ``cpu`` or ``reference``.

    Returns:
        ``[R, out]`` in the dtype of ``rows``; rows from ``expert_offsets[E]`` on are 0.

    Raises:
        ShapeError: a shape does not fit the others.
        DtypeError: weight and bias differ in dtype, or offsets are not integers.
        DeviceError: the tensors lie on different devices.
        BackendError: the backend cannot run here.

    Example:
        >>> rows, weight = torch.tensor([[2.0], [3.0]]), torch.tensor([[[5.0]], [[7.0]]])
        >>> grouped_gemm(rows, weight, torch.tensor([0, 1, 2], dtype=torch.int32))
        tensor([[10.],
                [21.]])
    """
    name = "grouped_gemm"
    check_shape(name, "weight", weight, ("E", "out", "in"), (None, None, None))
    num_experts, out_size, in_size = weight.shape
    if is_transposed:
        out_size, in_size = in_size, out_size
    check_shape(name, "rows", rows, ("R", "in"), (None, in_size), "in comes from weight.")
    if bias is not None:
        check_shape(name, "bias", bias, ("E", "out"), (num_experts, out_size))
    _check_offsets(name, expert_offsets, num_experts)
    tensors = {"rows": rows, "weight": weight, "bias": bias, "expert_offsets": expert_offsets}
    check_same_device(name, tensors)
    dtype, out_dtype = choose_dtypes(rows, weight)
    if not is_autocast_active(rows.device):
        check_one_dtype(name, {"weight": weight, "bias": bias})
    rows, weight = rows.to(dtype), weight.to(dtype)
    bias = None if bias is None else bias.to(dtype)
    running = choose_for(name, backend, rows, dtype).backend
    if running == "reference":
        with without_autocast(rows.device):
            out = reference.grouped_gemm(
                rows, weight, expert_offsets, bias=bias, is_transposed=is_transposed
            )
    else:
        out = GroupedGemmFunction.apply(rows, weight, bias, expert_offsets, is_transposed, running)
    return out.to(out_dtype)


def grouped_gemm_wgrad(
    grad_out: Tensor,
    rows: Tensor,
    expert_offsets: Tensor,
    *,
    is_transposed: bool = False,
    backend: Backend = "auto",
) -> Tensor:
    """``grad_weight[e] = grad_out[rows of e].T @ rows[rows of e]``; exact zeros for empty experts.

    Args:
        grad_out: ``[R, out]``, any strides.
        rows: ``[R, in]``, any strides, in the dtype of ``grad_out``.
        expert_offsets: ``[E + 1]`` int32, exclusive.
        is_transposed: return ``[E, in, out]`` instead of ``[E, out, in]``.
        backend: ``auto``, ``triton``, ``cpu`` or ``reference``.

    Returns:
        The gradient in the dtype of ``rows``.

    Raises:
        ShapeError: the numbers of rows differ, or offsets are not one-dimensional.
        DtypeError: the dtypes differ, or offsets are not integers.
        DeviceError: the tensors lie on different devices.
        BackendError: the backend cannot run here.

    Example:
        >>> grad_out, rows = torch.tensor([[2.0], [3.0]]), torch.tensor([[5.0], [7.0]])
        >>> grouped_gemm_wgrad(grad_out, rows, torch.tensor([0, 2, 2], dtype=torch.int32))
        tensor([[[31.]],
        <BLANKLINE>
                [[ 0.]]])
    """
    name = "grouped_gemm_wgrad"
    check_shape(name, "grad_out", grad_out, ("R", "out"), (None, None))
    check_shape(name, "rows", rows, ("R", "in"), (grad_out.shape[0], None))
    _check_offsets(name, expert_offsets, None)
    check_same_device(name, {"grad_out": grad_out, "rows": rows, "expert_offsets": expert_offsets})
    check_one_dtype(name, {"rows": rows, "grad_out": grad_out})
    running = choose_for(name, backend, rows, rows.dtype).backend
    if running == "reference":
        with without_autocast(rows.device):
            return reference.grouped_gemm_wgrad(
                grad_out, rows, expert_offsets, is_transposed=is_transposed
            )
    return WgradFunction.apply(grad_out, rows, expert_offsets, is_transposed, running)


def _check_offsets(function: str, expert_offsets: Tensor, num_experts: int | None) -> None:
    remedy = "Did you pass expert_counts? Build it with Permutation.from_expert_ids."
    size = None if num_experts is None else num_experts + 1
    check_shape(function, "expert_offsets", expert_offsets, ("E + 1",), (size,), remedy)
    check_dtype(function, "expert_offsets", expert_offsets, ID_DTYPES)
