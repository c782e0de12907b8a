"""Routing: precision, masks, non-finite logits, no host sync, jitter, capacity, counts."""

import ast
import dataclasses
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import checkpoint

import piper_kernels
from piper_kernels.balance import balance_loss, updated_correction_bias, z_loss
from piper_kernels.config import NonFinite, RouterConfig, RouterKind
from piper_kernels.errors import ConfigError, DeviceError, DtypeError, RoutingError, ShapeError
from piper_kernels.permutation import Permutation
from piper_kernels.routing import (
    Routing,
    apply_capacity,
    apply_jitter,
    count_experts,
    route,
)

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


# --- what comes out ------------------------------------------------------------------------------


def test_routing_example_of_the_docstring() -> None:
    routing = route(torch.tensor([[0.0, 2.0, 1.0]]), 2, RouterConfig())
    assert (routing.num_tokens, routing.num_experts, routing.top_k) == (1, 3, 2)
    assert routing.expert_ids.tolist() == [[1, 2]]
    torch.testing.assert_close(routing.gates, torch.tensor([[0.7311, 0.2689]]), rtol=0, atol=5e-5)
    assert routing.mask is None
    assert routing.kind == "softmax_topk"


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32, torch.float64])
def test_route_computes_in_fp32_or_wider(kind: RouterKind, dtype: torch.dtype) -> None:
    """A20, A30: narrow logits are read as they are, and nothing is rounded to their dtype."""
    logits = torch.randn(32, 8).to(dtype).requires_grad_()
    routing = route(logits, 2, RouterConfig(kind=kind))
    wide = torch.float64 if dtype == torch.float64 else torch.float32
    upcast = route(logits.detach().to(wide), 2, RouterConfig(kind=kind))
    assert (routing.gates.dtype, routing.logits.dtype) == (wide, wide)
    assert torch.equal(routing.logits, logits.to(wide))
    assert torch.equal(routing.expert_ids, upcast.expert_ids)
    assert torch.equal(routing.gates, upcast.gates)
    routing.gates[:, 0].sum().backward()
    assert logits.grad.dtype == dtype
    assert logits.grad.abs().sum() > 0


def test_route_decides_by_the_fp32_value() -> None:
    """A20: 1.000 and 1.001 are one bf16 number."""
    logits = torch.tensor([[1.0, 1.001, 0.0, 0.0]])
    assert logits[0, 0].bfloat16() == logits[0, 1].bfloat16()
    routing = route(logits, 1, RouterConfig(is_normalized=False))
    assert routing.expert_ids.tolist() == [[1]]
    assert routing.gates.dtype == torch.float32


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


@pytest.mark.parametrize("kind", KINDS)
def test_route_takes_any_strides_and_changes_nothing(kind: RouterKind) -> None:
    base = torch.randn(24, 24)
    for logits in (base.t(), base[:, ::3], base[:1].expand(5, 24)):
        before = logits.clone()
        a = route(logits, 2, RouterConfig(kind=kind))
        b = route(logits.contiguous(), 2, RouterConfig(kind=kind))
        assert torch.equal(a.expert_ids, b.expert_ids)
        assert torch.equal(a.gates, b.gates)
        assert torch.equal(logits, before)


@pytest.mark.parametrize("num_tokens", [0, 1])
@pytest.mark.parametrize("config", [RouterConfig(), GROUPED], ids=["plain", "grouped"])
@pytest.mark.parametrize("has_mask", [False, True])
def test_route_no_token_or_one(num_tokens: int, config: RouterConfig, has_mask: bool) -> None:
    logits = torch.randn(num_tokens, 8, requires_grad=True)
    mask = torch.ones(num_tokens) if has_mask else None
    routing = route(logits, 4, config, mask=mask)
    assert routing.expert_ids.shape == routing.gates.shape == (num_tokens, 4)
    kept, num_dropped = apply_capacity(routing, 8.0)
    assert num_dropped == 0
    loss = balance_loss(routing, normalization="per_slot") + z_loss(routing.logits, mask=mask)
    (kept.gates.sum() + loss).backward()
    assert logits.grad.shape == logits.shape
    assert logits.grad.isfinite().all()
    assert count_experts(routing.expert_ids, 8).sum() == 4 * num_tokens
    if num_tokens == 0:
        assert loss == 0


# --- masks ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("config", [RouterConfig(), GROUPED], ids=["plain", "grouped"])
@pytest.mark.parametrize("dtype", [torch.bool, torch.int64, torch.float32])
@pytest.mark.parametrize("padding", ["left", "right", "all"])
def test_route_padding_is_as_if_it_were_not_there(
    config: RouterConfig, dtype: torch.dtype, padding: str
) -> None:
    """A37: B = 2 sequences of 8 with 3 and 0 real tokens, pads filled with 1e4 or NaN."""
    is_real = torch.zeros(2, 8, dtype=torch.bool)
    if padding != "all":
        is_real[0, slice(0, 3) if padding == "right" else slice(-3, None)] = True
    is_real = is_real.reshape(-1)
    logits = torch.randn(16, 8)
    logits[~is_real] = 1e4
    logits[~is_real, 5] = torch.nan
    bias = torch.randn(8)
    logits.requires_grad_()
    padded = route(logits, 2, config, correction_bias=bias, mask=is_real.to(dtype))
    compact_logits = logits.detach()[is_real].requires_grad_()
    compact = route(compact_logits, 2, config, correction_bias=bias)
    assert torch.equal(padded.mask, is_real)
    assert torch.equal(padded.expert_ids[is_real], compact.expert_ids)
    assert torch.equal(padded.gates[is_real], compact.gates)
    assert (padded.expert_ids[~is_real] == 8).all()
    assert (padded.gates[~is_real] == 0).all()
    assert torch.equal(count_experts(padded.expert_ids, 8), count_experts(compact.expert_ids, 8))
    upstream = torch.randn(16, 2)
    (padded.gates * upstream).sum().backward()
    (compact.gates * upstream[is_real]).sum().backward()
    assert torch.equal(logits.grad[is_real], compact_logits.grad)
    assert (logits.grad[~is_real] == 0).all()


def test_route_mask_none_is_all_ones() -> None:
    logits = torch.randn(6, 8)
    a, b = route(logits, 2, GROUPED), route(logits, 2, GROUPED, mask=torch.ones(6))
    assert torch.equal(a.expert_ids, b.expert_ids)
    assert torch.equal(a.gates, b.gates)


# --- non-finite logits ---------------------------------------------------------------------------

NON_FINITE = [torch.nan, torch.inf, -torch.inf]


@pytest.mark.parametrize("value", NON_FINITE)
def test_route_refuses_logits_that_are_not_finite(value: float) -> None:
    logits = torch.randn(9, 8)
    logits[4, 1] = logits[7, 0] = value
    with pytest.raises(
        RoutingError,
        match=r"route: logits must be finite, got NaN or Inf in 2 of 9 tokens, first in token 4\. "
        r".*non_finite='contain'",
    ):
        route(logits, 2, RouterConfig())
    # padding may hold anything
    mask = torch.ones(9)
    mask[4] = mask[7] = 0
    assert route(logits, 2, RouterConfig(), mask=mask).gates.isfinite().all()
    mask[7] = 1
    with pytest.raises(RoutingError, match="in 1 of 9 tokens, first in token 7"):
        route(logits, 2, RouterConfig(), mask=mask)


@pytest.mark.parametrize("value", NON_FINITE)
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("num_bad", [1, 8])
def test_route_contains_logits_that_are_not_finite(
    value: float, kind: RouterKind, num_bad: int
) -> None:
    logits = torch.randn(5, 8)
    logits[2, :num_bad] = value
    is_good = torch.tensor([True, True, False, True, True])
    logits.requires_grad_()
    config = RouterConfig(kind=kind, non_finite="contain")
    routing = route(logits, 2, config)
    clean = route(logits.detach()[is_good], 2, config)
    assert torch.equal(routing.mask, is_good)
    assert routing.expert_ids.max() <= 8
    assert routing.expert_ids.min() >= 0
    assert routing.expert_ids[2].tolist() == [8, 8]
    assert routing.gates[2].tolist() == [0.0, 0.0]
    assert torch.equal(routing.expert_ids[is_good], clean.expert_ids)
    assert torch.equal(routing.gates[is_good], clean.gates)
    losses = [
        balance_loss(routing, normalization="per_token"),
        z_loss(routing.logits, mask=routing.mask),
    ]
    wanted = [balance_loss(clean, normalization="per_token"), z_loss(clean.logits)]
    torch.testing.assert_close(losses, wanted)
    (routing.gates.square().sum() + sum(losses)).backward()
    assert logits.grad.isfinite().all()
    assert (logits.grad[2] == 0).all()
    assert (logits.grad[is_good] != 0).any()


@given(st.integers(0, 40), st.integers(1, 40), st.integers(0, 2**31 - 1), st.data())
def test_route_ids_are_always_in_range(
    num_tokens: int, num_experts: int, seed: int, data: st.DataObject
) -> None:
    top_k = data.draw(st.integers(1, num_experts))
    generator = torch.Generator().manual_seed(seed)
    logits = torch.randn(num_tokens, num_experts, generator=generator) * 100
    odd = torch.tensor([torch.nan, torch.inf, -torch.inf, 3e38, -3e38, 0.0])
    where = torch.rand(logits.shape, generator=generator) < 0.1
    logits = torch.where(where, odd[torch.randint(6, logits.shape, generator=generator)], logits)
    for kind in KINDS:
        routing = route(logits, top_k, RouterConfig(kind=kind, non_finite="contain"))
        Permutation.from_expert_ids(routing.expert_ids, num_experts).check(routing.expert_ids)
        assert routing.gates.isfinite().all()
        is_sentinel = routing.expert_ids >= num_experts
        assert torch.equal(is_sentinel, ~routing.mask[:, None].expand_as(is_sentinel))
        assert (routing.gates[is_sentinel] == 0).all()
        in_order = routing.expert_ids.sort(-1).values
        assert ((in_order.diff(dim=-1) > 0) | (in_order[:, 1:] == num_experts)).all()


# --- no host sync, tracing -----------------------------------------------------------------------


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
    compiled("aot_eager")


@pytest.mark.slow
def test_route_compiles_with_inductor() -> None:
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


# --- jitter --------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32, torch.float64])
def test_apply_jitter_bounds_mean_and_gradient(dtype: torch.dtype) -> None:
    x = torch.ones(20_000, 2, dtype=dtype, requires_grad=True)
    before = x.detach().clone()
    y = apply_jitter(x, 0.1)
    assert torch.equal(x, before)
    assert y.dtype == dtype
    assert y.data_ptr() != x.data_ptr()
    assert 0.89 < y.min() < 0.91
    assert 1.09 < y.max() < 1.11
    assert abs(y.double().mean() - 1) < 2e-3
    y.sum().backward()
    # x is 1, so the output is the noise that the gradient is multiplied by
    assert torch.equal(x.grad, y.detach())
    assert not torch.equal(apply_jitter(x, 0.1), y)


def test_apply_jitter_zero_changes_nothing() -> None:
    x = torch.randn(5, 3)
    assert torch.equal(apply_jitter(x, 0.0), x)
    with pytest.raises(ConfigError, match=r"apply_jitter: jitter must be in \[0, 1\), got 1\.0"):
        apply_jitter(x, 1.0)
    with pytest.raises(DtypeError, match=r"apply_jitter: x must be one of float32, .* got int64"):
        apply_jitter(torch.ones(2, dtype=torch.int64), 0.1)


# --- capacity ------------------------------------------------------------------------------------


def loop_capacity(routing: Routing, capacity: int) -> list[list[int]]:
    """Expert ids after dropping, by the book."""
    ids, gates = routing.expert_ids.tolist(), routing.gates.tolist()
    for e in range(routing.num_experts):
        takers = [(t, k) for t, row in enumerate(ids) for k, i in enumerate(row) if i == e]
        for t, k in sorted(takers, key=lambda s: (-gates[s[0]][s[1]], s[0]))[capacity:]:
            ids[t][k] = routing.num_experts
    return ids


@pytest.mark.parametrize("kind", KINDS)
def test_apply_capacity_drops_the_later_of_equals(kind: RouterKind) -> None:
    """A66: five equal tokens on one expert with room for four; token 5 gets nothing."""
    logits = torch.tensor([[0.3, 0.0, 0.0, 0.0]]).repeat(5, 1).requires_grad_()
    routing = route(logits, 1, RouterConfig(kind=kind, is_normalized=False))
    kept, num_dropped = apply_capacity(routing, 3.2)
    assert kept.expert_ids.flatten().tolist() == [0, 0, 0, 0, 4]
    assert num_dropped == 1
    assert num_dropped.shape == ()
    assert torch.equal(kept.gates[:4], routing.gates[:4])
    assert kept.gates[4] == 0
    kept.gates.sum().backward()
    assert (logits.grad[4] == 0).all()
    assert torch.equal(kept.logits, routing.logits)


def test_apply_capacity_drops_the_lowest_gate_first() -> None:
    logits = torch.tensor([[1.0, 0.0], [3.0, 0.0], [2.0, 0.0], [0.0, 1.0]])
    routing = route(logits, 1, RouterConfig(is_normalized=False))
    kept, num_dropped = apply_capacity(routing, 1.0)
    assert kept.expert_ids.flatten().tolist() == [2, 0, 0, 1]
    assert num_dropped == 1


def test_apply_capacity_leaves_the_other_gate_alone() -> None:
    """A66: K = 2 with one of the two dropped is not normalised anew."""
    logits = torch.tensor([[2.0, 1.0, 0.0], [3.0, 1.0, 0.0], [2.5, 0.0, 1.0]])
    routing = route(logits, 2, RouterConfig())
    kept, num_dropped = apply_capacity(routing, 1.0)
    assert kept.expert_ids.tolist() == [[3, 1], [0, 1], [0, 2]]
    assert num_dropped == 1
    assert kept.gates[0, 0] == 0
    assert kept.gates[0, 1] == routing.gates[0, 1]


@pytest.mark.parametrize("num_tokens", [1, 5])
@pytest.mark.parametrize("factor", [2.0, 4.0, 8.0, 1e12])
def test_apply_capacity_with_room_for_all(num_tokens: int, factor: float) -> None:
    """A66: E / K = 2 and more equals no dropping, also beyond T."""
    routing = route(torch.ones(num_tokens, 4), 2, RouterConfig())
    kept, num_dropped = apply_capacity(routing, factor)
    assert num_dropped == 0
    assert torch.equal(kept.expert_ids, routing.expert_ids)
    assert torch.equal(kept.gates, routing.gates)


@pytest.mark.parametrize(
    ("factor", "num_tokens", "num_kept"),
    # 10 * 1.1 is 11.000000000000002 in floating point; a capacity is never 0
    [(1.1, 10, 11), (0.7, 10, 7), (2 / 3, 3, 2), (0.75, 3, 3), (1e-9, 3, 1)],
)
def test_apply_capacity_rounds_up(factor: float, num_tokens: int, num_kept: int) -> None:
    routing = route(torch.ones(num_tokens * 2, 2), 1, RouterConfig())
    kept, num_dropped = apply_capacity(routing, factor)
    assert count_experts(kept.expert_ids, 2).tolist() == [num_kept, 0]
    assert num_dropped == num_tokens * 2 - num_kept


def test_apply_capacity_counts_real_tokens_only() -> None:
    """A37: padding neither fills an expert nor makes room."""
    logits = torch.randn(12, 4)
    mask = torch.rand(12) < 0.5
    mask[0] = True
    padded, num_dropped = apply_capacity(route(logits, 2, RouterConfig(), mask=mask), 0.5)
    compact, compact_dropped = apply_capacity(route(logits[mask], 2, RouterConfig()), 0.5)
    assert torch.equal(padded.expert_ids[mask], compact.expert_ids)
    assert (padded.expert_ids[~mask] == 4).all()
    assert num_dropped == compact_dropped
    assert num_dropped > 0


@given(
    st.integers(0, 30),
    st.integers(1, 6),
    st.sampled_from([0.3, 0.5, 1.0, 1.25, 2.0]),
    st.booleans(),
    st.integers(0, 2**31 - 1),
    st.data(),
)
def test_apply_capacity_equals_the_loop(
    num_tokens: int, num_experts: int, factor: float, has_ties: bool, seed: int, data: st.DataObject
) -> None:
    top_k = data.draw(st.integers(1, num_experts))
    generator = torch.Generator().manual_seed(seed)
    logits = torch.randn(num_tokens, num_experts, generator=generator)
    config = RouterConfig(kind=data.draw(st.sampled_from(KINDS)))
    routing = route(logits.round() if has_ties else logits, top_k, config)
    kept, num_dropped = apply_capacity(routing, factor)
    # num_tokens * top_k * factor is exact in units of 0.05
    capacity = -(-round(factor * 20) * num_tokens * top_k // (20 * num_experts))
    assert kept.expert_ids.tolist() == loop_capacity(routing, capacity)
    is_dropped = kept.expert_ids == num_experts
    assert num_dropped == is_dropped.sum()
    assert torch.equal(kept.gates, routing.gates.masked_fill(is_dropped, 0.0))


@pytest.mark.parametrize("factor", [0.0, -1.0, float("nan"), float("inf")])
def test_apply_capacity_refuses_a_bad_factor(factor: float) -> None:
    routing = route(torch.ones(2, 2), 1, RouterConfig())
    with pytest.raises(
        ConfigError, match="apply_capacity: capacity_factor must be a finite number above 0, got"
    ):
        apply_capacity(routing, factor)


# --- counts --------------------------------------------------------------------------------------


@given(st.integers(0, 50), st.integers(1, 9), st.integers(1, 4), st.integers(0, 2**31 - 1))
def test_count_experts_equals_bincount(
    num_tokens: int, num_experts: int, top_k: int, seed: int
) -> None:
    generator = torch.Generator().manual_seed(seed)
    expert_ids = torch.randint(num_experts + 3, (num_tokens, top_k), generator=generator)
    counts = count_experts(expert_ids, num_experts)
    valid = expert_ids[expert_ids < num_experts]
    assert counts.dtype == torch.int64
    assert torch.equal(counts, torch.bincount(valid, minlength=num_experts))
    assert torch.equal(count_experts(expert_ids.int(), num_experts), counts)


def test_count_experts_messages() -> None:
    with pytest.raises(ConfigError, match="count_experts: num_experts must be at least 1, got 0"):
        count_experts(torch.zeros(2, 2, dtype=torch.int64), 0)
    with pytest.raises(DtypeError, match="count_experts: expert_ids must be one of int64, int32"):
        count_experts(torch.zeros(2, 2), 2)


# --- bad input -----------------------------------------------------------------------------------


def test_route_messages() -> None:
    logits = torch.randn(6, 8)
    for bad_logits, error, match in (
        (torch.randn(2, 3, 8), ShapeError, r"logits must have shape \(T, E\).*Flatten \[B, S, E\]"),
        (torch.ones(6, 8, dtype=torch.int64), DtypeError, "logits must be one of float32, bf"),
    ):
        with pytest.raises(error, match=match):
            route(bad_logits, 2, RouterConfig())
    for top_k, match in ((9, "at most num_experts = 8, got 9"), (0, "an integer >= 1, got 0")):
        with pytest.raises(ConfigError, match=f"route: top_k must be {match}"):
            route(logits, top_k, RouterConfig())
    for mask in (torch.ones(2, 3), torch.ones(5)):
        with pytest.raises(
            ShapeError,
            match=r"route: mask must have shape \(T\) = \(6\), got .*mask\.reshape\(-1\)",
        ):
            route(logits, 2, RouterConfig(), mask=mask)
    with pytest.raises(DeviceError, match=r"route: mask must be on the device of logits \(cpu\)"):
        route(logits, 2, RouterConfig(), mask=torch.ones(6, device="meta"))


def test_route_correction_bias_messages() -> None:
    logits, config = torch.randn(6, 8), RouterConfig(has_correction_bias=True)
    with pytest.raises(ConfigError, match=r"route: correction_bias must be given, because config"):
        route(logits, 2, config)
    with pytest.raises(ShapeError, match=r"correction_bias must have shape \(E\) = \(8\), got \(7"):
        route(logits, 2, config, correction_bias=torch.zeros(7))
    with pytest.raises(DtypeError, match=r"route: correction_bias must be one of float32"):
        route(logits, 2, config, correction_bias=torch.zeros(8, dtype=torch.int64))
    narrow = torch.tensor([0.1] * 8).bfloat16()
    wide = route(logits, 2, config, correction_bias=narrow.float())
    assert torch.equal(route(logits, 2, config, correction_bias=narrow).gates, wide.gates)


def test_routing_messages() -> None:
    good = {
        "expert_ids": torch.zeros(4, 2, dtype=torch.int64),
        "gates": torch.ones(4, 2),
        "logits": torch.ones(4, 3),
    }
    Routing(**good)
    for name, value, error, match in (
        ("logits", torch.ones(4), ShapeError, r"logits must have shape \(T, E\)"),
        ("gates", torch.ones(4, 3), ShapeError, r"gates must have shape \(T, K\) = \(4, 2\)"),
        ("expert_ids", torch.zeros(3, 2), ShapeError, r"expert_ids must have shape .* \(4, any\)"),
        ("expert_ids", torch.zeros(4, 2), DtypeError, r"expert_ids must be one of int64, got fl"),
        ("mask", torch.ones(5) > 0, ShapeError, r"mask must have shape \(T\) = \(4\), got \(5\)"),
        ("mask", torch.ones(4), DtypeError, r"mask must be one of bool.* Pass mask != 0"),
    ):
        with pytest.raises(error, match=f"Routing: {match}"):
            Routing(**{**good, name: value})
