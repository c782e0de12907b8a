"""grouped_gemm: one GEMM per expert over that expert's rows; and its weight gradient."""

from torch import Tensor

from piper_kernels.cpu.gemm import BLOCK_ROWS, matmul_into
from piper_kernels.cpu.parallel import run_tasks
from piper_kernels.cpu.segments import Segment, read_segments, split_evenly


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
        rows: ``[R, in]`` in expert-sorted order, any strides.
        weight: ``[E, out, in]``, or ``[E, in, out]`` if ``is_transposed``; any strides.
        expert_offsets: ``[E + 1]`` int32, exclusive.
        bias: ``[E, out]`` or ``None``.
        is_transposed: how ``weight`` is stored.

    Returns:
        ``[R, out]``, contiguous; rows from ``expert_offsets[E]`` on are 0.
    """
    segments = read_segments(expert_offsets)
    out = rows.new_empty(rows.shape[0], weight.shape[2 if is_transposed else 1])

    def multiply(block: Segment, _: None) -> None:
        expert, start, end = block
        matrix = weight[expert] if is_transposed else weight[expert].t()
        piece = out[start:end]
        matmul_into(piece, rows[start:end], matrix)
        if bias is not None:
            piece.add_(bias[expert])

    run_tasks(segments.blocks(BLOCK_ROWS), multiply)
    out[segments.num_valid :].zero_()
    return out


def grouped_gemm_wgrad(
    grad_out: Tensor, rows: Tensor, expert_offsets: Tensor, *, is_transposed: bool = False
) -> Tensor:
    """``grad_weight[e] = grad_out[rows of e].T @ rows[rows of e]``; exact zeros for empty experts.

    Args:
        grad_out: ``[R, out]``, any strides.
        rows: ``[R, in]``, any strides.
        expert_offsets: ``[E + 1]`` int32, exclusive.
        is_transposed: return ``[E, in, out]`` instead of ``[E, out, in]``.

    Returns:
        The gradient, contiguous, in the dtype of ``rows``.
    """
    segments = read_segments(expert_offsets)
    num_experts = expert_offsets.shape[0] - 1
    sizes = (grad_out.shape[1], rows.shape[1])
    grad = rows.new_empty(num_experts, *(sizes[::-1] if is_transposed else sizes))

    def multiply(piece: tuple[Segment, slice], _: None) -> None:
        (expert, start, end), part = piece
        left, right = grad_out[start:end], rows[start:end]
        if is_transposed:
            left, right = right, left
        matmul_into(grad[expert, part], left[:, part].t(), right)

    pieces = [
        (segment, part)
        for segment in segments.blocks(segments.num_valid)
        for part in split_evenly(grad.shape[1], BLOCK_ROWS)
    ]
    run_tasks(pieces, multiply)
    for expert in segments.empty:
        grad[expert].zero_()
    return grad
