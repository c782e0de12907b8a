"""Which dtype an op computes in, and which it returns."""

import torch
from torch import Tensor

from piper_kernels.autocast import is_autocast_active
from piper_kernels.errors import DtypeError, instruction


def choose_dtypes(x: Tensor, weight: Tensor) -> tuple[torch.dtype, torch.dtype]:
    """``(compute dtype, output dtype)`` of an op with input ``x`` and weights ``weight``.

    Without autocast the op computes in the weights' dtype and returns x's. Under autocast both are
    what ``F.linear`` would use: autocast's, unless x or the weights are fp64.
    """
    is_double = torch.float64 in (x.dtype, weight.dtype)
    if is_autocast_active(x.device) and not is_double:
        dtype = torch.get_autocast_dtype(x.device.type)
        return dtype, dtype
    return weight.dtype, x.dtype


def gate_dtype(compute_dtype: torch.dtype) -> torch.dtype:
    """The dtype of gates and their gradient: fp32, or fp64 in an fp64 computation."""
    return torch.promote_types(compute_dtype, torch.float32)


def check_one_dtype(function: str, tensors: dict[str, Tensor | None]) -> None:
    """Raise unless all tensors (``None`` is skipped) have the dtype of the first.

    Raises:
        DtypeError: naming two tensors and both dtypes.
    """
    present = [(name, tensor) for name, tensor in tensors.items() if tensor is not None]
    first_name, first = present[0]
    for name, tensor in present[1:]:
        if tensor.dtype != first.dtype:
            want, have = (str(t.dtype).removeprefix("torch.") for t in (first, tensor))
            requirement = f"have the dtype of {first_name} ({want})"
            remedy = f"Cast one of them, e.g. {name}.to({first.dtype})."
            raise DtypeError(instruction(function, name, requirement, have, remedy))
