"""permute on the CPU: a move, so it equals the oracle to the bit, gradient included."""

import pytest
import torch

from piper_kernels.errors import BackendError, DeviceError, ShapeError
from piper_kernels.functional.permute import permute
from piper_kernels.permutation import Permutation
from piper_kernels.reference.permute import permute as reference_permute
from piper_kernels.testing import ROUTING_KINDS, guard_with_nan, make_routing
from piper_kernels.testing.memory import poison_new_memory

DTYPES = [torch.float64, torch.float32, torch.bfloat16, torch.float16]


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("num_tokens", [0, 1, 37])
@pytest.mark.parametrize("kind", ROUTING_KINDS)
def test_permute_matches_oracle(kind: str, num_tokens: int, dtype: torch.dtype) -> None:
    ids, _ = make_routing(kind, num_tokens, num_experts=5, top_k=3)
    permutation = Permutation.from_expert_ids(ids, 5)
    x = guard_with_nan(torch.randn(num_tokens, 9).to(dtype)).requires_grad_()
    grad_rows = torch.randn(3 * num_tokens, 9).to(dtype)
    with poison_new_memory():
        rows = permute(x, permutation)
        (grad_x,) = torch.autograd.grad(rows, x, grad_rows)
    expected = reference_permute(x, permutation)
    assert rows.dtype == dtype
    assert torch.equal(rows, expected)
    # the oracle's gradient adds in the rows' order and dtype; ours in ascending k, in fp32 or more
    wide = torch.promote_types(dtype, torch.float32)
    is_valid = torch.arange(len(grad_rows)) < permutation.expert_offsets[-1]
    valid = torch.where(is_valid[:, None], grad_rows.to(wide), 0)
    sums = torch.zeros(num_tokens, 9, dtype=wide)
    for k in range(3):
        sums += valid[permutation.slot_to_row.long().view(-1, 3)[:, k]]
    assert torch.equal(grad_x, sums.to(dtype))


@pytest.mark.parametrize("view", ["columns", "transposed", "expanded"])
def test_permute_any_strides(view: str) -> None:
    x = {
        "columns": torch.randn(7, 18)[:, ::2],
        "transposed": torch.randn(9, 7).t(),
        "expanded": torch.randn(1, 9).expand(7, 9),
    }[view].requires_grad_()
    ids, _ = make_routing("uniform", 7, 4, 2)
    permutation = Permutation.from_expert_ids(ids, 4)
    rows = permute(x, permutation)
    assert torch.equal(rows, reference_permute(x, permutation))
    # field report A13: the sum's gradient has stride 0
    (grad_x,) = torch.autograd.grad(rows.sum(), x)
    assert torch.equal(grad_x, torch.full_like(grad_x, 2.0))


def test_permute_numeric_example() -> None:
    permutation = Permutation.from_expert_ids(torch.tensor([[2, 0], [0, 1], [2, 3]]), 3)
    rows = permute(torch.tensor([[10.0], [11.0], [12.0]]), permutation)
    assert rows.flatten().tolist() == [10.0, 11.0, 11.0, 10.0, 12.0, 0.0]


def test_permute_under_transforms() -> None:
    ids, _ = make_routing("uniform", 5, 4, 2)
    permutation = Permutation.from_expert_ids(ids, 4)
    batch = torch.randn(3, 5, 6)
    rows = torch.vmap(lambda x: permute(x, permutation))(batch)
    for x, expected in zip(batch, rows, strict=True):
        assert torch.equal(permute(x, permutation), expected)
    grad = torch.func.grad(lambda x: permute(x, permutation).square().sum())(batch[0])
    torch.testing.assert_close(grad, 4 * batch[0])
    x = batch[0].clone().requires_grad_()
    (grad,) = torch.autograd.grad(permute(x, permutation).square().sum(), x, create_graph=True)
    with pytest.raises(BackendError, match="permute: a second derivative was asked for"):
        grad.sum().backward()


def test_permute_compiles_without_breaks() -> None:
    ids, _ = make_routing("with_sentinels", 5, 4, 2)
    permutation = Permutation.from_expert_ids(ids, 4)
    x = torch.randn(5, 6, requires_grad=True)
    rows = torch.compile(permute, fullgraph=True, backend="aot_eager")(x, permutation)
    assert torch.equal(rows, permute(x, permutation))
    (grad,) = torch.autograd.grad(rows, x, torch.ones_like(rows))
    assert torch.equal(grad, torch.autograd.grad(permute(x, permutation).sum(), x)[0])


def test_permute_wrong_arguments() -> None:
    ids, _ = make_routing("uniform", 5, 4, 2)
    permutation = Permutation.from_expert_ids(ids, 4)
    with pytest.raises(ShapeError, match=r"permute: x must have shape \(T, H\) = \(5, any\)"):
        permute(torch.randn(6, 3), permutation)
    with pytest.raises(DeviceError, match="permutation must be on the device of x"):
        permute(torch.randn(5, 3, device="meta"), permutation)
