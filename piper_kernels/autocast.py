"""Whether torch.autocast is on, and code that it must not touch."""

from contextlib import AbstractContextManager, nullcontext

import torch


def is_autocast_active(device: torch.device) -> bool:
    """Whether ``torch.autocast`` is on for this device.

    Example:
        >>> with torch.autocast("cpu", dtype=torch.bfloat16):
        ...     is_autocast_active(torch.device("cpu"))
        True
    """
    is_available = torch.amp.is_autocast_available(device.type)
    return is_available and torch.is_autocast_enabled(device.type)


def without_autocast(device: torch.device) -> AbstractContextManager[object]:
    """A context in which torch computes in the dtypes that it is given.

    Example:
        >>> a = torch.ones(2, 2)
        >>> with torch.autocast("cpu", dtype=torch.bfloat16), without_autocast(a.device):
        ...     (a @ a).dtype
        torch.float32
    """
    if is_autocast_active(device):
        return torch.autocast(device.type, enabled=False)
    return nullcontext()
