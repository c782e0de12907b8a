"""permute moves exactly; its backward is the sum over each token's rows."""

import pytest
import torch
from torch import Tensor

from piper_kernels.permutation import Permutation
from piper_kernels.reference.permute import permute
from piper_kernels.testing import (
    ROUTING_KINDS,
    RoutingKind,
    assert_close_to_baseline,
    guard_with_nan,
    make_routing,
)
from piper_kernels.triton.permute import permute_backward, permute_forward

DTYPES = [torch.float32, torch.float16, torch.bfloat16]


def make(kind: RoutingKind, num_tokens: int, top_k: int = 2) -> Permutation:
    return Permutation.from_expert_ids(make_routing(kind, num_tokens, 5, top_k)[0], 5)


@pytest.mark.parametrize("kind", ROUTING_KINDS)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_permute_moves_exactly(kind: RoutingKind, dtype: torch.dtype) -> None:
    permutation = make(kind, 37)
    x = torch.randn(37, 50).to(dtype)
    rows = permute_forward(guard_with_nan(x), permutation)
    assert rows.dtype == dtype
    assert torch.equal(rows, permute(x, permutation))


@pytest.mark.parametrize("block_rows", [4, 64])
@pytest.mark.parametrize("num_tokens", [0, 1, 33])
@pytest.mark.parametrize("hidden", [1, 300])
def test_permute_any_size_and_tile(block_rows: int, num_tokens: int, hidden: int) -> None:
    permutation = make("uniform", num_tokens)
    x = torch.randn(num_tokens, hidden)
    rows = permute_forward(x, permutation, block_rows=block_rows)
    assert torch.equal(rows, permute(x, permutation))


@pytest.mark.parametrize("top_k", [1, 2, 3, 4, 5])
def test_permute_any_strides(top_k: int) -> None:
    permutation = make("uniform", 20, top_k)
    x = torch.randn(20, 16)
    expected = permute(x, permutation)
    wide = torch.full((20, 32), torch.nan)
    wide[:, ::2] = x
    assert torch.equal(permute_forward(wide[:, ::2], permutation), expected)
    assert torch.equal(permute_forward(x.t().contiguous().t(), permutation), expected)
    same = x[:1].expand(20, 16)
    assert torch.equal(permute_forward(same, permutation), permute(same, permutation))


@pytest.mark.parametrize("kind", ["uniform", "with_sentinels"])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("block_tokens", [4, 16])
def test_permute_backward(kind: RoutingKind, dtype: torch.dtype, block_tokens: int) -> None:
    permutation = make(kind, 21)
    grad_rows = torch.randn(42, 20).to(dtype)

    def expected(dtype: torch.dtype) -> Tensor:
        x = torch.zeros(21, 20, dtype=dtype, requires_grad=True)
        permute(x, permutation).backward(grad_rows.to(dtype))
        assert x.grad is not None
        return x.grad

    poisoned = guard_with_nan(grad_rows)
    poisoned[int(permutation.expert_offsets[-1]) :] = torch.nan  # nobody wrote sentinel rows
    grad_x = permute_backward(poisoned, permutation, block_tokens=block_tokens)
    assert grad_x.dtype == dtype
    assert_close_to_baseline("grad_x", grad_x, expected(dtype), expected(torch.float64))


def test_permute_example() -> None:
    permutation = Permutation.from_expert_ids(torch.tensor([[1], [0]]), 2)
    rows = permute_forward(torch.tensor([[5.0], [7.0]]), permutation)
    assert rows.tolist() == [[7.0], [5.0]]
    assert permute_backward(rows, permutation).tolist() == [[5.0], [7.0]]
