"""The Triton backend under torch.compile and CUDA graphs: one graph, true shapes, no host sync."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from torch._dynamo.testing import CompileCounterWithBackend
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

from piper_kernels.contracts import ExpertsNeeds
from piper_kernels.functional.experts import experts
from piper_kernels.functional.grouped_gemm import grouped_gemm
from piper_kernels.functional.permute import permute
from piper_kernels.functional.routing_metadata import build_permutation, maps_of
from piper_kernels.functional.unpermute import unpermute
from piper_kernels.testing import make_experts_inputs
from piper_kernels.testing.experts import DIFFERENTIABLE
from piper_kernels.triton.experts import experts_backward, experts_forward
from piper_kernels.triton.routing_metadata import permutation_from_expert_ids

E, K, H, I = 3, 2, 8, 6


def run_layer(x: Tensor, ids: Tensor, gates: Tensor, w1: Tensor, w2: Tensor) -> Tensor:
    return experts(x, ids, gates, w1, w2, backend="triton")


def run_parts(x: Tensor, ids: Tensor, gates: Tensor, w1: Tensor, w2: Tensor) -> Tensor:
    permutation = build_permutation(ids, E, "triton")
    rows = permute(x, permutation, backend="triton")
    preact = grouped_gemm(rows, w1, permutation.expert_offsets, backend="triton")
    act = preact[:, :I] * preact[:, I:]
    out = grouped_gemm(act, w2, permutation.expert_offsets, backend="triton")
    return unpermute(out, gates, permutation, backend="triton")


# A49: changing numbers of tokens
@pytest.mark.parametrize("run", [run_layer, run_parts])
def test_compile_one_graph_for_every_token_count(run: Callable[..., Tensor]) -> None:
    torch._dynamo.reset()
    counter = CompileCounterWithBackend("aot_eager")
    compiled = torch.compile(run, fullgraph=True, dynamic=True, backend=counter)
    counts = []
    # none of them equals another size, which torch would take for the same symbol
    for num_tokens in (19, 23, 37, 64):
        inputs = make_experts_inputs(num_tokens, H, I, E, K)
        weights = inputs.gate_up_proj, inputs.down_proj
        leaves = [t.requires_grad_() for t in (inputs.x, inputs.gates, *weights)]
        arguments = leaves[0], inputs.expert_ids, *leaves[1:]
        expected = run(*arguments)
        y = compiled(*arguments)
        assert torch.equal(y, expected)
        wanted = torch.autograd.grad(expected, leaves, inputs.grad_y)
        for found, grad in zip(torch.autograd.grad(y, leaves, inputs.grad_y), wanted, strict=True):
            assert torch.equal(found, grad)
        counts.append(counter.frame_count)
    # the first call compiles for all numbers of tokens
    assert counts[0] == counts[-1] <= 2


def op_calls() -> dict[str, tuple[Any, ...]]:
    inputs = make_experts_inputs(5, H, I, E, K)
    permutation = build_permutation(inputs.expert_ids, E, "triton")
    maps, offsets = list(maps_of(permutation)), permutation.expert_offsets
    rows = permute(inputs.x, permutation)
    tensors = [inputs.gate_up_proj, inputs.down_proj, None, None]
    form = [False, False, True], "silu", [1.0, float("inf"), 0.0]
    preact = grouped_gemm(rows, inputs.gate_up_proj, offsets)
    forward = inputs.x, inputs.gates, maps, tensors
    return {
        "routing_metadata": (inputs.expert_ids, E, "triton"),
        "permute": (inputs.x, maps, K, "triton"),
        "permute_backward": (rows, maps, K, "triton"),
        "unpermute": (rows, inputs.gates, maps, "triton"),
        "unpermute_backward": (inputs.grad_y, rows, inputs.gates, maps, "triton"),
        "grouped_gemm": (rows, inputs.gate_up_proj, offsets, None, False, "triton"),
        "grouped_gemm_wgrad": (preact, rows, offsets, False, "triton"),
        "experts_forward": (*forward, *form, True, "triton"),
        "experts_backward": (
            *(inputs.grad_y, *forward, preact, *form),
            *([True, True, True, True, False, False], "triton"),
        ),
    }


@pytest.mark.parametrize("name", op_calls())
def test_ops_fake_tensors_tell_the_truth(name: str) -> None:
    # schema, fake shapes, strides and dtypes against the real ones, with symbolic sizes too
    op = getattr(torch.ops.piper, name).default
    utils = ("test_schema", "test_faketensor")
    torch.library.opcheck(op, op_calls()[name], test_utils=utils)


class NoHostSync(TorchDispatchMode):
    """Raises at every op that would wait for a GPU: a value read, a shape that depends on data."""

    FORBIDDEN = ("_local_scalar_dense", "nonzero", "masked_select", "unique", "bincount", "equal.")

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        name = str(func)
        assert not any(word in name for word in self.FORBIDDEN), f"{name} waits for the device"
        kwargs = kwargs or {}
        assert "_to_copy" not in name or kwargs.get("device") is None, f"{name} moves to a device"
        return func(*args, **kwargs)


class NoHostRead(TorchFunctionMode):
    """Raises at what a CPU tensor answers without any op, and a GPU's tensor with a wait."""

    FORBIDDEN = ("tolist", "cpu", "numpy")

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        name = getattr(func, "__name__", "")
        assert name not in self.FORBIDDEN, f"{name} waits for the device"
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize(
    "sync",
    [torch.Tensor.item, torch.Tensor.tolist, torch.Tensor.cpu, bool, torch.Tensor.nonzero],
    ids=["item", "tolist", "cpu", "bool", "nonzero"],
)
def test_no_host_sync_finds_one(sync: Callable[[Tensor], object]) -> None:
    with NoHostRead(), NoHostSync(), pytest.raises(AssertionError, match="waits for the device"):
        sync(torch.ones(1))


# A24: no host sync anywhere on the path, so that a CUDA graph can capture it
@pytest.mark.parametrize("num_tokens", [5, 600], ids=["one_program", "blocks"])
def test_experts_never_wait_for_the_device(
    monkeypatch: pytest.MonkeyPatch, num_tokens: int
) -> None:
    # the kernels themselves are numpy here, and not what is looked at
    launched: list[str] = []
    names = (
        "routing_metadata tile_schedule gate_up grad_act grouped_gemm grouped_gemm_wgrad "
        "grouped_sum permute unpermute chunks"
    )
    for module in names.split():
        monkeypatch.setattr(
            f"piper_kernels.triton.{module}.launch",
            lambda kernel, *_, **__: launched.append(kernel.fn.__name__),
        )
    inputs = make_experts_inputs(num_tokens, H, I, E, K, has_gate_up_bias=True, has_down_bias=True)
    needs = ExpertsNeeds(**dict.fromkeys(DIFFERENTIABLE, True))
    with NoHostRead(), NoHostSync():
        permutation = permutation_from_expert_ids(inputs.expert_ids, E)
        arguments = inputs.x, inputs.gates, permutation, inputs.weights
        _, preact = experts_forward(*arguments, needs_preact=True)
        experts_backward(inputs.grad_y, *arguments, preact, needs=needs)
    assert {"_gate_up_kernel", "_grad_act_kernel", "_wgrad_kernel"} <= set(launched)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
def test_experts_in_a_cuda_graph() -> None:
    inputs = [make_experts_inputs(64, 128, 64, 8, 2, seed=seed) for seed in range(3)]
    held = [tensor.cuda() for tensor in (inputs[0].x, inputs[0].expert_ids, inputs[0].gates)]
    weights = inputs[0].gate_up_proj.cuda(), inputs[0].down_proj.cuda()
    with torch.no_grad():
        experts(*held, *weights)  # compiles outside the capture
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            y = experts(*held, *weights)
        for other in inputs:
            for place, value in zip(held, (other.x, other.expert_ids, other.gates), strict=True):
                place.copy_(value)
            graph.replay()
            assert torch.equal(y, experts(*held, *weights))
