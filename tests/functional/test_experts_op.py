"""The op behind experts: what it keeps, what it skips, and how it lives with torch's machinery."""

import dataclasses
from collections.abc import Callable

import pytest
import torch
from torch import Tensor
from torch._dynamo.testing import CompileCounterWithBackend
from torch.utils.checkpoint import checkpoint

from piper_kernels.contracts import ExpertsNeeds, ExpertsWeights
from piper_kernels.cpu import experts_backward, matrices
from piper_kernels.cpu.experts import experts_backward as raw_backward
from piper_kernels.cpu.experts import experts_forward
from piper_kernels.errors import BackendError
from piper_kernels.functional.experts import experts
from piper_kernels.functional.experts_op import ExpertsFunction
from piper_kernels.functional.routing_metadata import build_permutation, maps_of
from piper_kernels.permutation import Permutation
from piper_kernels.testing.experts import (
    DIFFERENTIABLE,
    ExpertsInputs,
    make_experts_inputs,
    run_experts,
)
from piper_kernels.testing.memory import peak_bytes, saved_for_backward

T, H, I, E, K = 12, 10, 6, 4, 2
R = T * K


def small_inputs(**options: object) -> ExpertsInputs:
    return make_experts_inputs(T, H, I, E, K, has_gate_up_bias=True, has_down_bias=True, **options)


def call(inputs: ExpertsInputs, **options: object) -> Tensor:
    return experts(
        inputs.x,
        inputs.expert_ids,
        inputs.gates,
        inputs.gate_up_proj,
        inputs.down_proj,
        gate_up_bias=inputs.gate_up_bias,
        down_bias=inputs.down_bias,
        **options,
    )


def require_grad(inputs: ExpertsInputs, *names: str) -> list[Tensor]:
    return [getattr(inputs, name).requires_grad_() for name in names]


@pytest.fixture
def gemms(monkeypatch: pytest.MonkeyPatch) -> list[tuple[int, int, int]]:
    """(m, k, n) of every GEMM that the CPU path runs from now on."""
    sizes: list[tuple[int, int, int]] = []
    real = matrices.matmul_into

    def spy(out: Tensor, left: Tensor, right: Tensor) -> None:
        sizes.append((*left.shape, right.shape[1]))
        real(out, left, right)

    monkeypatch.setattr(matrices, "matmul_into", spy)
    monkeypatch.setattr(experts_backward, "matmul_into", spy)
    return sizes


def num_multiplications(gemms: list[tuple[int, int, int]]) -> int:
    return sum(m * k * n for m, k, n in gemms)


GATE_UP, DOWN = R * 2 * I * H, R * I * H


@pytest.mark.parametrize(
    ("wanted", "backward"),
    [
        (DIFFERENTIABLE, 2 * GATE_UP + 2 * DOWN),
        # field report A57: frozen experts, frozen router, one weight frozen
        (("x", "gates"), GATE_UP + DOWN),
        (("x", "gate_up_proj", "down_proj"), 2 * GATE_UP + 2 * DOWN),
        (("gate_up_proj",), GATE_UP + DOWN),
        (("down_proj",), DOWN),
        (("gates",), DOWN),
        (("x", "gates", "gate_up_proj"), 2 * GATE_UP + DOWN),
        (("gate_up_bias",), DOWN),
        (("down_bias",), 0),
    ],
    ids=str,
)
def test_experts_backward_skips_what_nobody_wants(
    gemms: list[tuple[int, int, int]], wanted: tuple[str, ...], backward: int
) -> None:
    expected = run_experts(experts, small_inputs())
    inputs = small_inputs()
    leaves = require_grad(inputs, *wanted)
    gemms.clear()
    y = call(inputs)
    assert num_multiplications(gemms) == GATE_UP + DOWN
    gemms.clear()
    y.backward(inputs.grad_y)
    assert num_multiplications(gemms) == backward
    for name, leaf in zip(wanted, leaves, strict=True):
        assert torch.equal(leaf.grad, expected[name]), name
    for name in set(DIFFERENTIABLE) - set(wanted):
        assert getattr(inputs, name).grad is None


def test_experts_backward_in_two_parts() -> None:
    # A79: one graph, asked twice: first for x, then for the parameters
    inputs = small_inputs()
    leaves = require_grad(inputs, *DIFFERENTIABLE)
    y = call(inputs)
    parts = [
        *torch.autograd.grad(y, leaves[:1], inputs.grad_y, retain_graph=True),
        *torch.autograd.grad(y, leaves[1:], inputs.grad_y),
    ]
    expected = run_experts(experts, small_inputs())
    for name, part in zip(DIFFERENTIABLE, parts, strict=True):
        assert torch.equal(part, expected[name]), name
        assert getattr(inputs, name).grad is None


@pytest.mark.parametrize("save", ["preact", "x"])
def test_experts_backward_repeats_the_first_gemm_only_if_told(
    gemms: list[tuple[int, int, int]], save: str
) -> None:
    inputs = small_inputs()
    require_grad(inputs, *DIFFERENTIABLE)
    y = call(inputs, save=save)
    gemms.clear()
    y.backward(inputs.grad_y)
    repeated = GATE_UP if save == "x" else 0
    assert num_multiplications(gemms) == 2 * GATE_UP + 2 * DOWN + repeated


@pytest.mark.parametrize("save", ["preact", "x"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_experts_saved_bytes(save: str, dtype: torch.dtype) -> None:
    # the bound: T*H + R*2I elements, indices and gates, parameters not counted
    inputs = small_inputs(dtype=dtype)
    leaves = require_grad(inputs, *DIFFERENTIABLE)
    kept = saved_for_backward(lambda: call(inputs, save=save), leaves[2:])
    elements = T * H + (R * 2 * I if save == "preact" else 0)
    num_indices = 3 * R + 2 * E + 1
    assert sum(t.nbytes for t in kept) == elements * dtype.itemsize + R * 4 + num_indices * 4
    assert sum(t.numel() for t in kept if not t.is_floating_point()) == num_indices


def test_experts_keeps_nothing_without_gradients() -> None:
    inputs = small_inputs()
    assert saved_for_backward(lambda: call(inputs)) == []
    require_grad(inputs, *DIFFERENTIABLE)
    with torch.no_grad():
        assert saved_for_backward(lambda: call(inputs)) == []
    assert not call(small_inputs()).requires_grad


def test_experts_peak_memory_without_gradients() -> None:
    # the pre-activation of all rows is 64 times that of one piece of work, and is not allocated
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        inputs = make_experts_inputs(1024, 8, 64, 64, 4)
        num_rows, size = 1024 * 4, 4
        training = inputs.map(lambda _, t: t.clone().requires_grad_())
        preact_bytes = num_rows * 2 * 64 * size
        peak = peak_bytes(lambda: call(inputs))
        assert peak < preact_bytes / 2
        assert peak_bytes(lambda: call(training)) > preact_bytes
    finally:
        torch.set_num_threads(before)


def test_experts_backward_allocates_what_the_raw_backward_does() -> None:
    # in particular no gradient of zeros for the pre-activation, which is an output of the op
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        inputs = make_experts_inputs(512, 8, 64, 4, 2)
        weights = ExpertsWeights(
            gate_up_proj=inputs.gate_up_proj,
            down_proj=inputs.down_proj,
            gate_up_bias=None,
            down_bias=None,
            layout=inputs.layout,
            activation=inputs.activation,
        )
        permutation = Permutation.from_expert_ids(inputs.expert_ids, 4)
        arguments = (inputs.x, inputs.gates, permutation, weights)
        _, preact = experts_forward(*arguments, needs_preact=True)
        wants = ("x", "gates", "gate_up_proj", "down_proj")
        needs = ExpertsNeeds(**{name: name in wants for name in DIFFERENTIABLE})
        raw = peak_bytes(lambda: raw_backward(inputs.grad_y, *arguments, preact, needs=needs))
        leaves = require_grad(inputs, *wants)
        y = experts(leaves[0], inputs.expert_ids, *leaves[1:])
        peak = peak_bytes(lambda: torch.autograd.grad(y, leaves, inputs.grad_y))
    finally:
        torch.set_num_threads(before)
    assert peak < raw + 1024


def test_experts_function_keeps_the_preactivation_out_of_the_graph() -> None:
    inputs = small_inputs()
    leaves = require_grad(inputs, *DIFFERENTIABLE)
    maps = list(maps_of(build_permutation(inputs.expert_ids, E, "cpu")))
    form = ([False, False, True], "silu", [1.0, float("inf"), 0.0])
    y, preact = ExpertsFunction.apply(*leaves, maps, *form, True, "cpu")
    assert torch.equal(y, call(small_inputs()))
    assert y.requires_grad
    assert preact.shape == (R, 2 * I)
    assert not preact.requires_grad


@pytest.mark.parametrize(
    "mode", [torch.no_grad, torch.inference_mode], ids=["no_grad", "inference"]
)
@pytest.mark.parametrize("num_threads", [1, 2])
def test_experts_without_autograd(mode: Callable[[], object], num_threads: int) -> None:
    before = torch.get_num_threads()
    inputs = small_inputs()
    expected = run_experts(experts, inputs)["y"]
    require_grad(inputs, *DIFFERENTIABLE)
    torch.set_num_threads(num_threads)
    try:
        with mode():
            y = call(inputs)
            # inference tensors as inputs, too
            assert call(dataclasses.replace(inputs, x=inputs.x * 1)).equal(y)
    finally:
        torch.set_num_threads(before)
    assert not y.requires_grad
    assert torch.equal(y, expected)


def test_experts_refuses_a_second_derivative() -> None:
    inputs = small_inputs()
    leaves = require_grad(inputs, *DIFFERENTIABLE)
    (grad_x,) = torch.autograd.grad(call(inputs).sum(), leaves[:1], create_graph=True)
    with pytest.raises(BackendError, match=r"experts: a second derivative .*backend='reference'"):
        grad_x.sum().backward()
    y = call(inputs, backend="reference")
    (grad_x,) = torch.autograd.grad(y.sum(), leaves[:1], create_graph=True)
    grad_x.sum().backward()
    assert leaves[0].grad.isfinite().all()


def test_experts_reference_backend_is_the_oracle() -> None:
    inputs = small_inputs(dtype=torch.float64)
    fast = run_experts(experts, inputs)
    plain = run_experts(experts, inputs, backend="reference")
    for name, value in plain.items():
        torch.testing.assert_close(fast[name], value, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("use_reentrant", [True, False])
def test_experts_activation_checkpointing(use_reentrant: bool) -> None:
    # field report A46
    expected = run_experts(experts, small_inputs())
    inputs = small_inputs()
    leaves = require_grad(inputs, *DIFFERENTIABLE)

    def block(*tensors: Tensor) -> Tensor:
        return call(dataclasses.replace(inputs, **dict(zip(DIFFERENTIABLE, tensors, strict=True))))

    y = checkpoint(block, *leaves, use_reentrant=use_reentrant)
    y.backward(inputs.grad_y)
    assert torch.equal(y, expected["y"])
    for name, leaf in zip(DIFFERENTIABLE, leaves, strict=True):
        assert torch.equal(leaf.grad, expected[name]), name


def test_experts_torch_func() -> None:
    # field report A48
    inputs = small_inputs()
    expected = run_experts(experts, inputs)
    tensors = [getattr(inputs, name) for name in DIFFERENTIABLE]

    def loss(*tensors: Tensor) -> Tensor:
        changed = dataclasses.replace(inputs, **dict(zip(DIFFERENTIABLE, tensors, strict=True)))
        return (call(changed) * inputs.grad_y).sum()

    grads = torch.func.grad(loss, argnums=tuple(range(6)))(*tensors)
    for name, grad in zip(DIFFERENTIABLE, grads, strict=True):
        assert torch.equal(grad, expected[name]), name
    with pytest.raises(BackendError, match="second derivative"):
        torch.func.grad(lambda x: torch.func.grad(loss)(x, *tensors[1:]).sum())(tensors[0])


def test_experts_refuses_forward_mode() -> None:
    inputs = small_inputs()
    with pytest.raises(NotImplementedError, match="forward mode AD"):
        torch.func.jvp(lambda x: call(dataclasses.replace(inputs, x=x)), (inputs.x,), (inputs.x,))


def test_experts_vmap() -> None:
    # per-sample gradients; a vmap over weights (an ensemble); the sum of a vmap differentiated
    samples = [small_inputs(seed=seed) for seed in range(3)]
    shared = samples[0]

    def loss(x: Tensor, ids: Tensor, gates: Tensor, w1: Tensor, w2: Tensor) -> Tensor:
        return (experts(x, ids, gates, w1, w2) * shared.grad_y).sum()

    def batch(name: str) -> Tensor:
        return torch.stack([getattr(sample, name) for sample in samples])

    weights = (shared.gate_up_proj, shared.down_proj)
    per_sample = torch.func.grad(loss, argnums=(0, 2, 3, 4))
    batched = [batch(name) for name in ("x", "expert_ids", "gates")]
    actual = torch.vmap(per_sample, in_dims=(0, 0, 0, None, None))(*batched, *weights)
    for i, sample in enumerate(samples):
        one = per_sample(sample.x, sample.expert_ids, sample.gates, *weights)
        for grad, expected in zip(actual, one, strict=True):
            assert torch.equal(grad[i], expected)

    arguments = (shared.x, shared.expert_ids, shared.gates)
    ensemble = torch.vmap(lambda w1, w2: experts(*arguments, w1, w2))
    y = ensemble(batch("gate_up_proj"), batch("down_proj"))
    for i, sample in enumerate(samples):
        assert torch.equal(y[i], experts(*arguments, sample.gate_up_proj, sample.down_proj))

    def total(w1: Tensor, w2: Tensor) -> Tensor:
        return torch.vmap(loss, in_dims=(0, 0, 0, None, None))(*batched, w1, w2).sum()

    summed = torch.func.grad(total, argnums=(0, 1))(*weights)
    torch.testing.assert_close(summed[0], actual[2].sum(0))
    torch.testing.assert_close(summed[1], actual[3].sum(0))


@pytest.mark.parametrize("backend", ["aot_eager", pytest.param("inductor", marks=pytest.mark.slow)])
@pytest.mark.parametrize("save", ["preact", "x"])
def test_experts_compiles_without_breaks(backend: str, save: str) -> None:
    # field report A49: no token, one token, changing counts; one compilation for every T >= 2
    torch._dynamo.reset()
    counter = CompileCounterWithBackend(backend)

    def run(x: Tensor, ids: Tensor, gates: Tensor, *weights: Tensor) -> Tensor:
        w1, w2, b1, b2 = weights
        return experts(x, ids, gates, w1, w2, gate_up_bias=b1, down_bias=b2, save=save)

    compiled = torch.compile(run, fullgraph=True, dynamic=True, backend=counter)
    counts = []
    for num_tokens in (16, 17, 64, 33, 5, 1, 0):
        inputs = make_experts_inputs(
            num_tokens, H, I, E, K, routing="skewed", has_gate_up_bias=True, has_down_bias=True
        )
        expected = run_experts(experts, inputs)
        leaves = require_grad(inputs, *DIFFERENTIABLE)
        y = compiled(leaves[0], inputs.expert_ids, *leaves[1:])
        grads = torch.autograd.grad(y, leaves, inputs.grad_y)
        assert torch.equal(y, expected["y"])
        for name, grad in zip(DIFFERENTIABLE, grads, strict=True):
            assert torch.equal(grad, expected[name]), name
        counts.append(counter.frame_count)
    # once for all T >= 2; torch itself compiles anew for sizes 1 and 0
    assert counts[0] == counts[4] == counts[5] - 1 == counts[6] - 2


def test_experts_compiles_without_gradients() -> None:
    torch._dynamo.reset()
    inputs = small_inputs()
    expected = call(inputs)
    compiled = torch.compile(lambda: call(inputs), fullgraph=True, backend="aot_eager")
    with torch.no_grad():
        assert torch.equal(compiled(), expected)


def test_experts_fake_tensors_tell_the_truth() -> None:
    # torch.library's own checks of schema, fake implementation and autograd registration
    inputs = make_experts_inputs(5, 8, 6, 3, 2)
    meta = inputs.map(lambda _, tensor: tensor.to("meta"))
    y = experts(meta.x, inputs.expert_ids.to("meta"), meta.gates, meta.gate_up_proj, meta.down_proj)
    assert y.device.type == "meta"
    assert y.shape == inputs.x.shape
