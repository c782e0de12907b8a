"""Which dtype experts computes in and returns: mixed inputs, autocast, errors."""

import dataclasses

import pytest
import torch
import torch.nn.functional as F

from piper_kernels.config import Activation
from piper_kernels.errors import DtypeError
from piper_kernels.functional.dtypes import (
    check_one_dtype,
    choose_dtypes,
    gate_dtype,
)
from piper_kernels.functional.experts import experts
from piper_kernels.reference.experts import experts as reference_experts
from piper_kernels.testing import assert_close_to_baseline
from piper_kernels.testing.experts import (
    DIFFERENTIABLE,
    ExpertsInputs,
    make_experts_inputs,
    run_experts,
)

NARROW = [torch.bfloat16, torch.float16]


def mixed_inputs(x: torch.dtype, weights: torch.dtype) -> ExpertsInputs:
    inputs = make_experts_inputs(
        11, 12, 8, 4, 2, dtype=weights, has_gate_up_bias=True, has_down_bias=True
    )
    return dataclasses.replace(inputs, x=inputs.x.to(x), grad_y=inputs.grad_y.to(x))


@pytest.mark.parametrize("backend", ["cpu", "reference"])
@pytest.mark.parametrize("weights", [torch.float32, *NARROW], ids=str)
@pytest.mark.parametrize("x", [torch.float64, torch.float32, *NARROW], ids=str)
def test_experts_mixed_dtypes(x: torch.dtype, weights: torch.dtype, backend: str) -> None:
    # field report A17: the computation is that of the weights' dtype, y and gradients keep theirs
    inputs = mixed_inputs(x, weights)
    actual = run_experts(experts, inputs, backend=backend)
    same = inputs.map(lambda name, t: t.to(weights) if name in ("x", "grad_y") else t)
    expected = run_experts(experts, same, backend=backend)
    assert actual["y"].dtype == x
    for name in DIFFERENTIABLE:
        assert actual[name].dtype == getattr(inputs, name).dtype, name
    for name, value in expected.items():
        assert torch.equal(actual[name], value.to(actual[name].dtype)), name


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float64], ids=str)
def test_experts_gates_of_another_dtype(dtype: torch.dtype) -> None:
    # the arithmetic is fp32; the gradient comes back in the gates' own dtype
    inputs = make_experts_inputs(7, 8, 6, 4, 2)
    gates = inputs.gates.to(dtype)
    actual = run_experts(experts, dataclasses.replace(inputs, gates=gates))
    expected = run_experts(experts, dataclasses.replace(inputs, gates=gates.float()))
    assert actual["gates"].dtype == dtype
    assert torch.equal(actual["gates"], expected["gates"].to(dtype))
    assert torch.equal(actual["y"], expected["y"])


@pytest.mark.parametrize("backend", ["cpu", "reference"])
@pytest.mark.parametrize("x_dtype", [torch.float32, *NARROW], ids=str)
@pytest.mark.parametrize("autocast_dtype", NARROW, ids=str)
def test_experts_autocast(autocast_dtype: torch.dtype, x_dtype: torch.dtype, backend: str) -> None:
    # field report A16: y is what F.linear would give, the next layer takes it, gradients keep the
    # parameters' dtype
    inputs = make_experts_inputs(11, 12, 8, 4, 2)
    x = inputs.x.to(x_dtype)
    parameters = [inputs.gate_up_proj, inputs.down_proj, inputs.gates, torch.randn(5, 12)]
    gate_up_proj, down_proj, gates, last = (p.requires_grad_() for p in parameters)
    with torch.autocast("cpu", autocast_dtype):
        y = experts(x, inputs.expert_ids, gates, gate_up_proj, down_proj, backend=backend)
        assert y.dtype == F.linear(x, last).dtype
        loss = F.linear(y, last).float().square().mean()
    loss.backward()
    for parameter in parameters:
        assert parameter.grad.dtype == torch.float32
        assert parameter.grad.isfinite().all()
    narrow = inputs.to(autocast_dtype)
    plain = run_experts(experts, narrow, backend=backend)["y"]
    assert torch.equal(y, plain) or x_dtype not in (torch.float32, autocast_dtype)


def test_experts_autocast_leaves_fp64_alone() -> None:
    inputs = make_experts_inputs(7, 8, 6, 4, 2, dtype=torch.float64)
    expected = run_experts(experts, inputs)
    with torch.autocast("cpu", torch.bfloat16):
        actual = run_experts(experts, inputs)
    for name, value in expected.items():
        assert torch.equal(actual[name], value), name


@pytest.mark.parametrize("save", ["preact", "x"])
def test_experts_backward_under_autocast(save: str) -> None:
    # backward inside the region, and inside another one, is the backward outside
    inputs = mixed_inputs(torch.float32, torch.float32)
    expected = run_experts(experts, inputs, save=save)
    leaves = {name: getattr(inputs, name).requires_grad_() for name in DIFFERENTIABLE}
    y = experts(expert_ids=inputs.expert_ids, save=save, **leaves)
    with torch.autocast("cpu", torch.float16):
        grads = torch.autograd.grad(y, list(leaves.values()), inputs.grad_y)
    for name, grad in zip(DIFFERENTIABLE, grads, strict=True):
        assert torch.equal(grad, expected[name]), name


@pytest.mark.parametrize("save", ["preact", "x"])
def test_experts_large_activations_in_bf16_autocast(save: str) -> None:
    # field report A18: activations of 1e5 would overflow in fp16
    inputs = make_experts_inputs(11, 12, 8, 4, 2, activation=Activation(function="identity"))
    inputs = dataclasses.replace(inputs, x=inputs.x * 300)
    with torch.autocast("cpu", torch.bfloat16):
        actual = run_experts(
            experts,
            dataclasses.replace(inputs, grad_y=inputs.grad_y.bfloat16()),
            save=save,
        )
    narrow = inputs.to(torch.bfloat16)
    assert narrow.x.abs().max() ** 2 > 65504
    baseline = run_experts(reference_experts, narrow)
    truth = run_experts(reference_experts, narrow.to(torch.float64))
    for name, value in actual.items():
        assert value.isfinite().all(), name
        assert_close_to_baseline(
            name, value, baseline[name], truth[name], compute_dtype=torch.bfloat16
        )


def test_experts_with_a_gradient_scaler() -> None:
    # field report A16, fp16 with loss scaling
    inputs = make_experts_inputs(11, 12, 8, 4, 2)
    before = (inputs.gate_up_proj, inputs.down_proj)
    weights = [torch.nn.Parameter(weight.clone()) for weight in before]
    optimizer = torch.optim.SGD(weights, lr=0.1)
    scaler = torch.amp.GradScaler("cpu", init_scale=1024.0)
    with torch.autocast("cpu", torch.float16):
        y = experts(inputs.x, inputs.expert_ids, inputs.gates, *weights)
        loss = y.float().square().mean()
    scaler.scale(loss).backward()
    scaler.step(optimizer)
    scaler.update()
    assert scaler.get_scale() == 1024.0
    exact = run_experts(
        experts, dataclasses.replace(inputs, grad_y=y.detach().float() * 2 / y.numel())
    )
    for name, weight, old in zip(("gate_up_proj", "down_proj"), weights, before, strict=True):
        step = (old - weight.detach()) / 0.1
        torch.testing.assert_close(step, exact[name], rtol=0.02, atol=2e-3)


def test_experts_weights_of_two_dtypes() -> None:
    inputs = make_experts_inputs(7, 8, 6, 4, 2)
    arguments = (inputs.x, inputs.expert_ids, inputs.gates, inputs.gate_up_proj)
    down = inputs.down_proj.bfloat16()
    message = (
        r"experts: down_proj must have the dtype of gate_up_proj \(float32\), got bfloat16\. "
        r"Cast one of them, e\.g\. down_proj\.to\(torch\.float32\)"
    )
    with pytest.raises(DtypeError, match=message):
        experts(*arguments, down)
    with pytest.raises(DtypeError, match="down_bias must have the dtype of gate_up_proj"):
        experts(*arguments, inputs.down_proj, down_bias=torch.zeros(4, 8).half())
    with torch.autocast("cpu", torch.bfloat16):
        assert experts(*arguments, down).isfinite().all()


def test_choose_dtypes() -> None:
    fp32, bf16, fp64 = (
        torch.empty(1, dtype=dtype) for dtype in (torch.float32, torch.bfloat16, torch.float64)
    )
    assert choose_dtypes(fp32, bf16) == (torch.bfloat16, torch.float32)
    with torch.autocast("cpu", torch.float16):
        assert choose_dtypes(fp32, bf16) == (torch.float16, torch.float16)
        assert choose_dtypes(fp64, fp32) == (torch.float32, torch.float64)
        assert choose_dtypes(fp32, fp64) == (torch.float64, torch.float32)


def test_gate_dtype() -> None:
    assert [gate_dtype(d) for d in NARROW] == [torch.float32, torch.float32]
    assert gate_dtype(torch.float64) == torch.float64


def test_check_one_dtype_skips_none() -> None:
    check_one_dtype("f", {"a": torch.empty(1), "b": None, "c": torch.empty(1)})
