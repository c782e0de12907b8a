"""What the parts of a layer share: making, checking and initialising parameters."""

import math
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn

from piper_kernels.errors import ConfigError, check_dtype, check_shape, instruction
from piper_kernels.routing import LOGITS_DTYPES

Shapes = Mapping[str, tuple[int, ...] | None]


def check_tensors(function: str, shapes: Shapes, tensors: Mapping[str, Tensor | None]) -> None:
    """Raise unless each tensor is there exactly where it has a shape, and has that shape.

    Raises:
        ConfigError: a tensor is missing, or one is given that has no place.
        ShapeError: a shape differs.
    """
    for name, shape in shapes.items():
        tensor = tensors[name]
        if shape is None and tensor is not None:
            raise ConfigError(instruction(function, name, "be None for this config", "a tensor"))
        if shape is not None and tensor is None:
            raise ConfigError(instruction(function, name, "be given for this config", None))
        if shape is not None:
            check_shape(function, name, tensor, [str(size) for size in shape], shape)


def new_parameters(
    shapes: Shapes, device: torch.device | str | None, dtype: torch.dtype | None
) -> dict[str, Any]:
    """Uninitialised parameters, ``None`` where there is no shape.

    Raises:
        DtypeError: no layer computes in ``dtype``.
    """
    if dtype is not None:
        check_dtype("PiperMoE", "dtype", torch.empty(0, dtype=dtype), LOGITS_DTYPES)
    return {
        name: None
        if shape is None
        else nn.Parameter(torch.empty(shape, device=device, dtype=dtype))
        for name, shape in shapes.items()
    }


def init_like_linear(weight: Tensor, fan_in: int) -> None:
    """Uniform in +-1/sqrt(fan_in), as ``nn.Linear``; standard deviation 1/sqrt(3 * fan_in).

    ``nn.init`` cannot find the fan-in itself: of ``[E, 2I, H]`` it would take 2I*H.
    """
    bound = 1.0 / math.sqrt(fan_in)
    nn.init.uniform_(weight, -bound, bound)


def init_zeros(*tensors: Tensor | None) -> None:
    """Set to 0 what is there."""
    for tensor in tensors:
        if tensor is not None:
            nn.init.zeros_(tensor)
