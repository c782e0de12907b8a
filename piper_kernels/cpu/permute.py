"""permute: gather each token's hidden state into its K rows; backward sums the K rows again."""

import torch
from torch import Tensor

from piper_kernels.cpu.segments import read_segments
from piper_kernels.cpu.unpermute import gather_sum
from piper_kernels.permutation import Permutation


def permute_forward(x: Tensor, permutation: Permutation) -> Tensor:
    """``rows[r] = x[row_to_token[r]]`` for valid rows, 0 for sentinel rows.

    Args:
        x: ``[T, H]``, any dtype and strides.
        permutation: built for the same T.

    Returns:
        ``[R, H]``, contiguous.
    """
    num_valid = read_segments(permutation.expert_offsets).num_valid
    rows = x.new_empty(permutation.num_rows, x.shape[1])
    torch.index_select(x, 0, permutation.row_to_token[:num_valid], out=rows[:num_valid])
    rows[num_valid:].zero_()
    return rows


def permute_backward(grad_rows: Tensor, permutation: Permutation) -> Tensor:
    """``grad_x[t]``: the sum of ``grad_rows`` over token t's valid rows, in ascending k.

    Args:
        grad_rows: ``[R, H]``, any strides; sentinel rows may hold anything.
        permutation: the one of the forward.

    Returns:
        ``[T, H]``, contiguous, in the dtype of ``grad_rows``; summed in at least fp32.
    """
    num_valid = read_segments(permutation.expert_offsets).num_valid
    return gather_sum(grad_rows, None, permutation, num_valid)
