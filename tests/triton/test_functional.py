"""functional/ with ``backend="triton"``: the same ops, differentiable."""

import pytest
import torch
from torch import Tensor

from piper_kernels.functional.experts import experts
from piper_kernels.functional.explain import explain_experts
from piper_kernels.functional.grouped_gemm import grouped_gemm
from piper_kernels.testing import assert_experts_match_oracle, make_experts_inputs, run_experts


def leaf(tensor: Tensor) -> Tensor:
    return tensor.clone().requires_grad_()


@pytest.mark.parametrize("save", ["preact", "x"])
def test_experts_triton_backend_equals_oracle(save: str) -> None:
    inputs = make_experts_inputs(
        9, 16, 24, 3, 2, routing="with_sentinels", has_gate_up_bias=True, has_down_bias=True
    )
    actual = run_experts(experts, inputs, save=save, backend="triton")
    assert_experts_match_oracle(actual, inputs)


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


def test_explain_experts_names_the_tiles() -> None:
    inputs = make_experts_inputs(9, 16, 24, 3, 2)
    weights = inputs.gate_up_proj, inputs.down_proj
    explanation = explain_experts(
        inputs.x, inputs.expert_ids, inputs.gates, *weights, backend="triton"
    )
    assert len(explanation.tiles) == 6
    assert "  tiles:             gate_up: 16x64x64, 4 warps, 3 stages (default)" in str(explanation)
