"""functional/ with ``backend="triton"``: the same ops, differentiable."""

import pytest
import torch
from torch import Tensor

from piper_kernels.functional.experts import experts
from piper_kernels.functional.grouped_gemm import grouped_gemm
from piper_kernels.testing import assert_close_to_baseline, make_experts_case, oracle


def leaf(tensor: Tensor) -> Tensor:
    return tensor.clone().requires_grad_()


@pytest.mark.parametrize("save", ["preact", "x"])
def test_experts_triton_backend_equals_oracle(save: str) -> None:
    case = make_experts_case((9, 16, 24, 3, 2), kind="with_sentinels", has_bias=True)
    weights = case.weights
    assert weights.gate_up_bias is not None
    assert weights.down_bias is not None
    leaves = {
        "x": leaf(case.x),
        "gates": leaf(case.gates),
        "gate_up_proj": leaf(weights.gate_up_proj),
        "down_proj": leaf(weights.down_proj),
        "gate_up_bias": leaf(weights.gate_up_bias),
        "down_bias": leaf(weights.down_bias),
    }
    y = experts(expert_ids=case.expert_ids, save=save, backend="triton", **leaves)
    y.backward(case.grad_y)
    baseline, truth = oracle(case), oracle(case, torch.float64)
    assert_close_to_baseline("y", y, baseline["y"], truth["y"])
    for name, tensor in leaves.items():
        assert tensor.grad is not None, name
        rows = (value.reshape(1, -1) for value in (tensor.grad, baseline[name], truth[name]))
        assert_close_to_baseline(name, *rows)


def test_grouped_gemm_triton_backend_is_differentiable() -> None:
    offsets = torch.tensor([0, 5, 5, 9], dtype=torch.int32)
    tensors = torch.randn(10, 8), torch.randn(3, 6, 8), torch.randn(3, 6)
    grads: dict[str, list[Tensor]] = {}
    for backend in ("triton", "reference"):
        rows, weight, bias = (leaf(tensor) for tensor in tensors)
        out = grouped_gemm(rows, weight, offsets, bias=bias, backend=backend)
        out.square().sum().backward()
        grads[backend] = [tensor.grad for tensor in (rows, weight, bias)]
    for actual, expected in zip(grads["triton"], grads["reference"], strict=True):
        torch.testing.assert_close(actual, expected)
