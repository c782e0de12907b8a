"""Slices of a shared batch: every row once, and each direction the other's gradient."""

import pytest
import torch
import torch.distributed as dist

from piper_kernels.dist.tp_slices import gather_slices, slice_bounds, take_slice
from piper_kernels.testing import run_ranks


@pytest.mark.parametrize("num_rows", [0, 1, 3, 4, 7])
def test_slice_bounds_cover_every_row_once(num_rows: int) -> None:
    bounds = [slice_bounds(num_rows, 4, rank) for rank in range(4)]
    rows = [row for first, end in bounds for row in range(first, end)]
    assert rows == list(range(num_rows))


def there_and_back() -> list[bool]:
    assert dist.group.WORLD is not None
    group, found = dist.group.WORLD, []
    for num_rows in (0, 1, 3, 7):
        torch.manual_seed(num_rows)
        x = torch.randn(num_rows, 2, dtype=torch.float64, requires_grad=True)
        y = gather_slices(take_slice(x, group) * 3, num_rows, group)
        # every rank has the same loss
        y.square().sum().backward()
        assert x.grad is not None
        found += [torch.equal(y, 3 * x), torch.allclose(x.grad, 18 * x)]
    return found


def test_slices_there_and_back() -> None:
    assert run_ranks(there_and_back, 3) == [[True] * 8] * 3
