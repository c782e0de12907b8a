"""unpermute: the gate-weighted sum of each token's K rows, back in token order."""

import torch
from torch import Tensor

from piper_kernels.permutation import Permutation


def unpermute(rows: Tensor, gates: Tensor, permutation: Permutation) -> Tensor:
    """``y[t] = sum_k gates[t, k] * rows[slot_to_row[t*K + k]]`` over valid rows, in ascending k.

    The sum is taken in at least fp32 and rounded once.

    Args:
        rows: ``[R, H]``, any floating dtype. Sentinel rows may hold anything, NaN included.
        gates: ``[T, K]`` fp32 (fp64 with fp64 rows).
        permutation: built for the same T and K.

    Returns:
        ``[T, H]`` in the dtype of ``rows``.
    """
    wide = torch.promote_types(rows.dtype, torch.float32)
    slot_to_row = permutation.slot_to_row.long()
    is_valid = (slot_to_row < permutation.expert_offsets[-1]).view(gates.shape)
    slots = rows[slot_to_row].view(*gates.shape, rows.shape[-1]).to(wide)
    y = slots.new_zeros(gates.shape[0], slots.shape[-1])
    for k in range(permutation.top_k):
        term = gates[:, k, None].to(wide) * slots[:, k]
        y = y + torch.where(is_valid[:, k, None], term, term.new_zeros(()))
    return y.to(rows.dtype)
