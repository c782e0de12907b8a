"""unpermute: the gate-weighted sum of each token's K rows, back in token order.

::

    y[t] = sum_k gates[t, k] * rows[slot_to_row[t*K + k]]        over valid rows, ascending k
    grad_rows[r] = gates[slot] * grad_y[token]                    0 for sentinel rows
    grad_gates[slot] = rows[r] . grad_y[token]                    0 for sentinel slots

A gather, not a scatter: no two programs write one address, so no atomics and equal bits each run.
Letters: T num_tokens, H hidden_size, K top_k, R = T*K num_rows.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from piper_kernels.permutation import Permutation
from piper_kernels.triton.launch import launch, next_power_of_2
from piper_kernels.triton.tiles import are_rows_aligned


@triton.jit(do_not_specialize=["num_tokens"])
def _sum_over_rows_kernel(
    y_ptr, rows_ptr, gates_ptr, slot_to_row_ptr, expert_offsets_ptr,
    num_tokens, num_experts, hidden, top_k,
    stride_rows_r, stride_rows_h, stride_gates_t, stride_gates_k,
    HAS_GATES: tl.constexpr, BLOCK_T: tl.constexpr, BLOCK_H: tl.constexpr,
):  # fmt: skip
    """Program (i, j) sums one tile. Example: rows [[1], [2]] of one token, gates [.5, .25]: 1."""
    tokens = (tl.program_id(0) * BLOCK_T + tl.arange(0, BLOCK_T)).to(tl.int64)
    cols = (tl.program_id(1) * BLOCK_H + tl.arange(0, BLOCK_H)).to(tl.int64)
    is_token = tokens < num_tokens
    is_col = cols < hidden
    num_valid = tl.load(expert_offsets_ptr + num_experts)
    total = tl.zeros((BLOCK_T, BLOCK_H), tl.float32)
    for k in range(top_k):
        row = tl.load(slot_to_row_ptr + tokens * top_k + k, mask=is_token, other=0)
        is_valid = is_token & (row < num_valid)
        row_ptrs = rows_ptr + row.to(tl.int64)[:, None] * stride_rows_r
        row_ptrs += cols[None, :] * stride_rows_h
        value = tl.load(row_ptrs, mask=is_valid[:, None] & is_col[None, :], other=0.0)
        value = value.to(tl.float32)
        if HAS_GATES:
            gate_ptrs = gates_ptr + tokens * stride_gates_t + k * stride_gates_k
            value *= tl.load(gate_ptrs, mask=is_valid, other=0.0)[:, None]
        total += value
    y_ptrs = y_ptr + tokens[:, None] * hidden + cols[None, :]
    tl.store(y_ptrs, total.to(y_ptr.dtype.element_ty), mask=is_token[:, None] & is_col[None, :])


def sum_over_rows(
    rows: Tensor, gates: Tensor | None, permutation: Permutation, *, block_tokens: int
) -> Tensor:
    """The sum of each token's valid rows in fp32, weighted if gates are given; rounded once."""
    num_tokens, hidden = permutation.num_tokens, rows.shape[1]
    y = rows.new_empty(num_tokens, hidden)
    block_h = min(256, next_power_of_2(hidden))
    has_wide_loads = are_rows_aligned(hidden, element_bytes=rows.element_size())
    launch(
        _sum_over_rows_kernel,
        (triton.cdiv(num_tokens, block_tokens), triton.cdiv(hidden, block_h)),
        rows.device,
        y_ptr=y,
        rows_ptr=rows,
        gates_ptr=gates,
        slot_to_row_ptr=permutation.slot_to_row,
        expert_offsets_ptr=permutation.expert_offsets,
        num_tokens=num_tokens,
        num_experts=permutation.num_experts,
        hidden=hidden,
        top_k=permutation.top_k,
        stride_rows_r=rows.stride(0),
        stride_rows_h=rows.stride(1),
        stride_gates_t=0 if gates is None else gates.stride(0),
        stride_gates_k=0 if gates is None else gates.stride(1),
        HAS_GATES=gates is not None,
        BLOCK_T=block_tokens,
        BLOCK_H=block_h,
        # each element with an address of its own takes registers: four warps would spill
        num_warps=4 if has_wide_loads else 8,
    )
    return y


def unpermute_forward(
    rows: Tensor, gates: Tensor, permutation: Permutation, *, block_tokens: int = 8
) -> Tensor:
    """``y[t] = sum_k gates[t, k] * rows[slot_to_row[t*K + k]]`` over valid rows, ascending k.

    Args:
        rows: ``[R, H]`` bf16, fp16 or fp32, any strides. Sentinel rows may hold anything.
        gates: ``[T, K]`` fp32, any strides.
        permutation: built for the same T and K.
        block_tokens: tokens of a tile.

    Returns:
        ``[T, H]`` in the dtype of ``rows``, summed in fp32 and rounded once.

    Example:
        One token, K = 2, rows [[1], [2]], gates [[0.5, 0.25]]: [[1.0]].
    """
    return sum_over_rows(rows, gates, permutation, block_tokens=block_tokens)


@triton.jit(do_not_specialize=["num_rows"])
def _unpermute_backward_kernel(
    grad_rows_ptr, grad_gates_ptr, grad_y_ptr, rows_ptr, gates_ptr,
    row_to_slot_ptr, expert_offsets_ptr, num_rows, num_experts, hidden, top_k,
    stride_gy_t, stride_gy_h, stride_rows_r, stride_rows_h,
    BLOCK_R: tl.constexpr, BLOCK_H: tl.constexpr,
):  # fmt: skip
    """Program i computes BLOCK_R rows' gradients and their gates'.

    Example: row [2], gate 0.5, grad_y [3]: grad_rows [1.5], grad_gates 6.
    """
    rows = (tl.program_id(0) * BLOCK_R + tl.arange(0, BLOCK_R)).to(tl.int64)
    is_row = rows < num_rows
    is_valid = rows < tl.load(expert_offsets_ptr + num_experts)
    slots = tl.load(row_to_slot_ptr + rows, mask=is_row, other=0).to(tl.int64)
    gates = tl.load(gates_ptr + slots, mask=is_valid, other=0.0)
    grad_y_ptrs = grad_y_ptr + (slots // top_k)[:, None] * stride_gy_t
    row_ptrs = rows_ptr + rows[:, None] * stride_rows_r
    grad_gates = tl.zeros((BLOCK_R,), tl.float32)
    for start in range(0, hidden, BLOCK_H):
        cols = (start + tl.arange(0, BLOCK_H)).to(tl.int64)
        is_col = (cols < hidden)[None, :]
        mask = is_valid[:, None] & is_col
        grad_y = tl.load(grad_y_ptrs + cols[None, :] * stride_gy_h, mask=mask, other=0.0)
        grad_y = grad_y.to(tl.float32)
        value = tl.load(row_ptrs + cols[None, :] * stride_rows_h, mask=mask, other=0.0)
        grad_gates += tl.sum(grad_y * value.to(tl.float32), 1)
        grad_row_ptrs = grad_rows_ptr + rows[:, None] * hidden + cols[None, :]
        grad_row = (gates[:, None] * grad_y).to(grad_rows_ptr.dtype.element_ty)
        tl.store(grad_row_ptrs, grad_row, mask=is_row[:, None] & is_col)
    tl.store(grad_gates_ptr + slots, grad_gates, mask=is_row)


def unpermute_backward(
    grad_y: Tensor, rows: Tensor, gates: Tensor, permutation: Permutation, *, block_rows: int = 16
) -> tuple[Tensor, Tensor]:
    """Gradients of :func:`unpermute_forward`.

    Args:
        grad_y: ``[T, H]``, any strides (0 too).
        rows: ``[R, H]``, of the forward.
        gates: ``[T, K]`` fp32, of the forward.
        permutation: of the forward.
        block_rows: rows of a tile.

    Returns:
        ``(grad_rows [R, H] in the dtype of rows, grad_gates [T, K] fp32)``; 0 at sentinels.

    Example:
        One row [2], gate 0.5, grad_y [3]: grad_rows [1.5], grad_gates [6.0].
    """
    num_rows, hidden = rows.shape
    grad_rows = rows.new_empty(num_rows, hidden)
    grad_gates = torch.empty(gates.shape, dtype=torch.float32, device=rows.device)
    launch(
        _unpermute_backward_kernel,
        (triton.cdiv(num_rows, block_rows),),
        rows.device,
        grad_rows_ptr=grad_rows,
        grad_gates_ptr=grad_gates,
        grad_y_ptr=grad_y,
        rows_ptr=rows,
        gates_ptr=gates.contiguous(),
        row_to_slot_ptr=permutation.row_to_slot,
        expert_offsets_ptr=permutation.expert_offsets,
        num_rows=num_rows,
        num_experts=permutation.num_experts,
        hidden=hidden,
        top_k=permutation.top_k,
        stride_gy_t=grad_y.stride(0),
        stride_gy_h=grad_y.stride(1),
        stride_rows_r=rows.stride(0),
        stride_rows_h=rows.stride(1),
        BLOCK_R=block_rows,
        BLOCK_H=min(256, next_power_of_2(hidden)),
    )
    return grad_rows, grad_gates
