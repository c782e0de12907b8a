"""Bounds for a result: the error of a plain computation in the same dtype."""

import torch
from torch import Tensor


def assert_close_to_baseline(
    name: str,
    actual: Tensor,
    baseline: Tensor,
    truth: Tensor,
    *,
    slack: float = 4.0,
    term_size: float = 0.0,
    compute_dtype: torch.dtype | None = None,
) -> None:
    """Require that ``actual`` is as near to the truth as a plain computation in the same dtype.

    ``|actual - truth| <= |baseline - truth| + slack * eps * scale``, element by element; eps is the
    dtype's, scale is the largest |truth| of the element's row plus a tenth of the tensor's largest,
    and at least ``term_size``.

    Args:
        name: what is compared, for the message.
        actual: the result under test.
        baseline: a plain computation in actual's dtype.
        truth: the same in fp64.
        slack: how many units in the last place of the row's scale are allowed on top.
        term_size: size of the terms that an element is the sum of. A tensor of few elements may
            owe its small values to cancellation, and its own size says nothing about the error.
        compute_dtype: where the result is stored in a wider dtype than it was computed in.

    Raises:
        AssertionError: naming the worst element and all three values.
    """
    assert actual.shape == truth.shape, f"{name}: shape {tuple(actual.shape)}, want {truth.shape}"
    if not actual.numel():
        return
    exact = truth.double()
    error = (actual.double() - exact).abs()
    unit = unit_of_error(truth, compute_dtype or actual.dtype, term_size)
    allowed = (baseline.double() - exact).abs() + slack * unit
    is_wrong = ~(error <= allowed)
    if is_wrong.any():
        excess = torch.where(error.isnan(), torch.inf, error / allowed)
        where = tuple(int(i) for i in torch.unravel_index(excess.argmax(), excess.shape))
        raise AssertionError(
            f"{name}: {int(is_wrong.sum())} of {is_wrong.numel()} elements too far; worst at "
            f"{where}: actual {actual[where].item():.6g}, baseline {baseline[where].item():.6g}, "
            f"truth {exact[where].item():.6g}, allowed error {allowed[where].item():.3g}"
        )


def unit_of_error(truth: Tensor, dtype: torch.dtype, term_size: float = 0.0) -> Tensor:
    """One unit in the last place of each row's scale, see :func:`assert_close_to_baseline`.

    Args:
        truth: the exact result, not empty.
        dtype: whose eps counts.
        term_size: least scale.

    Returns:
        fp64, one number a row, the last dim kept.

    Example:
        >>> unit_of_error(torch.tensor([[10.0, 4.0]]), torch.float32).item() == 11 * 2**-23
        True
    """
    exact = truth.double()
    scale = exact.abs().amax(-1, keepdim=True) + exact.abs().max() * 0.1
    return torch.finfo(dtype).eps * scale.clamp(min=term_size)
