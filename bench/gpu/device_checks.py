"""Checks that need a device: equal bits, far offsets, streams, other devices, captured graphs."""

from collections.abc import Callable

import torch
from torch import Tensor

from bench.gpu.comparing import assert_close, to_device
from bench.gpu.device import Device
from bench.gpu.part_log import NotMeasured, Row
from piper_kernels import functional
from piper_kernels.reference.experts import experts as reference_experts
from piper_kernels.testing import (
    ExpertsInputs,
    make_experts_inputs,
    run_experts,
)

NUM_EQUAL_RUNS = 20
INT32_LIMIT = 2**31


def _inputs(device: Device, where: torch.device | None = None) -> ExpertsInputs:
    sizes = (9, 16, 16, 3, 2) if device.is_dry else (2048, 512, 384, 16, 4)
    inputs = make_experts_inputs(*sizes, routing="skewed", dtype=torch.bfloat16)
    return to_device(inputs, where or device.torch_device)


def _run(inputs: ExpertsInputs) -> dict[str, Tensor]:
    return run_experts(functional.experts, inputs, backend="triton")


def _assert_same(first: dict[str, Tensor], other: dict[str, Tensor], what: str) -> None:
    for name, value in first.items():
        assert torch.equal(value.cpu(), other[name].cpu()), f"{name} differs {what}"


def check_equal_bits(device: Device) -> Row:
    """Equal inputs give equal bits, output and every gradient."""
    inputs = _inputs(device)
    first = _run(inputs)
    num_runs = 3 if device.is_dry else NUM_EQUAL_RUNS
    for number in range(1, num_runs):
        _assert_same(first, _run(inputs), f"in run {number + 1}")
    return {"num_runs": num_runs}


def check_far_offsets(device: Device) -> Row:
    """A pre-activation of more than 2^31 elements: its first and last tokens are right."""
    hidden, inter, num_experts, top_k = (16, 16, 3, 2) if device.is_dry else (256, 1024, 8, 8)
    num_tokens = 12 if device.is_dry else INT32_LIMIT // (2 * inter * top_k) + 4096
    num_elements = num_tokens * top_k * 2 * inter
    # pre-activation and its gradient, two activations, three tensors of rows
    needed = num_tokens * top_k * (6 * inter + 3 * hidden) * 2 * 5 // 4
    if needed > device.free_bytes():
        raise NotMeasured(f"needs {needed / 1e9:.0f} GB, {device.free_bytes() / 1e9:.0f} are free")
    where, dtype = device.torch_device, torch.bfloat16
    generator = torch.Generator(where).manual_seed(0)

    def normal(*shape: int, scale: float = 1.0) -> Tensor:
        return (torch.randn(*shape, generator=generator, device=where) * scale).to(dtype)

    x, grad_y = normal(num_tokens, hidden), normal(num_tokens, hidden)
    weights = (
        normal(num_experts, 2 * inter, hidden, scale=hidden**-0.5),
        normal(num_experts, hidden, inter, scale=inter**-0.5),
    )
    ids = torch.arange(num_tokens * top_k, device=where).view(-1, top_k) % num_experts
    gates = torch.rand(num_tokens, top_k, generator=generator, device=where)
    leaves = x.requires_grad_(), gates.requires_grad_()
    y = functional.experts(leaves[0], ids, leaves[1], *weights, backend="triton")
    grads = torch.autograd.grad(y, leaves, grad_y)
    ends = torch.tensor([0, 1, num_tokens // 2, num_tokens - 2, num_tokens - 1], device=where)

    def expected(compute: torch.dtype) -> dict[str, Tensor]:
        some = x.detach()[ends].to(compute).requires_grad_()
        wide = torch.promote_types(compute, torch.float32)
        some_gates = gates.detach()[ends].to(wide).requires_grad_()
        out = reference_experts(some, ids[ends], some_gates, *(w.to(compute) for w in weights))
        found = torch.autograd.grad(out, (some, some_gates), grad_y[ends].to(compute))
        return {"y": out.detach(), "x": found[0], "gates": found[1]}

    baseline, truth = expected(dtype), expected(torch.float64)
    found = {"y": y.detach(), "x": grads[0], "gates": grads[1]}
    some = {name: value[ends] for name, value in found.items()}
    assert_close(device, dtype, some, baseline, truth)
    return {"num_elements": num_elements}


def check_side_stream(device: Device) -> None:
    """Work on another stream, while this one is busy, gives the same bits."""
    _need_gpu(device)
    inputs = _inputs(device)
    expected = _run(inputs)
    busy = torch.randn(4096, 4096, device=device.torch_device)
    stream = torch.cuda.Stream(device.torch_device)
    stream.wait_stream(torch.cuda.current_stream(device.torch_device))
    for _ in range(20):
        busy = torch.tanh(busy @ busy)
    with torch.cuda.stream(stream):
        found = _run(inputs)
    torch.cuda.current_stream(device.torch_device).wait_stream(stream)
    _assert_same(expected, found, "on a side stream")


def check_other_device(device: Device) -> None:
    """Tensors on a GPU that is not the current one."""
    _need_gpu(device)
    if torch.cuda.device_count() < 2:
        raise NotMeasured("there is one GPU only")
    expected = _run(_inputs(device))
    found = _run(_inputs(device, torch.device("cuda:1")))
    assert found["y"].device.index == 1, "the result is on another device than its inputs"
    _assert_same(expected, found, "on the second GPU")


def check_captured_graph(device: Device) -> None:
    """A forward captured in a graph and replayed on new data; nothing may synchronise."""
    _need_gpu(device)
    inputs = _inputs(device)
    args = inputs.expert_ids, inputs.gates, inputs.gate_up_proj, inputs.down_proj
    x = inputs.x.clone()
    with torch.no_grad():
        functional.experts(x, *args, backend="triton")
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            y = functional.experts(x, *args, backend="triton")
        x.copy_(inputs.grad_y)
        graph.replay()
        expected = functional.experts(inputs.grad_y, *args, backend="triton")
    torch.cuda.synchronize()
    assert torch.equal(y, expected), "a replayed graph differs from a call"


def _need_gpu(device: Device) -> None:
    if not device.is_gpu:
        raise NotMeasured("needs a GPU")


CHECKS: dict[str, Callable[[Device], Row | None]] = {
    "equal bits in every run": check_equal_bits,
    "side stream": check_side_stream,
    "captured graph": check_captured_graph,
    "second device": check_other_device,
    "offsets beyond 2^31": check_far_offsets,
}
