"""Poisoned memory really lies around the tensor."""

import pytest
import torch

from piper_kernels.testing import guard_with_nan


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_guard_with_nan_keeps_the_values_and_poisons_both_sides(dtype: torch.dtype) -> None:
    tensor = torch.arange(6, dtype=dtype).view(2, 3)
    guarded = guard_with_nan(tensor, band=5)
    assert torch.equal(guarded, tensor)
    whole = torch.empty(0, dtype=dtype).set_(guarded.untyped_storage())
    assert whole.numel() == 16
    assert whole[:5].isnan().all()
    assert whole[-5:].isnan().all()


def test_guard_with_nan_shows_a_read_past_the_end() -> None:
    guarded = guard_with_nan(torch.ones(4), band=2)
    assert guarded.as_strided((5,), (1,)).sum().isnan()


def test_guard_with_nan_takes_any_strides_and_no_elements() -> None:
    tensor = torch.arange(6.0).view(2, 3).T
    assert torch.equal(guard_with_nan(tensor), tensor)
    assert guard_with_nan(torch.empty(0, 3), band=1).shape == (0, 3)
