"""Routing: precision, masks, non-finite logits, jitter. A..: shared/cases/field_reports."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from piper_kernels.balance import balance_loss, z_loss
from piper_kernels.config import RouterConfig, RouterKind
from piper_kernels.errors import ConfigError, DeviceError, DtypeError, RoutingError, ShapeError
from piper_kernels.permutation import Permutation
from piper_kernels.routing import Routing, apply_capacity, apply_jitter, count_experts, route

KINDS: tuple[RouterKind, ...] = ("softmax_topk", "topk_softmax", "sigmoid_topk")
GROUPED = RouterConfig(
    kind="sigmoid_topk",
    scaling_factor=2.5,
    num_groups=4,
    num_selected_groups=2,
    group_score="top2_sum",
)


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


@pytest.mark.parametrize(
    "mask", [torch.ones(6), torch.tensor([1, 2, 3, -1, 5, 6]), torch.ones(6) / 9]
)
def test_route_mask_none_is_all_that_is_not_zero(mask: Tensor) -> None:
    logits = torch.randn(6, 8)
    a, b = route(logits, 2, GROUPED), route(logits, 2, GROUPED, mask=mask)
    assert torch.equal(a.expert_ids, b.expert_ids)
    assert torch.equal(a.gates, b.gates)


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
    before = x.clone()
    assert torch.equal(apply_jitter(x, 0.0), x)
    assert not torch.equal(apply_jitter(x, 0.5), x)
    assert torch.equal(x, before)
    with pytest.raises(ConfigError, match=r"apply_jitter: jitter must be in \[0, 1\), got 1\.0"):
        apply_jitter(x, 1.0)
    with pytest.raises(DtypeError, match=r"apply_jitter: x must be one of float32, .* got int64"):
        apply_jitter(torch.ones(2, dtype=torch.int64), 0.1)


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
