"""grouped_gemm and its weight gradient on the CPU against the oracle, and differentiated twice."""

import pytest
import torch
from torch import Tensor

from piper_kernels.errors import DeviceError, DtypeError, ShapeError
from piper_kernels.functional.grouped_gemm import grouped_gemm, grouped_gemm_wgrad
from piper_kernels.permutation import Permutation
from piper_kernels.reference import grouped_gemm as reference
from piper_kernels.testing import (
    ROUTING_KINDS,
    assert_close_to_baseline,
    guard_with_nan,
    make_routing,
)
from piper_kernels.testing.memory import poison_new_memory

DTYPES = [torch.float64, torch.float32, torch.bfloat16, torch.float16]
SLACK = {torch.float64: 100.0, torch.float32: 16.0, torch.bfloat16: 4.0, torch.float16: 4.0}
E, IN, OUT = 5, 9, 7


def make(
    kind: str, num_tokens: int, dtype: torch.dtype, is_transposed: bool
) -> tuple[list[Tensor], Tensor, Tensor]:
    """``[rows, weight, bias], offsets, grad_out``, guarded with NaN."""
    ids, _ = make_routing(kind, num_tokens, E, 3)
    offsets = Permutation.from_expert_ids(ids, E).expert_offsets
    shape = (E, IN, OUT) if is_transposed else (E, OUT, IN)
    leaves = [torch.randn(3 * num_tokens, IN), torch.randn(shape), torch.randn(E, OUT)]
    leaves = [guard_with_nan(leaf.to(dtype)).requires_grad_() for leaf in leaves]
    return leaves, offsets, torch.randn(3 * num_tokens, OUT).to(dtype)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("is_transposed", [False, True])
@pytest.mark.parametrize("num_tokens", [0, 1, 37])
@pytest.mark.parametrize("kind", ROUTING_KINDS)
def test_grouped_gemm_matches_oracle(
    kind: str, num_tokens: int, is_transposed: bool, dtype: torch.dtype
) -> None:
    leaves, offsets, grad_out = make(kind, num_tokens, dtype, is_transposed)

    def run(function: object, tensors: list[Tensor], grad: Tensor) -> list[Tensor]:
        rows, weight, bias = tensors
        out = function(rows, weight, offsets, bias=bias, is_transposed=is_transposed)
        return [out, *torch.autograd.grad(out, tensors, grad)]

    with poison_new_memory():
        actual = run(grouped_gemm, leaves, grad_out)
    baseline = run(reference.grouped_gemm, leaves, grad_out)
    exact = [leaf.detach().double().requires_grad_() for leaf in leaves]
    truth = run(reference.grouped_gemm, exact, grad_out.double())
    for name, *values in zip(
        ("out", "rows", "weight", "bias"), actual, baseline, truth, strict=True
    ):
        assert values[0].dtype == dtype
        assert_close_to_baseline(name, *values, slack=SLACK[dtype], term_size=3.0)
    for expert, count in enumerate(offsets.diff().tolist()):
        if count == 0:
            assert not actual[2][expert].any()
            assert not actual[3][expert].any()


@pytest.mark.parametrize("is_transposed", [False, True])
def test_grouped_gemm_wgrad_matches_oracle(is_transposed: bool) -> None:
    for kind in ROUTING_KINDS:
        (rows, _, _), offsets, grad_out = make(kind, 37, torch.float64, is_transposed)
        with poison_new_memory():
            actual = grouped_gemm_wgrad(grad_out, rows, offsets, is_transposed=is_transposed)
        expected = reference.grouped_gemm_wgrad(
            grad_out, rows, offsets, is_transposed=is_transposed
        )
        torch.testing.assert_close(actual, expected, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("is_transposed", [False, True])
def test_grouped_gemm_derivatives_of_both_orders(is_transposed: bool) -> None:
    leaves, offsets, grad_out = make("with_sentinels", 4, torch.float64, is_transposed)

    def forward(rows: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
        return grouped_gemm(rows, weight, offsets, bias=bias, is_transposed=is_transposed)

    def wgrad(grad_out: Tensor, rows: Tensor) -> Tensor:
        return grouped_gemm_wgrad(grad_out, rows, offsets, is_transposed=is_transposed)

    assert torch.autograd.gradcheck(forward, leaves, fast_mode=True)
    assert torch.autograd.gradgradcheck(forward, leaves, fast_mode=True)
    assert torch.autograd.gradcheck(wgrad, (grad_out.requires_grad_(), leaves[0]), fast_mode=True)


def test_grouped_gemm_any_strides() -> None:
    _, offsets, _ = make("uniform", 6, torch.float32, is_transposed=False)
    rows, weight = torch.randn(IN, 18).t(), torch.randn(E, OUT, 2 * IN)[..., ::2]
    expected = grouped_gemm(rows.contiguous(), weight.contiguous(), offsets)
    torch.testing.assert_close(grouped_gemm(rows, weight, offsets), expected)
    # field report A13: stride 0 everywhere
    row = torch.randn(1, IN).expand(18, IN).requires_grad_()
    out = grouped_gemm(row, weight[:1].expand(E, OUT, IN), offsets)
    (grad,) = torch.autograd.grad(out.sum(), row)
    torch.testing.assert_close(grad, weight[0].sum(0).expand(18, IN))


def test_grouped_gemm_numeric_example() -> None:
    rows = torch.tensor([[2.0], [3.0], [9.0]])
    weight = torch.tensor([[[5.0]], [[7.0]]])
    offsets = torch.tensor([0, 1, 2], dtype=torch.int32)
    bias = torch.tensor([[0.5], [0.25]])
    out = grouped_gemm(rows, weight, offsets, bias=bias)
    assert out.flatten().tolist() == [10.5, 21.25, 0.0]


def test_grouped_gemm_dtypes() -> None:
    (rows, weight, bias), offsets, _ = make("uniform", 6, torch.float32, is_transposed=False)
    out = grouped_gemm(rows, weight.bfloat16(), offsets)
    assert out.dtype == torch.float32
    assert torch.equal(out, grouped_gemm(rows.bfloat16(), weight.bfloat16(), offsets).float())
    with torch.autocast("cpu", torch.bfloat16):
        out = grouped_gemm(rows, weight, offsets, bias=bias)
    assert out.dtype == torch.bfloat16
    with pytest.raises(DtypeError, match="bias must have the dtype of weight"):
        grouped_gemm(rows, weight, offsets, bias=bias.half())
    with pytest.raises(DtypeError, match="grad_out must have the dtype of rows"):
        grouped_gemm_wgrad(rows.half(), rows, offsets)


def test_grouped_gemm_under_transforms() -> None:
    (rows, weight, bias), offsets, _ = make("uniform", 4, torch.float64, is_transposed=False)

    def loss(rows: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
        return grouped_gemm(rows, weight, offsets, bias=bias).square().sum()

    leaves = [rows, weight, bias]
    expected = torch.autograd.grad(loss(*leaves), leaves)
    batch = [leaf.detach().expand(2, *leaf.shape) for leaf in leaves]
    grads = torch.vmap(torch.func.grad(loss, argnums=(0, 1, 2)))(*batch)
    for grad, one in zip(grads, expected, strict=True):
        torch.testing.assert_close(grad, one.expand(2, *one.shape))


def test_grouped_gemm_compiles_without_breaks() -> None:
    leaves, offsets, grad_out = make("uniform", 4, torch.float32, is_transposed=True)

    def run(rows: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
        return grouped_gemm(rows, weight, offsets, bias=bias, is_transposed=True)

    out = torch.compile(run, fullgraph=True, backend="aot_eager")(*leaves)
    assert torch.equal(out, run(*leaves))
    expected = torch.autograd.grad(run(*leaves), leaves, grad_out)
    for a, b in zip(torch.autograd.grad(out, leaves, grad_out), expected, strict=True):
        assert torch.equal(a, b)


def test_grouped_gemm_wrong_arguments() -> None:
    (rows, weight, bias), offsets, _ = make("uniform", 4, torch.float32, is_transposed=False)
    counts = offsets.diff()
    with pytest.raises(ShapeError, match=r"expert_offsets must have shape \(E \+ 1\) = \(6\), got"):
        grouped_gemm(rows, weight, counts)
    with pytest.raises(ShapeError, match="Did you pass expert_counts"):
        grouped_gemm(rows, weight, counts)
    with pytest.raises(ShapeError, match=r"rows must have shape \(R, in\) = \(any, 9\)"):
        grouped_gemm(rows[:, 1:], weight, offsets)
    with pytest.raises(ShapeError, match=r"bias must have shape \(E, out\) = \(5, 7\)"):
        grouped_gemm(rows, weight, offsets, bias=bias[:, 1:])
    with pytest.raises(ShapeError, match=r"weight must have shape \(E, out, in\)"):
        grouped_gemm(rows, weight[0], offsets)
    with pytest.raises(DtypeError, match="expert_offsets must be one of int64, int32"):
        grouped_gemm(rows, weight, offsets.float())
    with pytest.raises(DeviceError, match="weight must be on the device of rows"):
        grouped_gemm(rows, weight.to("meta"), offsets)
    with pytest.raises(ShapeError, match=r"grouped_gemm_wgrad: rows must have shape \(R, in\)"):
        grouped_gemm_wgrad(rows, rows[1:], offsets)
