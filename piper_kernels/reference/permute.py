"""permute: copy each token's hidden state to its K rows, in expert-sorted order."""

import torch
from torch import Tensor

from piper_kernels.permutation import Permutation


def permute(x: Tensor, permutation: Permutation) -> Tensor:
    """``rows[r] = x[row_to_token[r]]`` for valid rows, 0 for sentinel rows.

    Args:
        x: ``[T, H]``, any dtype.
        permutation: built for the same T.

    Returns:
        ``[R, H]`` in x's dtype.
    """
    rows = x[permutation.row_to_token.long()]
    is_valid = torch.arange(len(rows), device=x.device) < permutation.expert_offsets[-1]
    return torch.where(is_valid[:, None], rows, rows.new_zeros(()))
