"""unpermute equals the oracle, forward and backward, and never looks at sentinel rows."""

import pytest
import torch
from torch import Tensor

from piper_kernels.permutation import Permutation
from piper_kernels.reference.unpermute import unpermute
from piper_kernels.testing import (
    ROUTING_KINDS,
    RoutingKind,
    assert_close_to_baseline,
    guard_with_nan,
    make_routing,
)
from piper_kernels.triton.permute import permute_forward
from piper_kernels.triton.unpermute import unpermute_backward, unpermute_forward

DTYPES = [torch.float32, torch.float16, torch.bfloat16]


def make(
    kind: RoutingKind, num_tokens: int, hidden: int, dtype: torch.dtype
) -> tuple[Tensor, Tensor, Permutation]:
    ids, gates = make_routing(kind, num_tokens, 5, 3)
    permutation = Permutation.from_expert_ids(ids, 5)
    rows = guard_with_nan(torch.randn(num_tokens * 3, hidden).to(dtype))
    rows[int(permutation.expert_offsets[-1]) :] = torch.nan
    return rows, gates, permutation


def clean(rows: Tensor) -> Tensor:
    """What the oracle may see of sentinel rows: its gradient would carry their NaN."""
    return rows.nan_to_num(0.0)


@pytest.mark.parametrize("kind", ROUTING_KINDS)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_unpermute_forward(kind: RoutingKind, dtype: torch.dtype) -> None:
    rows, gates, permutation = make(kind, 21, 40, dtype)
    y = unpermute_forward(rows, gates, permutation)
    assert y.dtype == dtype
    truth = unpermute(rows.double(), gates.double(), permutation)
    assert_close_to_baseline("y", y, unpermute(rows, gates, permutation), truth)


@pytest.mark.parametrize("kind", ROUTING_KINDS)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("block_rows", [8, 64])
def test_unpermute_backward(kind: RoutingKind, dtype: torch.dtype, block_rows: int) -> None:
    rows, gates, permutation = make(kind, 17, 20, dtype)
    grad_y = torch.randn(17, 20).to(dtype)
    grad_rows, grad_gates = unpermute_backward(
        guard_with_nan(grad_y), rows, gates, permutation, block_rows=block_rows
    )

    def expected(wide: torch.dtype | None) -> list[Tensor]:
        leaf_rows = clean(rows).to(wide or dtype).requires_grad_()
        leaf_gates = gates.to(wide or torch.float32, copy=True).requires_grad_()
        unpermute(leaf_rows, leaf_gates, permutation).backward(grad_y.to(leaf_rows.dtype))
        assert leaf_rows.grad is not None
        assert leaf_gates.grad is not None
        return [leaf_rows.grad, leaf_gates.grad]

    baseline, truth = expected(None), expected(torch.float64)
    assert grad_rows.dtype == dtype
    assert grad_gates.dtype == torch.float32
    assert_close_to_baseline("grad_rows", grad_rows, baseline[0], truth[0])
    flat = [tensor.reshape(1, -1) for tensor in (grad_gates, baseline[1], truth[1])]
    assert_close_to_baseline("grad_gates", *flat)


@pytest.mark.parametrize("num_tokens", [0, 1, 9])
@pytest.mark.parametrize("hidden", [1, 300])
def test_unpermute_any_size(num_tokens: int, hidden: int) -> None:
    rows, gates, permutation = make("uniform", num_tokens, hidden, torch.float32)
    y = unpermute_forward(rows, gates, permutation, block_tokens=4)
    truth = unpermute(rows.double(), gates.double(), permutation)
    assert_close_to_baseline("y", y, unpermute(rows, gates, permutation), truth)
    grad_rows, grad_gates = unpermute_backward(torch.ones_like(y), rows, gates, permutation)
    slots = permutation.row_to_slot.long()
    assert torch.equal(grad_rows, gates.flatten()[slots, None].expand_as(rows))
    assert grad_gates.shape == gates.shape


# a gradient of y.sum() has stride 0 (A13); gates and rows may be slices
def test_unpermute_any_strides() -> None:
    rows, gates, permutation = make("skewed", 9, 16, torch.float32)
    wide_rows = torch.full((27, 32), torch.nan)
    wide_rows[:, ::2] = rows
    wide_gates = torch.stack([gates, gates], -1)
    args = wide_rows[:, ::2], wide_gates[..., 1], permutation
    assert torch.equal(unpermute_forward(*args), unpermute_forward(rows, gates, permutation))
    one = torch.ones(1, 1).expand(9, 16)
    expected = unpermute_backward(one.contiguous(), rows, gates, permutation)
    for actual, want in zip(unpermute_backward(one, *args), expected, strict=True):
        assert torch.equal(actual, want)


def test_unpermute_inverts_permute() -> None:
    _, gates, permutation = make("uniform", 12, 8, torch.float32)
    x = torch.randint(-8, 9, (12, 8)).float()
    quarter = torch.full_like(gates, 0.25)
    y = unpermute_forward(permute_forward(x, permutation), quarter, permutation)
    assert torch.equal(y, x * 0.75)


def test_unpermute_example() -> None:
    permutation = Permutation.from_expert_ids(torch.tensor([[0, 1]]), 2)
    rows, gates = torch.tensor([[1.0], [2.0]]), torch.tensor([[0.5, 0.25]])
    assert unpermute_forward(rows, gates, permutation).tolist() == [[1.0]]
    one = Permutation.from_expert_ids(torch.tensor([[0]]), 1)
    grads = unpermute_backward(
        torch.tensor([[3.0]]), torch.tensor([[2.0]]), torch.tensor([[0.5]]), one
    )
    assert [grad.tolist() for grad in grads] == [[[1.5]], [[6.0]]]
