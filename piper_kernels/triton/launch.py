"""Launching kernels: which device, interpreted or compiled, and what a dtype asks of ``tl.dot``."""

from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from typing import Any

import torch
import triton
from torch import Tensor
from triton.runtime.interpreter import InterpretedFunction

from piper_kernels.errors import check_dtype, check_same_device
from piper_kernels.triton.device_traits import traits_of
from piper_kernels.triton.tiles import TileConfig

FLOAT_DTYPES = (torch.bfloat16, torch.float16, torch.float32)


@dataclass(frozen=True, slots=True, eq=False)
class Launch:
    """One launch: the kernel and its arguments by name, options of the compiler included."""

    kernel: Any
    arguments: dict[str, Any]


_record: ContextVar[list[Launch] | None] = ContextVar("_record", default=None)


@contextmanager
def recorded_launches() -> Iterator[list[Launch]]:
    """Collect every launch made inside, in order.

    With tensors on the device ``"meta"`` nothing runs, so that what a layer would launch can be
    known, and compiled, without a GPU.
    """
    found: list[Launch] = []
    token = _record.set(found)
    try:
        yield found
    finally:
        _record.reset(token)


def launch(kernel: Any, grid: tuple[int, ...], device: torch.device, **arguments: Any) -> None:
    """Run ``kernel`` on ``device``, whichever device is current; an empty grid runs nothing."""
    if 0 in grid:
        return
    # said aloud because the default differs between Triton versions
    arguments.setdefault("enable_fp_fusion", True)
    record = _record.get()
    if record is not None:
        record.append(Launch(kernel, arguments))
    if device.type == "meta":
        return
    if device.type == "cuda":
        with torch.cuda.device(device):
            kernel[grid](**arguments)
    else:
        kernel[grid](**arguments)


def is_interpreted(kernel: Any) -> bool:
    """Whether ``kernel`` runs in Triton's interpreter (``TRITON_INTERPRET=1`` at its import)."""
    return isinstance(kernel, InterpretedFunction)


def is_hip() -> bool:
    """Whether this torch drives AMD GPUs."""
    return torch.version.hip is not None


def dot_arguments(kernel: Any, operand: Tensor, tiles: TileConfig) -> dict[str, Any]:
    """What every kernel with a ``tl.dot`` takes besides its operands, of which one is given.

    The interpreter multiplies the bits of bf16 (triton-lang/triton#11584), so there operands are
    upcast. fp32 is multiplied in fp32 unless torch itself may use TF32 and the device has it.
    """
    use_tf32 = (
        operand.dtype == torch.float32
        # the new name of allow_tf32, which raises once anybody has used the new name
        and torch.backends.cuda.matmul.fp32_precision == "tf32"
        and traits_of(operand.device).has_tf32
    )
    return {
        "USE_UPCAST": is_interpreted(kernel),
        "PRECISION": "tf32" if use_tf32 else "ieee",
        "BLOCK_M": tiles.block_m,
        "BLOCK_N": tiles.block_n,
        "BLOCK_K": tiles.block_k,
        "GROUP_M": tiles.group_m,
        "NUM_XCDS": tiles.num_xcds,
        "num_warps": tiles.num_warps,
        "num_stages": tiles.num_stages,
    }


def check_operands(function: str, **tensors: Tensor | None) -> None:
    """Raise unless all tensors are bf16, fp16 or fp32, of one dtype, and share a device.

    Raises:
        DtypeError: naming the argument, what it may be and what it is.
        DeviceError: naming both devices.
    """
    present = {name: tensor for name, tensor in tensors.items() if tensor is not None}
    (first_name, first), *others = present.items()
    check_dtype(function, first_name, first, FLOAT_DTYPES, "Use backend='reference' for fp64.")
    for name, tensor in others:
        check_dtype(function, name, tensor, (first.dtype,), f"Cast it to {first_name}'s dtype.")
    check_same_device(function, present)


def next_power_of_2(size: int) -> int:
    """The smallest power of two that is at least ``size``."""
    return triton.next_power_of_2(size)
