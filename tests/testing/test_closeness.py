"""The bound lets rounding through and nothing else."""

import pytest
import torch

from piper_kernels.testing import assert_close_to_baseline

TRUTH = torch.tensor([[1.0, 2.0, 4.0], [0.0, -1.0, 0.5]], dtype=torch.float64)


def off_by(dtype: torch.dtype, where: tuple[int, int], units: float) -> torch.Tensor:
    """The truth with one element off by so many units in the last place of its row's scale."""
    eps = torch.finfo(dtype).eps
    scale = TRUTH[where[0]].abs().max() + 0.1 * TRUTH.abs().max()
    moved = TRUTH.clone()
    moved[where] += units * eps * scale
    return moved


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_assert_close_to_baseline_passes_rounding(dtype: torch.dtype) -> None:
    rounded = TRUTH.to(dtype)
    assert_close_to_baseline("y", rounded, rounded, TRUTH)


def test_assert_close_to_baseline_draws_the_line_at_the_slack() -> None:
    baseline = TRUTH.float()
    assert_close_to_baseline("y", off_by(torch.float32, (0, 1), 3.5).float(), baseline, TRUTH)
    with pytest.raises(AssertionError, match=r"y: 1 of 6 elements too far; worst at \(0, 1\)"):
        assert_close_to_baseline("y", off_by(torch.float32, (0, 1), 6.0).float(), baseline, TRUTH)


def test_assert_close_to_baseline_allows_the_baselines_own_error() -> None:
    poor = off_by(torch.float32, (1, 2), 100.0).float()
    assert_close_to_baseline("y", off_by(torch.float32, (1, 2), -99.0).float(), poor, TRUTH)
    with pytest.raises(AssertionError, match=r"worst at \(0, 0\)"):
        assert_close_to_baseline("y", off_by(torch.float32, (0, 0), 99.0).float(), poor, TRUTH)


@pytest.mark.parametrize("bad", [torch.nan, torch.inf])
def test_assert_close_to_baseline_refuses_what_is_no_number(bad: float) -> None:
    broken = TRUTH.float()
    broken[1, 0] = bad
    with pytest.raises(AssertionError, match=rf"worst at \(1, 0\): actual {bad}"):
        assert_close_to_baseline("y", broken, TRUTH.float(), TRUTH)


def test_assert_close_to_baseline_compares_shapes_first() -> None:
    with pytest.raises(AssertionError, match=r"y: shape \(1, 3\), want"):
        assert_close_to_baseline("y", TRUTH[:1].float(), TRUTH.float(), TRUTH)
    empty = torch.empty(0, 3)
    assert_close_to_baseline("y", empty, empty, empty.double())
