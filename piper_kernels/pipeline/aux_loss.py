"""Add a loss to the graph of a tensor that goes elsewhere.

Stages of a pipeline hand one tensor to the next; a balance loss on the way cannot be handed on. It
is hung on that tensor instead: the value stays, and whoever runs its backward also runs the loss's.
"""

from typing import Any

import torch
from torch import Tensor


def add_loss(output: Tensor, loss: Tensor) -> Tensor:
    """Return ``output``, whose backward also gives ``loss`` a gradient of 1.

    Args:
        output: any shape; its gradient must be asked for, or nothing happens.
        loss: scalar, already weighted.

    Returns:
        A tensor with the values of ``output``; no view, since torch's split backward refuses views.

    Example:
        >>> x = torch.ones(2, requires_grad=True)
        >>> add_loss(2 * x, (3 * x).sum()).backward(torch.ones(2))
        >>> x.grad.tolist()
        [5.0, 5.0]
    """
    return _AddLoss.apply(output, loss)


class _AddLoss(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, output: Tensor, loss: Tensor) -> Tensor:
        ctx.loss_dtype, ctx.loss_device = loss.dtype, loss.device
        return output.clone()

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, Tensor]:
        return grads[0], torch.ones((), dtype=ctx.loss_dtype, device=ctx.loss_device)
