"""The gate: a variant that disagrees with the oracle is not timed.

An error is measured against the largest value of the part that is checked: one token's row, or one
expert's gradient. Benches compare implementations that round in different places, so the bound is a
multiple of the dtype's unit: wrong results are caught here, the last bits are the tests' business.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from piper_kernels.errors import PiperError

# share of the part's largest value
TOLERANCE = {torch.float32: 1e-5, torch.bfloat16: 2e-2}


class GateError(PiperError, AssertionError):
    """A variant's result is not the oracle's."""


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class Expected:
    """What a part of an output must be.

    Attributes:
        name: of the output.
        index: the part that is checked, as one would write it in brackets.
        value: the right values, in fp64.
    """

    name: str
    index: Any
    value: Tensor


def check_outputs(
    variant: str, outputs: Mapping[str, Tensor], expected: list[Expected], dtype: torch.dtype
) -> None:
    """Compare a variant's outputs with what they must be.

    Args:
        variant: its name, for the message.
        outputs: name -> tensor.
        expected: which parts are checked, and their values.
        dtype: the dtype that was computed in.

    Raises:
        GateError: naming variant, tensor, position, both values and the bound.
    """
    for want in expected:
        if want.name not in outputs:
            known = ", ".join(outputs)
            raise GateError(f"gate: {variant} gives no {want.name}; it gives {known}. Not timed.")
        actual = outputs[want.name][want.index].double()
        if actual.shape != want.value.shape:
            shapes = f"{tuple(actual.shape)}, the oracle's {tuple(want.value.shape)}"
            raise GateError(f"gate: {variant}: {want.name} has shape {shapes}. Not timed.")
        _check_part(variant, want, actual, TOLERANCE[dtype])


def _check_part(variant: str, want: Expected, actual: Tensor, tolerance: float) -> None:
    """Raise at the worst element of one part."""
    if not actual.numel():
        return
    # a part that must be zero must be so to the bit
    bound = tolerance * want.value.abs().max().item()
    error = (actual - want.value).abs()
    # a NaN compares false with everything
    is_wrong = ~(error <= bound)
    if not is_wrong.any():
        return
    worst = error.nan_to_num(nan=torch.inf).argmax()
    where = tuple(int(i) for i in torch.unravel_index(worst, error.shape))
    raise GateError(
        f"gate: {variant} disagrees with the oracle: {want.name}, part {where}: "
        f"got {actual[where].item():.6g}, must be {want.value[where].item():.6g} within "
        f"{bound:.2g}; {int(is_wrong.sum())} of "
        f"{is_wrong.numel()} checked elements are wrong. Not timed."
    )
