"""composed_experts: a free activation and a post-expert norm, differentiable."""

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from piper_kernels.config import WeightLayout
from piper_kernels.errors import BackendError, ShapeError
from piper_kernels.functional.composed import composed_experts
from piper_kernels.functional.experts import experts
from piper_kernels.permutation import Permutation
from piper_kernels.reference.grouped_gemm import grouped_gemm
from piper_kernels.reference.permute import permute
from piper_kernels.reference.unpermute import unpermute
from piper_kernels.testing import ROUTING_KINDS
from piper_kernels.testing.experts import (
    DIFFERENTIABLE,
    ExpertsInputs,
    make_experts_inputs,
    run_experts,
)
from piper_kernels.testing.memory import poison_new_memory


def swiglu(preact: Tensor) -> Tensor:
    gate, up = preact.chunk(2, dim=-1)
    return F.silu(gate) * up


def tanh_glu(preact: Tensor) -> Tensor:
    gate, up = preact.chunk(2, dim=-1)
    return torch.tanh(gate) * up


def norm(out: Tensor) -> Tensor:
    return F.rms_norm(out, out.shape[-1:], eps=1e-3)


def oracle(inputs: ExpertsInputs, leaves: list[Tensor]) -> Tensor:
    x, gates, gate_up_proj, down_proj, gate_up_bias, down_bias = leaves
    permutation = Permutation.from_expert_ids(inputs.expert_ids, gate_up_proj.shape[0])
    offsets, is_transposed = permutation.expert_offsets, inputs.layout.is_transposed
    rows = permute(x, permutation)
    preact = grouped_gemm(
        rows, gate_up_proj, offsets, bias=gate_up_bias, is_transposed=is_transposed
    )
    out = grouped_gemm(
        tanh_glu(preact), down_proj, offsets, bias=down_bias, is_transposed=is_transposed
    )
    return unpermute(norm(out), gates, permutation)


@pytest.mark.parametrize("backend", ["cpu", "reference"])
@pytest.mark.parametrize("is_transposed", [False, True])
@pytest.mark.parametrize("routing", ROUTING_KINDS)
def test_composed_experts_matches_oracle(routing: str, is_transposed: bool, backend: str) -> None:
    inputs = make_experts_inputs(
        13,
        10,
        7,
        5,
        3,
        routing=routing,
        dtype=torch.float64,
        layout=WeightLayout(is_transposed=is_transposed),
        has_gate_up_bias=True,
        has_down_bias=True,
    )
    leaves = [getattr(inputs, name).requires_grad_() for name in DIFFERENTIABLE]
    x, gates, gate_up_proj, down_proj, gate_up_bias, down_bias = leaves
    with poison_new_memory():
        y = composed_experts(
            x,
            inputs.expert_ids,
            gates,
            gate_up_proj,
            down_proj,
            tanh_glu,
            layout=inputs.layout,
            gate_up_bias=gate_up_bias,
            down_bias=down_bias,
            post_expert=norm,
            backend=backend,
        )
        grads = torch.autograd.grad(y, leaves, inputs.grad_y)
    expected_y = oracle(inputs, leaves)
    expected = torch.autograd.grad(expected_y, leaves, inputs.grad_y)
    torch.testing.assert_close(y, expected_y, rtol=1e-11, atol=1e-11)
    for name, a, b in zip(DIFFERENTIABLE, grads, expected, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-11, atol=1e-11, msg=name)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_composed_experts_equals_the_fused_path(dtype: torch.dtype) -> None:
    inputs = make_experts_inputs(13, 10, 7, 5, 3, dtype=dtype)
    fused = run_experts(experts, inputs)
    composed = run_experts(
        lambda *args, **options: experts(*args, **options | {"activation": swiglu}), inputs
    )
    tolerance = 1e-5 if dtype == torch.float32 else 0.05
    for name, value in fused.items():
        assert composed[name].dtype == value.dtype
        torch.testing.assert_close(composed[name], value, rtol=tolerance, atol=tolerance)


def test_composed_experts_autocast_and_no_tokens() -> None:
    inputs = make_experts_inputs(0, 10, 7, 5, 3)
    arguments = (inputs.x, inputs.expert_ids, inputs.gates, inputs.gate_up_proj, inputs.down_proj)
    inputs.gate_up_proj.requires_grad_()
    with torch.autocast("cpu", torch.bfloat16):
        y = composed_experts(*arguments, swiglu, post_expert=norm)
    assert (y.dtype, y.shape) == (torch.bfloat16, (0, 10))
    y.sum().backward()
    assert not inputs.gate_up_proj.grad.any()


def test_composed_experts_compiles_without_breaks() -> None:
    inputs = make_experts_inputs(9, 10, 7, 5, 3)
    leaves = [getattr(inputs, name).requires_grad_() for name in DIFFERENTIABLE[:4]]

    def run(x: Tensor, gates: Tensor, w1: Tensor, w2: Tensor) -> Tensor:
        return composed_experts(x, inputs.expert_ids, gates, w1, w2, swiglu, post_expert=norm)

    compiled = torch.compile(run, fullgraph=True, backend="aot_eager")
    y, expected_y = compiled(*leaves), run(*leaves)
    assert torch.equal(y, expected_y)
    grads = torch.autograd.grad(y, leaves, inputs.grad_y)
    expected = torch.autograd.grad(expected_y, leaves, inputs.grad_y)
    for a, b in zip(grads, expected, strict=True):
        torch.testing.assert_close(a, b)


def test_composed_experts_wrong_callables() -> None:
    inputs = make_experts_inputs(4, 10, 7, 5, 3)
    arguments = (inputs.x, inputs.expert_ids, inputs.gates, inputs.gate_up_proj, inputs.down_proj)
    message = r"what apply_gate returns must have shape \(R, I\) = \(12, 7\), got \(12, 14\)"
    with pytest.raises(ShapeError, match=message):
        composed_experts(*arguments, torch.relu)
    message = r"what post_expert returns must have shape \(R, H\) = \(12, 10\), got \(12, 5\)"
    with pytest.raises(ShapeError, match=message):
        composed_experts(*arguments, swiglu, post_expert=lambda out: out[:, :5])


def test_composed_experts_refuses_a_second_derivative() -> None:
    inputs = make_experts_inputs(4, 10, 7, 5, 3)
    inputs.x.requires_grad_()
    arguments = (inputs.x, inputs.expert_ids, inputs.gates, inputs.gate_up_proj, inputs.down_proj)
    y = composed_experts(*arguments, swiglu)
    (grad,) = torch.autograd.grad(y.square().sum(), inputs.x, create_graph=True)
    with pytest.raises(BackendError, match="a second derivative was asked for"):
        grad.sum().backward()
