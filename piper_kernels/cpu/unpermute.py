"""unpermute: the gate-weighted sum of each token's K rows, back in token order."""

import torch
from torch import Tensor

from piper_kernels.cpu.gemm import wide_dtype
from piper_kernels.cpu.parallel import run_tasks
from piper_kernels.cpu.segments import read_segments, split_evenly
from piper_kernels.permutation import Permutation

# Elements of the gathered rows of one step: one fp32 temporary of this size stays in L2.
_CHUNK_ELEMENTS = 128 * 1024


def gather_sum(
    rows: Tensor, gates: Tensor | None, permutation: Permutation, num_valid: int
) -> Tensor:
    """``y[t] = sum_k gates[t, k] * rows[slot_to_row[t*K + k]]`` over valid rows.

    Nothing is scattered, so the order of each sum is fixed: ascending k, in at least fp32.

    Args:
        rows: ``[num_valid or more, H]``, any strides; rows from ``num_valid`` on are not read.
        gates: ``[T, K]`` in the wide dtype, or ``None`` for all ones.
        permutation: the maps.
        num_valid: number of valid rows.

    Returns:
        ``[T, H]``, contiguous, in the dtype of ``rows``.
    """
    num_tokens, top_k = permutation.num_tokens, permutation.top_k
    hidden_size = rows.shape[1]
    y = rows.new_empty(num_tokens, hidden_size)
    if num_valid == 0:
        return y.zero_()
    wide = wide_dtype(rows.dtype)
    slot_to_row = permutation.slot_to_row
    is_sentinel = None
    if num_valid < permutation.num_rows:
        is_sentinel = (slot_to_row >= num_valid)[:, None]
        slot_to_row = slot_to_row.clamp(max=num_valid - 1)

    def sum_tokens(tokens: slice, _: None) -> None:
        slots = slice(tokens.start * top_k, tokens.stop * top_k)
        terms = rows.index_select(0, slot_to_row[slots])
        if gates is not None:
            # promotes: bf16 rows times fp32 gates are fp32 terms
            terms = terms * gates[tokens].reshape(-1, 1)
        if is_sentinel is not None:
            terms.masked_fill_(is_sentinel[slots], 0)
        y[tokens] = terms.view(-1, top_k, hidden_size).sum(1, dtype=wide)

    step = max(1, _CHUNK_ELEMENTS // (top_k * hidden_size))
    run_tasks(split_evenly(num_tokens, step), sum_tokens)
    return y


def unpermute_forward(rows: Tensor, gates: Tensor, permutation: Permutation) -> Tensor:
    """``y[t] = sum_k gates[t, k] * rows[slot_to_row[t*K + k]]`` over valid rows, in ascending k.

    Args:
        rows: ``[R, H]``, any strides; sentinel rows may hold anything, NaN included.
        gates: ``[T, K]`` fp32 (fp64 with fp64 rows).
        permutation: built for the same T and K.

    Returns:
        ``[T, H]``, contiguous, in the dtype of ``rows``; summed in at least fp32, rounded once.
    """
    num_valid = read_segments(permutation.expert_offsets).num_valid
    return gather_sum(rows, gates, permutation, num_valid)


def unpermute_backward(
    grad_y: Tensor, rows: Tensor, gates: Tensor, permutation: Permutation
) -> tuple[Tensor, Tensor]:
    """Gradients of :func:`unpermute_forward`; sentinel rows and slots get exact zeros.

    Args:
        grad_y: ``[T, H]``, any strides.
        rows: ``[R, H]``, the forward's.
        gates: ``[T, K]``, the forward's.
        permutation: the forward's.

    Returns:
        ``(grad_rows [R, H] in the dtype of rows, grad_gates [T, K] in the dtype of gates)``.
    """
    num_valid = read_segments(permutation.expert_offsets).num_valid
    grad_rows = rows.new_empty(rows.shape)
    row_dots = gates.new_empty(num_valid)
    row_gates = gates.reshape(-1).index_select(0, permutation.row_to_slot[:num_valid])

    def spread(chunk: slice, _: None) -> None:
        gathered = grad_y.index_select(0, permutation.row_to_token[chunk]).to(gates.dtype)
        torch.sum(gathered * rows[chunk], dim=1, out=row_dots[chunk])
        torch.mul(gathered, row_gates[chunk, None], out=grad_rows[chunk])

    step = max(1, _CHUNK_ELEMENTS // max(grad_y.shape[1], 1))
    run_tasks(split_evenly(num_valid, step), spread)
    grad_rows[num_valid:].zero_()
    return grad_rows, rows_to_slots(row_dots, permutation)


def rows_to_slots(row_values: Tensor, permutation: Permutation) -> Tensor:
    """Carry one value per valid row back to ``[T, K]``; exact zeros at sentinel slots."""
    num_valid = row_values.shape[0]
    slots = row_values.new_empty(permutation.num_rows)
    slots[permutation.row_to_slot[:num_valid]] = row_values
    slots[permutation.row_to_slot[num_valid:]] = 0
    return slots.view(permutation.num_tokens, permutation.top_k)
