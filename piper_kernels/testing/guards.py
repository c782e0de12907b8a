"""Poisoned memory around a tensor."""

import torch
from torch import Tensor


def guard_with_nan(tensor: Tensor, band: int = 64) -> Tensor:
    """Copy a floating tensor into the middle of a NaN-filled buffer and return the view.

    A kernel that reads past either end then shows NaN in its result.

    Example:
        >>> guard_with_nan(torch.ones(2, 2), band=3).storage_offset()
        3
    """
    buffer = torch.full((tensor.numel() + 2 * band,), torch.nan, dtype=tensor.dtype)
    buffer = buffer.to(tensor.device)
    view = buffer[band : band + tensor.numel()].view(tensor.shape)
    view.copy_(tensor)
    return view
