"""The error family, and the one place that words an error.

An error is an instruction: it names the function, the argument, the requirement, the value that was
given and what to do about it. This room imports nothing, so every other room may use it.
"""

import difflib
from collections.abc import Iterable, Sequence
from typing import Any


class PiperError(Exception):
    """Base of every error that the library raises on purpose."""


class ShapeError(PiperError, ValueError):
    """A tensor has the wrong shape."""


class DtypeError(PiperError, TypeError):
    """A tensor has a dtype that the function does not take, or two dtypes do not go together."""


class DeviceError(PiperError, ValueError):
    """Tensors that must share a device do not."""


class ConfigError(PiperError, ValueError):
    """A setting has a value that cannot work."""


class RoutingError(PiperError, ValueError):
    """A routing decision is impossible: non-finite logits, ids out of range."""


class BackendError(PiperError, RuntimeError):
    """The backend that was asked for cannot run here."""


class CheckpointError(PiperError, RuntimeError):
    """A checkpoint cannot be read or written, or belongs to something else."""


class PlanError(PiperError, ValueError):
    """A plan contradicts itself, or what it was made for."""


class DataError(PiperError, ValueError):
    """Training data cannot be read, or is too little."""


class TransferError(PiperError, RuntimeError):
    """A transfer failed on this rank: a peer died, hangs, or means to send something else."""


class TrainingError(PiperError, RuntimeError):
    """Training cannot go on: the loss or a gradient is not a finite number."""


def instruction(
    function: str, argument: str, requirement: str, value: object, remedy: str = ""
) -> str:
    """Word an error in the house form.

    Example:
        >>> instruction("route", "top_k", "be at most num_experts = 4", 5, "Lower top_k.")
        'route: top_k must be at most num_experts = 4, got 5. Lower top_k.'
    """
    sentence = f"{function}: {argument} must {requirement}, got {value}."
    return f"{sentence} {remedy}" if remedy else sentence


def require(
    condition: bool,
    function: str,
    argument: str,
    requirement: str,
    value: object,
    remedy: str = "",
    *,
    error: type[PiperError] = ConfigError,
) -> None:
    """Raise ``error`` with the house wording unless ``condition`` holds.

    ``condition`` must already be a Python bool: a tensor here would be a host synchronisation.

    Raises:
        PiperError: of type ``error``, if the condition is false.
    """
    if not condition:
        raise error(instruction(function, argument, requirement, value, remedy))


def check_shape(
    function: str,
    argument: str,
    tensor: Any,
    names: Sequence[str],
    sizes: Sequence[int | None],
    remedy: str = "",
) -> None:
    """Raise unless ``tensor`` has the shape ``sizes``; ``None`` leaves a dimension free.

    Args:
        function: name of the public function that checks.
        argument: name of its argument.
        tensor: anything with a ``shape``.
        names: what each dimension means, for the message, e.g. ``("E + 1",)``.
        sizes: the sizes that these names stand for here.
        remedy: what the caller should do.

    Raises:
        ShapeError: naming both the wanted and the given shape.

    Example:
        >>> import types
        >>> t = types.SimpleNamespace(shape=(8,))
        >>> check_shape("grouped_gemm", "expert_offsets", t, ("E + 1",), (9,),
        ...             "Did you pass expert_counts?")
        Traceback (most recent call last):
        ...
        piper_kernels.errors.ShapeError: grouped_gemm: expert_offsets must have shape \
(E + 1) = (9), got (8). Did you pass expert_counts?
    """
    shape = tuple(tensor.shape)
    fits = len(shape) == len(sizes) and all(
        want is None or want == have for want, have in zip(sizes, shape, strict=True)
    )
    if fits:
        return
    wanted = f"({', '.join(names)})"
    filled = "(" + ", ".join("any" if size is None else str(size) for size in sizes) + ")"
    given = f"({', '.join(map(str, shape))})"
    requirement = f"have shape {wanted}" + ("" if wanted == filled else f" = {filled}")
    raise ShapeError(instruction(function, argument, requirement, given, remedy))


def check_dtype(
    function: str, argument: str, tensor: Any, allowed: Sequence[Any], remedy: str = ""
) -> None:
    """Raise unless ``tensor.dtype`` is one of ``allowed``.

    Raises:
        DtypeError: naming the supported set and the given dtype.
    """
    if tensor.dtype not in allowed:
        names = ", ".join(str(dtype).removeprefix("torch.") for dtype in allowed)
        given = str(tensor.dtype).removeprefix("torch.")
        raise DtypeError(instruction(function, argument, f"be one of {names}", given, remedy))


def check_same_device(function: str, tensors: dict[str, Any]) -> None:
    """Raise unless all tensors (``None`` is skipped) lie on the device of the first.

    Raises:
        DeviceError: naming both tensors and both devices.
    """
    present = [(name, tensor) for name, tensor in tensors.items() if tensor is not None]
    first_name, first = present[0]
    for name, tensor in present[1:]:
        if tensor.device != first.device:
            requirement = f"be on the device of {first_name} ({first.device})"
            remedy = f"Move it with {name}.to({str(first.device)!r})."
            raise DeviceError(instruction(function, name, requirement, tensor.device, remedy))


def did_you_mean(name: str, known: Iterable[str]) -> str:
    """Suggest the nearest known name, else list what is known.

    Example:
        >>> did_you_mean("hiden_size", ["hidden_size", "top_k"])
        "Did you mean 'hidden_size'?"
    """
    known = sorted(known)
    near = difflib.get_close_matches(name, known, n=1, cutoff=0.6)
    return f"Did you mean {near[0]!r}?" if near else f"Known: {', '.join(known)}."
