"""unpermute on the CPU against the oracle: values and both gradients."""

import pytest
import torch

from piper_kernels.errors import BackendError, DeviceError, ShapeError
from piper_kernels.functional.permute import permute
from piper_kernels.functional.unpermute import unpermute
from piper_kernels.permutation import Permutation
from piper_kernels.reference.unpermute import unpermute as reference_unpermute
from piper_kernels.testing import (
    ROUTING_KINDS,
    assert_close_to_baseline,
    guard_with_nan,
    make_routing,
)
from piper_kernels.testing.memory import poison_new_memory

DTYPES = [torch.float64, torch.float32, torch.bfloat16, torch.float16]


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("num_tokens", [0, 1, 37])
@pytest.mark.parametrize("kind", ROUTING_KINDS)
def test_unpermute_matches_oracle(kind: str, num_tokens: int, dtype: torch.dtype) -> None:
    wide = torch.promote_types(dtype, torch.float32)
    ids, gates = make_routing(kind, num_tokens, num_experts=5, top_k=3, dtype=wide)
    permutation = Permutation.from_expert_ids(ids, 5)
    rows = guard_with_nan(torch.randn(3 * num_tokens, 9).to(dtype)).requires_grad_()
    gates.requires_grad_()
    grad_y = torch.randn(num_tokens, 9).to(dtype)
    with poison_new_memory():
        y = unpermute(rows, gates, permutation)
        grads = torch.autograd.grad(y, [rows, gates], grad_y)
    # the same sum in the same order, rounded once: equal to the bit
    expected = reference_unpermute(rows, gates, permutation)
    assert torch.equal(y, expected)
    baseline = torch.autograd.grad(expected, [rows, gates], grad_y)
    exact = [t.detach().double().requires_grad_() for t in (rows, gates)]
    truth = torch.autograd.grad(reference_unpermute(*exact, permutation), exact, grad_y.double())
    for name, *values in zip(("rows", "gates"), grads, baseline, truth, strict=True):
        assert values[0].dtype == values[1].dtype
        assert_close_to_baseline(name, *values, slack=16.0, term_size=1.0)


def test_unpermute_ignores_sentinel_rows() -> None:
    # rows and gates of sentinel slots may hold anything
    ids = torch.tensor([[4, 0], [4, 4], [1, 7]])
    permutation = Permutation.from_expert_ids(ids, 4)
    rows = torch.full((6, 3), torch.nan)
    rows[:2] = torch.tensor([[1.0, 2.0, 3.0], [4.0, 5.0, 6.0]])
    gates = torch.tensor([[torch.nan, 0.5], [torch.nan, torch.nan], [2.0, torch.nan]])
    rows.requires_grad_()
    gates.requires_grad_()
    y = unpermute(rows, gates, permutation)
    assert y.tolist() == [[0.5, 1.0, 1.5], [0.0, 0.0, 0.0], [8.0, 10.0, 12.0]]
    grad_rows, grad_gates = torch.autograd.grad(y.sum(), [rows, gates])
    assert grad_rows.tolist() == [[0.5] * 3, [2.0] * 3] + [[0.0] * 3] * 4
    assert grad_gates.tolist() == [[0.0, 6.0], [0.0, 0.0], [15.0, 0.0]]


def test_unpermute_undoes_permute() -> None:
    ids, _ = make_routing("skewed", 19, 6, 4)
    permutation = Permutation.from_expert_ids(ids, 6)
    x = torch.randn(19, 5, dtype=torch.float64)
    back = unpermute(permute(x, permutation), torch.full((19, 4), 0.25), permutation)
    assert torch.equal(back, x)


def test_unpermute_gates_of_another_dtype() -> None:
    ids, gates = make_routing("uniform", 5, 4, 2)
    permutation = Permutation.from_expert_ids(ids, 4)
    rows, narrow = torch.randn(10, 3), gates.bfloat16().requires_grad_()
    y = unpermute(rows, narrow, permutation)
    assert torch.equal(y, unpermute(rows, narrow.detach().float(), permutation))
    assert torch.autograd.grad(y.sum(), narrow)[0].dtype == torch.bfloat16


def test_unpermute_any_strides() -> None:
    ids, gates = make_routing("uniform", 6, 4, 2)
    permutation = Permutation.from_expert_ids(ids, 4)
    rows, gates = torch.randn(5, 12).t(), gates.t().contiguous().t()
    expected = unpermute(rows.contiguous(), gates.contiguous(), permutation)
    assert torch.equal(unpermute(rows, gates, permutation), expected)


def test_unpermute_under_transforms() -> None:
    ids, gates = make_routing("uniform", 5, 4, 2)
    permutation = Permutation.from_expert_ids(ids, 4)
    batch = torch.randn(3, 10, 6)

    def loss(rows: torch.Tensor, gates: torch.Tensor) -> torch.Tensor:
        return unpermute(rows, gates, permutation).square().sum()

    per_sample = torch.vmap(torch.func.grad(loss, argnums=(0, 1)), in_dims=(0, None))(batch, gates)
    for i, rows in enumerate(batch):
        leaves = [rows.clone().requires_grad_(), gates.clone().requires_grad_()]
        for a, b in zip(per_sample, torch.autograd.grad(loss(*leaves), leaves), strict=True):
            assert torch.equal(a[i], b)
    rows = batch[0].clone().requires_grad_()
    (grad,) = torch.autograd.grad(loss(rows, gates), rows, create_graph=True)
    with pytest.raises(BackendError, match="unpermute: a second derivative was asked for"):
        grad.sum().backward()


def test_unpermute_compiles_without_breaks() -> None:
    ids, gates = make_routing("with_sentinels", 5, 4, 2)
    permutation = Permutation.from_expert_ids(ids, 4)
    leaves = [torch.randn(10, 6, requires_grad=True), gates.requires_grad_()]
    compiled = torch.compile(unpermute, fullgraph=True, backend="aot_eager")
    y, expected = compiled(*leaves, permutation), unpermute(*leaves, permutation)
    assert torch.equal(y, expected)
    grads = torch.autograd.grad(y, leaves, torch.ones_like(y))
    for a, b in zip(grads, torch.autograd.grad(expected.sum(), leaves), strict=True):
        assert torch.equal(a, b)


def test_unpermute_wrong_arguments() -> None:
    ids, gates = make_routing("uniform", 5, 4, 2)
    permutation = Permutation.from_expert_ids(ids, 4)
    with pytest.raises(ShapeError, match=r"rows must have shape \(R, H\) = \(10, any\), got \(5"):
        unpermute(torch.randn(5, 3), gates, permutation)
    with pytest.raises(ShapeError, match=r"gates must have shape \(T, K\) = \(5, 2\), got \(10"):
        unpermute(torch.randn(10, 3), gates.reshape(-1), permutation)
    with pytest.raises(DeviceError, match="gates must be on the device of rows"):
        unpermute(torch.randn(10, 3), gates.to("meta"), permutation)
