"""Which backend runs an op, and why. The choice is pure; what is installed is asked apart."""

import importlib
import importlib.util
import logging
import os
from dataclasses import dataclass
from functools import lru_cache
from types import ModuleType
from typing import Literal

import torch
from torch import Tensor

from piper_kernels.config import Backend, check_choice
from piper_kernels.errors import BackendError, instruction

logger = logging.getLogger(__name__)

Running = Literal["triton", "cpu", "reference"]

TRITON_DTYPES = (torch.float32, torch.bfloat16, torch.float16)


@dataclass(frozen=True, kw_only=True, slots=True)
class Machine:
    """What the choice depends on besides the tensors.

    Attributes:
        has_triton: the library triton can be imported.
        is_interpreting: ``TRITON_INTERPRET=1``: kernels run on CPU tensors, slowly.
    """

    has_triton: bool
    is_interpreting: bool


@dataclass(frozen=True, kw_only=True, slots=True)
class Choice:
    """The backend that runs, and the reason in one sentence.

    Attributes:
        backend: ``triton``, ``cpu`` or ``reference``.
        reason: why this one.
        is_fallback: a slower backend than the device deserves.
    """

    backend: Running
    reason: str
    is_fallback: bool = False


# Looked up once, without importing triton and without touching a driver: torch.compile cannot trace
# the look-up.
THIS_MACHINE = Machine(
    has_triton=importlib.util.find_spec("triton") is not None,
    is_interpreting=os.environ.get("TRITON_INTERPRET") == "1",
)


def choose_backend(
    function: str, requested: Backend, device_type: str, dtype: torch.dtype, machine: Machine
) -> Choice:
    """Choose the backend of one call.

    Args:
        function: the public function, for messages.
        requested: what the caller asked for.
        device_type: of the tensors, e.g. ``"cpu"``.
        dtype: that the op computes in.
        machine: what is installed.

    Returns:
        The choice.

    Raises:
        ConfigError: ``requested`` is unknown.
        BackendError: it cannot run here; the message says what to do.

    Example:
        >>> machine = Machine(has_triton=True, is_interpreting=False)
        >>> choose_backend("experts", "auto", "cpu", torch.float32, machine).backend
        'cpu'
    """
    check_choice(function, "backend", requested, Backend)
    if requested == "reference":
        return Choice(backend="reference", reason="asked for")
    if requested == "auto":
        return _choose_automatically(function, device_type, dtype, machine)
    if requested == "cpu":
        if device_type not in ("cpu", "meta"):
            _refuse(function, "'cpu'", f"tensors on {device_type}", "Move them, or use 'auto'.")
        return Choice(backend="cpu", reason="asked for")
    if not machine.has_triton:
        remedy = "Install it (pip install triton, on Linux), or use 'auto'."
        _refuse(function, "'triton'", "no triton package", remedy)
    if device_type != "cuda" and not (device_type == "cpu" and machine.is_interpreting):
        remedy = (
            "Move them to a GPU, use 'auto', or set TRITON_INTERPRET=1 before Python starts "
            "to run the kernels in Triton's interpreter (slow: for tests)."
        )
        _refuse(function, "'triton'", f"tensors on {device_type}", remedy)
    if dtype not in TRITON_DTYPES:
        remedy = "Use float32, bfloat16 or float16, or backend='reference'."
        _refuse(function, "'triton'", _name(dtype), remedy)
    return Choice(backend="triton", reason="asked for")


def _choose_automatically(
    function: str, device_type: str, dtype: torch.dtype, machine: Machine
) -> Choice:
    if device_type == "cpu":
        return Choice(backend="cpu", reason="the tensors are on the CPU")
    if device_type == "meta":
        return Choice(backend="cpu", reason="meta tensors have shapes only, nothing is computed")
    if device_type != "cuda":
        remedy = "Use a CPU or a CUDA/ROCm device, or backend='reference'."
        _refuse(function, "'auto'", f"tensors on {device_type}", remedy)
    if dtype not in TRITON_DTYPES:
        reason = f"the kernels do not compute in {_name(dtype)}"
        return Choice(backend="reference", reason=reason, is_fallback=True)
    if not machine.has_triton:
        reason = "the tensors are on a GPU but triton is not installed"
        return Choice(backend="reference", reason=reason, is_fallback=True)
    return Choice(backend="triton", reason="the tensors are on a GPU")


def _refuse(function: str, backend: str, value: str, remedy: str) -> None:
    requirement = f"be able to run here; {backend} was asked for"
    raise BackendError(instruction(function, "backend", requirement, value, remedy))


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


@lru_cache
def _log_once(function: str, choice: Choice) -> None:
    logger.warning("%s runs on %r: %s.", function, choice.backend, choice.reason)


def choose_for(function: str, requested: Backend, tensor: Tensor, dtype: torch.dtype) -> Choice:
    """The choice for a tensor's device on this machine; a fallback is logged once."""
    choice = choose_backend(function, requested, tensor.device.type, dtype, THIS_MACHINE)
    if choice.is_fallback and not torch.compiler.is_compiling():
        _log_once(function, choice)
    return choice


def load(backend: str, op: str) -> ModuleType:
    """The module ``piper_kernels.<backend>.<op>``, imported when it is first needed."""
    return importlib.import_module(f"piper_kernels.{backend}.{op}")
