"""Routing under autocast, tracing, export and recomputation: no host sync, no state."""

import ast
import dataclasses
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import checkpoint

import piper_kernels
from piper_kernels.balance import balance_loss, updated_correction_bias, z_loss
from piper_kernels.config import NonFinite, RouterConfig, RouterKind
from piper_kernels.errors import RoutingError
from piper_kernels.routing import Routing, apply_capacity, apply_jitter, count_experts, route

KINDS: tuple[RouterKind, ...] = ("softmax_topk", "topk_softmax", "sigmoid_topk")
GROUPED = RouterConfig(
    kind="sigmoid_topk",
    scaling_factor=2.5,
    num_groups=4,
    num_selected_groups=2,
    group_score="top2_sum",
)


def everything(logits: Tensor, mask: Tensor, bias: Tensor) -> tuple[Tensor, ...]:
    """Each function of the two rooms but the jitter, one after the other."""
    routing = route(logits, 3, GROUPED, correction_bias=bias, mask=mask)
    losses = [balance_loss(routing, normalization=n) for n in ("per_slot", "per_token")]
    losses.append(z_loss(routing.logits, mask=routing.mask))
    kept, num_dropped = apply_capacity(routing, 1.25)
    counts = count_experts(kept.expert_ids, kept.num_experts)
    new_bias = updated_correction_bias(bias, counts, 1e-3)
    return routing.expert_ids, kept.expert_ids, kept.gates, num_dropped, counts, new_bias, *losses


class NarrowestFloat(TorchDispatchMode):
    """Remembers the narrowest floating dtype that any operation returned."""

    num_bytes = 8

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        for tensor in torch.utils._pytree.tree_leaves(out):
            if isinstance(tensor, Tensor) and tensor.is_floating_point():
                self.num_bytes = min(self.num_bytes, tensor.element_size())
        return out


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_route_is_not_narrowed_by_autocast(dtype: torch.dtype) -> None:
    logits, mask, bias = torch.randn(12, 8, dtype=dtype), torch.ones(12), torch.zeros(8)
    plain = everything(logits, mask, bias)
    with torch.autocast("cpu", torch.bfloat16), NarrowestFloat() as narrowest:
        cast = everything(apply_jitter(logits, 0.0), mask, bias)
    assert narrowest.num_bytes >= 4
    assert all(torch.equal(a, b) for a, b in zip(plain, cast, strict=True))


@pytest.mark.parametrize("device", ["meta", "fake cpu"])
@pytest.mark.parametrize("non_finite", ["raise", "contain"])
def test_route_never_waits_for_the_device(device: str, non_finite: NonFinite) -> None:
    """On meta and fake tensors whatever needs a value raises; the first lines prove it."""
    with FakeTensorMode() if "fake" in device else torch.device("meta"):
        logits, mask, bias = torch.empty(16, 32), torch.empty(16), torch.empty(32)
        needs_values: list[Callable[[], object]] = [
            lambda: bool(logits.sum() > 0),
            lambda: mask.sum().item(),
            lambda: bias.tolist(),
            lambda: mask.nonzero(),
            lambda: logits[mask > 0],
            lambda: torch.bincount(mask.long()),
        ]
        for needs_value in needs_values:
            with pytest.raises((RuntimeError, NotImplementedError)):
                needs_value()
        out = everything(logits, mask, bias)
        assert {t.device.type for t in out} == {"meta" if device == "meta" else "cpu"}
        config = dataclasses.replace(GROUPED, non_finite=non_finite)
        assert route(logits, 16, config, correction_bias=bias).gates.shape == (16, 16)
        plain = route(logits, 20, RouterConfig(non_finite=non_finite))
        assert plain.gates.shape == (16, 20)


def test_route_shapes_on_meta() -> None:
    logits, mask, bias = (torch.empty(shape, device="meta") for shape in ((16, 32), 16, 32))
    out = everything(apply_jitter(logits, 0.1), mask, bias)
    assert [tuple(t.shape) for t in out] == [(16, 3)] * 3 + [(), (32,), (32,)] + [()] * 3


def compiled(backend: str) -> None:
    """Trace everything in one graph, with T dynamic, and compare with eager."""
    torch._dynamo.reset()

    def losses_and_routing(logits: Tensor, mask: Tensor, bias: Tensor) -> tuple[Routing, Tensor]:
        routing = route(logits, 3, GROUPED, correction_bias=bias, mask=mask)
        kept, _ = apply_capacity(routing, 1.25)
        loss = balance_loss(routing, normalization="per_slot")
        counts = count_experts(kept.expert_ids, 8)
        loss = loss + z_loss(routing.logits, mask=mask) + updated_correction_bias(bias, counts, 1.0)
        return kept, loss

    traced = torch.compile(losses_and_routing, fullgraph=True, dynamic=True, backend=backend)
    for num_tokens in (5, 12):
        logits = torch.randn(num_tokens, 8).round(decimals=1).requires_grad_()
        args = (torch.rand(num_tokens) < 0.8, torch.full((8,), 0.25))
        (kept, loss), (want_kept, want_loss) = (
            traced(logits, *args),
            losses_and_routing(logits, *args),
        )
        assert torch.equal(kept.expert_ids, want_kept.expert_ids)
        torch.testing.assert_close(kept.gates, want_kept.gates)
        torch.testing.assert_close(loss, want_loss)
        got, want = (
            torch.autograd.grad(r.gates.square().sum() + x.sum(), logits)
            for r, x in ((kept, loss), (want_kept, want_loss))
        )
        torch.testing.assert_close(got, want)
    bad = torch.randn(5, 8)
    bad[3, 3] = torch.nan
    with pytest.raises(RuntimeError, match="route: logits must be finite, got NaN or Inf"):
        traced(bad, torch.ones(5) > 0, torch.zeros(8))


def test_route_compiles_into_one_graph() -> None:
    compiled("eager")


@pytest.mark.slow
def test_route_compiles_with_inductor() -> None:
    compiled("aot_eager")
    with warnings.catch_warnings():
        # torch's own imports are deprecated by torch
        warnings.simplefilter("ignore", DeprecationWarning)
        compiled("inductor")
        traced = torch.compile(route, fullgraph=True)
        for num_experts in (9, 61):
            logits = torch.full((7, num_experts), 0.37)
            bias = torch.full((num_experts,), 0.25)
            for kind in KINDS:
                routing = traced(logits, 3, RouterConfig(kind=kind), correction_bias=bias)
                assert routing.expert_ids.tolist() == [[0, 1, 2]] * 7


def test_route_exports() -> None:
    class Router(torch.nn.Module):
        def forward(self, logits: Tensor) -> tuple[Tensor, Tensor]:
            routing = route(logits, 2, RouterConfig())
            return routing.expert_ids, routing.gates

    num_tokens = torch.export.Dim("num_tokens", min=2, max=4096)
    program = torch.export.export(
        Router(), (torch.randn(5, 8),), dynamic_shapes={"logits": {0: num_tokens}}
    )
    logits = torch.randn(11, 8)
    expert_ids, gates = program.module()(logits)
    routing = route(logits, 2, RouterConfig())
    assert torch.equal(expert_ids, routing.expert_ids)
    assert torch.equal(gates, routing.gates)
    with pytest.raises(RuntimeError, match="route: logits must be finite"):
        program.module()(torch.full((4, 8), torch.nan))


@pytest.mark.parametrize("use_reentrant", [False, True])
@pytest.mark.parametrize("is_autocast", [False, True])
def test_route_recomputes_the_same_experts_on_ties(use_reentrant: bool, is_autocast: bool) -> None:
    """A46: constant rows (every expert but two tied), jitter, bf16, autocast entered inside."""
    weight = torch.zeros(8, 4, dtype=torch.bfloat16)
    weight[5:7] = 0.5
    weight.requires_grad_()
    x = torch.ones(6, 4, dtype=torch.bfloat16, requires_grad=True)
    seen: list[Tensor] = []

    def block(x: Tensor) -> Tensor:
        with torch.autocast("cpu", torch.bfloat16, enabled=is_autocast):
            logits = torch.nn.functional.linear(apply_jitter(x, 0.1), weight)
            routing = route(logits, 3, RouterConfig(kind="sigmoid_topk"))
        seen.append(routing.expert_ids)
        return routing.gates * torch.arange(1, 4)

    state = torch.get_rng_state()
    grads = []
    for wrap in (False, True):
        torch.set_rng_state(state)
        y = checkpoint(block, x, use_reentrant=use_reentrant) if wrap else block(x)
        y.sum().backward()
        grads.append((x.grad, weight.grad))
        x.grad = weight.grad = None
    assert all(torch.equal(ids, seen[0]) for ids in seen)
    assert len(seen) == 3
    assert all(torch.equal(a, b) for a, b in zip(*grads, strict=True))
    assert (seen[0][:, 2] == 0).all()


def test_rooms_keep_no_state() -> None:
    """A43: module globals are constants, functions and classes; calls do not see one another."""
    package = Path(piper_kernels.__file__).parent
    for room in ("choice", "routing", "balance", "permutation"):
        for node in ast.parse((package / f"{room}.py").read_text()).body:
            kinds = (ast.Import, ast.ImportFrom, ast.FunctionDef, ast.ClassDef, ast.Expr)
            is_constant = (
                isinstance(node, ast.Assign)
                and isinstance(node.value, ast.Constant | ast.Tuple | ast.Subscript | ast.BinOp)
                and all(isinstance(t, ast.Name) and t.id[0].isupper() for t in node.targets)
            )
            assert isinstance(node, kinds) or is_constant, f"{room}, line {node.lineno}"
            assert not any(isinstance(n, ast.Global) for n in ast.walk(node))
    first, second = torch.randn(2, 6, 8)

    def loss(logits: Tensor) -> Tensor:
        return balance_loss(route(logits, 2, RouterConfig()), normalization="per_slot")

    wanted = loss(first)
    for _ in range(10):
        loss(second)
    with pytest.raises(RoutingError):
        loss(second / 0)
    assert torch.equal(loss(first), wanted)
