"""permute: copy each token's hidden state to its K rows, in expert-sorted order.

::

    rows[r] = x[row_to_token[r]]      for valid rows, else 0
    grad_x[t] = sum_k grad_rows[slot_to_row[t*K + k]]

Letters: T num_tokens, H hidden_size, K top_k, R = T*K num_rows.
"""

import triton
import triton.language as tl
from torch import Tensor

from piper_kernels.permutation import Permutation
from piper_kernels.triton.launch import launch, next_power_of_2
from piper_kernels.triton.unpermute import sum_over_rows


@triton.jit(do_not_specialize=["num_rows"])
def _permute_kernel(
    rows_ptr, x_ptr, row_to_token_ptr, expert_offsets_ptr,
    num_rows, num_experts, hidden, stride_x_t, stride_x_h,
    BLOCK_R: tl.constexpr, BLOCK_H: tl.constexpr,
):  # fmt: skip
    """Program (i, j) copies one tile. Example: x [[5], [7]], row_to_token [1, 0]: [[7], [5]]."""
    rows = tl.program_id(0) * BLOCK_R + tl.arange(0, BLOCK_R)
    cols = (tl.program_id(1) * BLOCK_H + tl.arange(0, BLOCK_H)).to(tl.int64)
    is_valid = rows < tl.load(expert_offsets_ptr + num_experts)
    tokens = tl.load(row_to_token_ptr + rows, mask=is_valid, other=0).to(tl.int64)
    is_col = cols < hidden
    x_ptrs = x_ptr + tokens[:, None] * stride_x_t + cols[None, :] * stride_x_h
    x = tl.load(x_ptrs, mask=is_valid[:, None] & is_col[None, :], other=0.0)
    row_ptrs = rows_ptr + rows.to(tl.int64)[:, None] * hidden + cols[None, :]
    tl.store(row_ptrs, x, mask=(rows < num_rows)[:, None] & is_col[None, :])


def permute_forward(x: Tensor, permutation: Permutation, *, block_rows: int = 16) -> Tensor:
    """``rows[r] = x[row_to_token[r]]`` for valid rows, 0 for sentinel rows.

    Args:
        x: ``[T, H]`` bf16, fp16 or fp32, any strides.
        permutation: built for the same T.
        block_rows: rows of a tile.

    Returns:
        ``[R, H]`` in x's dtype.

    Example:
        x [[5], [7]], ids [[1], [0]]: [[7], [5]].
    """
    hidden = x.shape[1]
    rows = x.new_empty(permutation.num_rows, hidden)
    block_h = min(256, next_power_of_2(hidden))
    launch(
        _permute_kernel,
        (triton.cdiv(permutation.num_rows, block_rows), triton.cdiv(hidden, block_h)),
        x.device,
        rows_ptr=rows,
        x_ptr=x,
        row_to_token_ptr=permutation.row_to_token,
        expert_offsets_ptr=permutation.expert_offsets,
        num_rows=permutation.num_rows,
        num_experts=permutation.num_experts,
        hidden=hidden,
        stride_x_t=x.stride(0),
        stride_x_h=x.stride(1),
        BLOCK_R=block_rows,
        BLOCK_H=block_h,
    )
    return rows


def permute_backward(
    grad_rows: Tensor, permutation: Permutation, *, block_tokens: int = 8
) -> Tensor:
    """``grad_x[t] = sum_k grad_rows[slot_to_row[t*K + k]]`` over valid rows, in fp32.

    Args:
        grad_rows: ``[R, H]``, any strides; sentinel rows may hold anything.
        permutation: of the forward.
        block_tokens: tokens of a tile.

    Returns:
        ``[T, H]`` in the dtype of ``grad_rows``.
    """
    return sum_over_rows(grad_rows, None, permutation, block_tokens=block_tokens)
