"""grouped_gemm: one GEMM per expert over that expert's rows; and its weight gradient."""

import torch
from torch import Tensor

from piper_kernels.errors import check_shape


def _segments(expert_offsets: Tensor) -> list[tuple[int, int, int]]:
    """``(expert, first row, last row + 1)`` of every expert, empty ones included."""
    ends = expert_offsets.tolist()
    return [(e, ends[e], ends[e + 1]) for e in range(len(ends) - 1)]


def grouped_gemm(
    rows: Tensor,
    weight: Tensor,
    expert_offsets: Tensor,
    *,
    bias: Tensor | None = None,
    is_transposed: bool = False,
) -> Tensor:
    """``out[r] = rows[r] @ weight[e].T (+ bias[e])`` for every row r of expert e.

    Args:
        rows: ``[R, in]`` in expert-sorted order.
        weight: ``[E, out, in]``, or ``[E, in, out]`` if ``is_transposed``.
        expert_offsets: ``[E + 1]`` int32, exclusive.
        bias: ``[E, out]`` or ``None``.
        is_transposed: how ``weight`` is stored.

    Returns:
        ``[R, out]`` in the dtype of ``rows``; rows from ``expert_offsets[E]`` on are 0.

    Raises:
        ShapeError: ``expert_offsets`` is not ``[E + 1]``.
    """
    num_experts = weight.shape[0]
    check_shape(
        "grouped_gemm",
        "expert_offsets",
        expert_offsets,
        ("E + 1",),
        (num_experts + 1,),
        "Did you pass expert_counts? Build it with Permutation.from_expert_ids.",
    )
    out_size = weight.shape[2 if is_transposed else 1]
    pieces = []
    for e, start, end in _segments(expert_offsets):
        matrix = weight[e] if is_transposed else weight[e].T
        piece = rows[start:end] @ matrix
        pieces.append(piece if bias is None else piece + bias[e])
    num_valid = int(expert_offsets[-1])
    pieces.append(rows.new_zeros(rows.shape[0] - num_valid, out_size))
    return torch.cat(pieces)


def grouped_gemm_wgrad(
    grad_out: Tensor, rows: Tensor, expert_offsets: Tensor, *, is_transposed: bool = False
) -> Tensor:
    """``grad_weight[e] = grad_out[rows of e].T @ rows[rows of e]``; exact zeros for empty experts.

    Args:
        grad_out: ``[R, out]``.
        rows: ``[R, in]``.
        expert_offsets: ``[E + 1]`` int32, exclusive.
        is_transposed: return ``[E, in, out]`` instead of ``[E, out, in]``.

    Returns:
        The gradient in the dtype of ``rows``.
    """
    pieces = []
    for _, start, end in _segments(expert_offsets):
        left, right = grad_out[start:end], rows[start:end]
        pieces.append(right.T @ left if is_transposed else left.T @ right)
    return torch.stack(pieces)
