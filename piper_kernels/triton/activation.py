"""activation: the device functions of every activation, and a kernel that only applies them.

Gated:    ``a = (clamp(up, -limit, limit) + up_offset) * f(clamp(gate, max=limit))``
Ungated:  ``a = f(up)``

All arithmetic is fp32. Letters: R num_rows, I intermediate_size.
"""

from typing import Any

import triton
import triton.language as tl
from torch import Tensor

from piper_kernels.config import Activation, WeightLayout
from piper_kernels.permutation import Permutation
from piper_kernels.triton.launch import launch, next_power_of_2

# of a tile; twice as many spill where each element of fp16 has an address of its own
_ELEMENTS = 2048


@triton.jit
def apply_function(z, FUNCTION: tl.constexpr, ALPHA: tl.constexpr):
    """``f(z)``; a NaN stays a NaN."""
    if FUNCTION == "silu":
        return z * tl.sigmoid(ALPHA * z)
    elif FUNCTION == "gelu":
        return z * (0.5 * (1.0 + tl.erf(z * 0.7071067811865476)))
    elif FUNCTION == "gelu_tanh":
        return z * tl.sigmoid(1.5957691216057308 * (z + 0.044715 * z * z * z))
    elif FUNCTION == "relu":
        return tl.where(z <= 0.0, 0.0, z)
    elif FUNCTION == "relu2":
        return tl.where(z <= 0.0, 0.0, z * z)
    else:
        tl.static_assert(FUNCTION == "identity")
        return z


@triton.jit
def function_grad(z, FUNCTION: tl.constexpr, ALPHA: tl.constexpr):
    """``f'(z)``; 0 at the kink of relu, as in torch."""
    if FUNCTION == "silu":
        s = tl.sigmoid(ALPHA * z)
        return s * (1.0 + ALPHA * z * (1.0 - s))
    elif FUNCTION == "gelu":
        density = 0.3989422804014327 * tl.exp(-0.5 * z * z)
        return 0.5 * (1.0 + tl.erf(z * 0.7071067811865476)) + z * density
    elif FUNCTION == "gelu_tanh":
        # 0.5 (1 + tanh(u)) = sigmoid(2 u)
        s = tl.sigmoid(1.5957691216057308 * (z + 0.044715 * z * z * z))
        return s + z * s * (1.0 - s) * 1.5957691216057308 * (1.0 + 0.134145 * z * z)
    elif FUNCTION == "relu":
        return tl.where(z > 0.0, 1.0, 0.0)
    elif FUNCTION == "relu2":
        return tl.where(z > 0.0, 2.0 * z, 0.0)
    else:
        tl.static_assert(FUNCTION == "identity")
        return tl.full(z.shape, 1.0, tl.float32)


@triton.jit
def gated_value(
    gate, up, FUNCTION: tl.constexpr, ALPHA: tl.constexpr, LIMIT: tl.constexpr,
    UP_OFFSET: tl.constexpr,
):  # fmt: skip
    """The activation of a gated layer."""
    if LIMIT is not None:
        gate = tl.where(gate > LIMIT, LIMIT, gate)
        up = tl.where(up > LIMIT, LIMIT, tl.where(up < -LIMIT, -LIMIT, up))
    return (up + UP_OFFSET) * apply_function(gate, FUNCTION, ALPHA)


@triton.jit
def gated_grads(
    gate, up, grad, FUNCTION: tl.constexpr, ALPHA: tl.constexpr, LIMIT: tl.constexpr,
    UP_OFFSET: tl.constexpr,
):  # fmt: skip
    """``(grad_gate, grad_up)`` for ``grad`` of the activation; a clamp passes its very bound."""
    # the raw values stay live rather than masks of them, which would take a register an element
    clamped_gate = gate
    clamped_up = up
    if LIMIT is not None:
        clamped_gate = tl.where(gate > LIMIT, LIMIT, gate)
        clamped_up = tl.where(up > LIMIT, LIMIT, tl.where(up < -LIMIT, -LIMIT, up))
    grad_gate = grad * (clamped_up + UP_OFFSET) * function_grad(clamped_gate, FUNCTION, ALPHA)
    grad_up = grad * apply_function(clamped_gate, FUNCTION, ALPHA)
    if LIMIT is not None:
        grad_gate = tl.where(gate <= LIMIT, grad_gate, 0.0)
        grad_up = tl.where(tl.abs(up) <= LIMIT, grad_up, 0.0)
    return grad_gate, grad_up


def activation_arguments(activation: Activation, layout: WeightLayout) -> dict[str, Any]:
    """The constexpr arguments that every kernel with an activation takes."""
    return {
        "FUNCTION": activation.function,
        "ALPHA": activation.alpha,
        "LIMIT": activation.limit,
        "UP_OFFSET": activation.up_offset,
        "IS_GATED": layout.is_gated,
        "IS_INTERLEAVED": layout.is_interleaved,
    }


@triton.jit
def _activation_kernel(
    act_ptr, preact_ptr, gates_ptr, row_to_slot_ptr, expert_offsets_ptr, num_experts, intermediate,
    FUNCTION: tl.constexpr, ALPHA: tl.constexpr, LIMIT: tl.constexpr, UP_OFFSET: tl.constexpr,
    IS_GATED: tl.constexpr, IS_INTERLEAVED: tl.constexpr, HAS_GATES: tl.constexpr,
    BLOCK_R: tl.constexpr, BLOCK_N: tl.constexpr,
):  # fmt: skip
    """Program (i, j) computes one tile of the activation, times the row's gate.

    Example: preact row [1, 2] of a gated relu layer with gate 0.5: 0.5 * 2 * relu(1) = 1.
    """
    rows = tl.program_id(0) * BLOCK_R + tl.arange(0, BLOCK_R)
    cols = tl.program_id(1) * BLOCK_N + tl.arange(0, BLOCK_N)
    is_row = rows < tl.load(expert_offsets_ptr + num_experts)
    mask = is_row[:, None] & (cols < intermediate)[None, :]
    rows = rows.to(tl.int64)
    if IS_GATED:
        base = preact_ptr + rows[:, None] * (2 * intermediate)
        if IS_INTERLEAVED:
            gate_ptrs = base + 2 * cols[None, :]
            up_ptrs = gate_ptrs + 1
        else:
            gate_ptrs = base + cols[None, :]
            up_ptrs = gate_ptrs + intermediate
        gate = tl.load(gate_ptrs, mask=mask, other=0.0).to(tl.float32)
        up = tl.load(up_ptrs, mask=mask, other=0.0).to(tl.float32)
        act = gated_value(gate, up, FUNCTION, ALPHA, LIMIT, UP_OFFSET)
    else:
        up_ptrs = preact_ptr + rows[:, None] * intermediate + cols[None, :]
        up = tl.load(up_ptrs, mask=mask, other=0.0).to(tl.float32)
        act = apply_function(up, FUNCTION, ALPHA)
    if HAS_GATES:
        slots = tl.load(row_to_slot_ptr + rows, mask=is_row, other=0)
        act *= tl.load(gates_ptr + slots, mask=is_row, other=0.0)[:, None]
    act_ptrs = act_ptr + rows[:, None] * intermediate + cols[None, :]
    tl.store(act_ptrs, act.to(act_ptr.dtype.element_ty), mask=mask)


def activation_forward(
    preact: Tensor,
    permutation: Permutation,
    activation: Activation,
    layout: WeightLayout,
    *,
    gates: Tensor | None = None,
) -> Tensor:
    """Apply the activation to all valid rows, and scale each row by its gate if given.

    Args:
        preact: ``[R, 2I]`` (``[R, I]`` ungated), contiguous.
        permutation: whose rows these are.
        activation: the function and its constants.
        layout: gated or not, halves or interleaved.
        gates: ``[T, K]`` fp32, contiguous, or ``None``.

    Returns:
        ``[R, I]`` in preact's dtype; sentinel rows are not written.

    Example:
        preact [[1, 2]], relu, gate 0.5: [[1]].
    """
    num_rows, width = preact.shape
    intermediate = width // 2 if layout.is_gated else width
    act = preact.new_empty(num_rows, intermediate)
    block_n = min(256, next_power_of_2(intermediate))
    block_r = _ELEMENTS // block_n
    launch(
        _activation_kernel,
        (triton.cdiv(num_rows, block_r), triton.cdiv(intermediate, block_n)),
        preact.device,
        act_ptr=act,
        preact_ptr=preact,
        gates_ptr=gates,
        row_to_slot_ptr=permutation.row_to_slot,
        expert_offsets_ptr=permutation.expert_offsets,
        num_experts=permutation.num_experts,
        intermediate=intermediate,
        **activation_arguments(activation, layout),
        HAS_GATES=gates is not None,
        BLOCK_R=block_r,
        BLOCK_N=block_n,
    )
    return act
