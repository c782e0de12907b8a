"""Slices of a batch that a tensor-parallel group shares: each rank takes its own, then all get all.

Both are differentiable and each is the other's gradient, since every rank of the group computes the
same loss from the gathered rows.

Letters: T tokens of the shared batch, P ranks of the group.
"""

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from piper_kernels.dist.collectives import all_gather_single


def slice_bounds(num_rows: int, num_ranks: int, rank: int) -> tuple[int, int]:
    """First and end of a rank's slice; slices differ by less than a whole one, the last are short.

    Example:
        >>> [slice_bounds(5, 4, rank) for rank in range(4)]
        [(0, 2), (2, 4), (4, 5), (5, 5)]
    """
    each = -(-num_rows // num_ranks)
    return min(rank * each, num_rows), min((rank + 1) * each, num_rows)


def take_slice(rows: Tensor, group: dist.ProcessGroup) -> Tensor:
    """This rank's ``[t, ...]`` of the ``[T, ...]`` that all ranks of the group hold."""
    taken: Tensor = _TakeSlice.apply(rows, group)
    return taken


def gather_slices(rows: Tensor, num_rows: int, group: dist.ProcessGroup) -> Tensor:
    """``[T, ...]`` on every rank from the ranks' slices ``[t, ...]``.

    Args:
        rows: this rank's slice of :func:`slice_bounds`.
        num_rows: T.
        group: a tensor-parallel group.
    """
    gathered: Tensor = _GatherSlices.apply(rows, num_rows, group)
    return gathered


class _TakeSlice(torch.autograd.Function):
    """Forward takes a slice; backward gathers the slices' gradients."""

    @staticmethod
    def forward(ctx: Any, rows: Tensor, group: dist.ProcessGroup) -> Tensor:
        ctx.num_rows, ctx.group = len(rows), group
        first, end = slice_bounds(len(rows), group.size(), group.rank())
        return rows[first:end].clone()

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        return gather_slices(grads[0], ctx.num_rows, ctx.group), None


class _GatherSlices(torch.autograd.Function):
    """Forward gathers slices; backward takes this rank's slice of the gradient."""

    @staticmethod
    def forward(ctx: Any, rows: Tensor, num_rows: int, group: dist.ProcessGroup) -> Tensor:
        ctx.group = group
        _, each = slice_bounds(num_rows, group.size(), 0)
        # equally long on every rank; a copy, as collectives want their input
        padded = rows.new_zeros(each, *rows.shape[1:])
        padded[: len(rows)] = rows
        gathered = rows.new_empty(each * group.size(), *rows.shape[1:])
        if gathered.numel():
            all_gather_single(gathered, padded, group=group)
        return gathered[:num_rows].clone()

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        return take_slice(grads[0], ctx.group), None, None
