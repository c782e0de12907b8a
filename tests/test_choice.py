"""The arithmetic of routing against a loop over Python floats. A..: shared/cases/field_reports."""

import dataclasses
import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from piper_kernels.choice import (
    MAX_PASSES,
    choose,
    choose_experts,
    exclude_groups,
    has_constant_gates,
)
from piper_kernels.config import RouterConfig, RouterKind
from piper_kernels.routing import route

KINDS: tuple[RouterKind, ...] = ("softmax_topk", "topk_softmax", "sigmoid_topk")


def softmax(values: list[float]) -> list[float]:
    exps = [math.exp(v - max(values)) for v in values]
    return [e / sum(exps) for e in exps]


def sigmoid(value: float) -> float:
    return 1 / (1 + math.exp(-value)) if value > 0 else math.exp(value) / (1 + math.exp(value))


def loop_choose(
    logits: list[float], top_k: int, config: RouterConfig, bias: list[float] | None
) -> tuple[list[int], list[float]]:
    """One token's experts and gates, by the book."""
    num_experts = len(logits)
    if config.kind == "softmax_topk":
        scores = softmax(logits)
    elif config.kind == "sigmoid_topk":
        scores = [sigmoid(z) for z in logits]
    else:
        scores = logits
    order = logits if bias is None else [s + b for s, b in zip(scores, bias, strict=True)]
    summands = scores if bias is None else order
    size = num_experts // config.num_groups
    groups = [range(g * size, (g + 1) * size) for g in range(config.num_groups)]
    if config.group_score == "max":
        group_scores = [max(order[e] for e in group) for group in groups]
    else:
        group_scores = [sum(sorted(summands[e] for e in group)[-2:]) for group in groups]
    best = sorted(range(config.num_groups), key=lambda g: (-group_scores[g], g))
    allowed = [e for g in best[: config.num_selected_groups] for e in groups[g]]
    ids = sorted(allowed, key=lambda e: (-order[e], e))[:top_k]
    gates = [scores[e] for e in ids]
    if config.kind == "topk_softmax":
        gates = softmax(gates)
    elif config.is_normalized:
        gates = [g / sum(gates) for g in gates]
    return ids, [g * config.scaling_factor for g in gates]


def assert_equals_loop(
    logits: Tensor, top_k: int, config: RouterConfig, bias: Tensor | None = None
) -> None:
    expert_ids, gates = choose(logits, top_k, config, bias)
    bias_list = None if bias is None else bias.tolist()
    wanted = [loop_choose(row, top_k, config, bias_list) for row in logits.tolist()]
    assert expert_ids.tolist() == [ids for ids, _ in wanted]
    wanted_gates = torch.tensor([g for _, g in wanted], dtype=torch.float64)
    torch.testing.assert_close(gates.double(), wanted_gates.view(gates.shape), rtol=1e-6, atol=1e-9)


@st.composite
def routers(draw: st.DrawFn) -> tuple[int, int, RouterConfig]:
    num_groups = draw(st.sampled_from([1, 1, 2, 3, 5]))
    size = draw(st.integers(1, 9))
    num_selected = draw(st.integers(1, num_groups))
    top_k = draw(st.integers(1, min(size * num_selected, 20)))
    config = RouterConfig(
        kind=draw(st.sampled_from(KINDS)),
        is_normalized=draw(st.booleans()),
        scaling_factor=draw(st.sampled_from([1.0, 2.5])),
        num_groups=num_groups,
        num_selected_groups=num_selected,
        group_score=draw(st.sampled_from(["max", "top2_sum"])),
    )
    return num_groups * size, top_k, config


@given(routers(), st.integers(0, 5), st.booleans(), st.booleans(), st.integers(0, 2**31 - 1))
def test_choose_equals_the_loop(
    router: tuple[int, int, RouterConfig],
    num_tokens: int,
    has_bias: bool,
    has_ties: bool,
    seed: int,
) -> None:
    num_experts, top_k, config = router
    generator = torch.Generator().manual_seed(seed)
    logits = torch.randn(num_tokens, num_experts, generator=generator, dtype=torch.float64) * 3
    bias = torch.randn(num_experts, generator=generator, dtype=torch.float64) if has_bias else None
    if has_ties and config.group_score == "max":
        # sums of two tied scores would depend on their rounding
        logits, bias = logits.round(), None if bias is None else torch.zeros_like(bias)
    assert_equals_loop(logits, top_k, config, bias)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("has_bias", [False, True])
def test_choose_gates_for_every_size(kind: RouterKind, has_bias: bool) -> None:
    """A06: no pair (E, K) takes another branch."""
    for num_experts in (1, 2, 3, 8, 16, 32, 60, 64, 96, 128, 160, 192, 256, 257, 512):
        logits = torch.randn(2, num_experts, dtype=torch.float64)
        bias = torch.randn(num_experts, dtype=torch.float64) if has_bias else None
        for top_k in sorted({k for k in (1, 2, 4, 6, 8, num_experts) if k <= num_experts}):
            for is_normalized in (False, True):
                config = RouterConfig(kind=kind, is_normalized=is_normalized)
                assert_equals_loop(logits, top_k, config, bias)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("is_normalized", [False, True])
@pytest.mark.parametrize("group_score", ["max", "top2_sum"])
def test_choose_gradcheck(kind: RouterKind, is_normalized: bool, group_score: str) -> None:
    config = RouterConfig(
        kind=kind,
        is_normalized=is_normalized,
        scaling_factor=2.5,
        num_groups=3,
        num_selected_groups=2,
        group_score=group_score,
    )
    logits = torch.randn(4, 9, dtype=torch.float64, requires_grad=True)
    for top_k in (1, 3):
        for bias in (None, torch.randn(9, dtype=torch.float64)):
            assert torch.autograd.gradcheck(
                lambda z, k=top_k, b=bias: choose(z, k, config, b)[1], logits
            )


@pytest.mark.parametrize("num_experts", [1, 2, 3, 7, 8, 9, 17, 31, 60, 64, 100, 256, 257, 1000])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_choose_experts_gives_ties_to_the_lower_index(num_experts: int, dtype: torch.dtype) -> None:
    """A07 (b), both below and above MAX_PASSES."""
    scores = torch.randint(-2, 3, (67, num_experts)).to(dtype)
    scores[0], scores[1] = 0.0, -torch.inf
    scores[2] = torch.where(torch.arange(num_experts) % 2 == 0, 0.0, -0.0)
    for top_k in sorted({1, 2, min(8, num_experts), min(MAX_PASSES + 1, num_experts), num_experts}):
        if top_k > num_experts:
            continue
        expert_ids = choose_experts(scores, top_k)
        assert expert_ids.dtype == torch.int64
        rows = scores.tolist()
        wanted = [sorted(range(num_experts), key=lambda e, r=r: (-r[e], e))[:top_k] for r in rows]
        assert expert_ids.tolist() == wanted


def test_choose_experts_agrees_around_max_passes() -> None:
    scores = torch.randn(50, 40).round(decimals=1)
    passes, sort = choose_experts(scores, MAX_PASSES), choose_experts(scores, MAX_PASSES + 1)
    assert torch.equal(passes, sort[:, :MAX_PASSES])


def test_choose_experts_takes_any_strides() -> None:
    scores = torch.randn(12, 40)
    for view in (scores.t(), scores[:, ::3], scores[:1].expand(5, 40)):
        before = view.clone()
        assert torch.equal(choose_experts(view, 4), choose_experts(view.contiguous(), 4))
        assert torch.equal(view, before)


@pytest.mark.parametrize("num_threads", [1, 2])
def test_choose_experts_does_not_depend_on_threads(num_threads: int) -> None:
    scores = torch.randn(4096, 33).round()
    before = torch.get_num_threads()
    torch.set_num_threads(num_threads)
    try:
        expert_ids = choose_experts(scores, 4)
    finally:
        torch.set_num_threads(before)
    wanted = scores.sort(dim=-1, descending=True, stable=True).indices[:, :4]
    assert torch.equal(expert_ids, wanted)


@pytest.mark.parametrize("kind", KINDS)
def test_choose_sees_the_smallest_difference(kind: RouterKind) -> None:
    """A07 (a): no epsilon, no collapse of logits whose scores round to equals."""
    for value in (0.5, 1.0, 8.0, 30.0):
        logits = torch.full((1, 8), -1.0)
        logits[0, 2] = value
        logits[0, 5] = torch.nextafter(torch.tensor(value), torch.tensor(torch.inf))
        assert choose(logits, 2, RouterConfig(kind=kind), None)[0].tolist() == [[5, 2]]


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("has_bias", [False, True])
def test_choose_all_equal_takes_the_first_experts(kind: RouterKind, has_bias: bool) -> None:
    """A07 (b), A46: whatever E and the value, also where vector code meets its scalar rest."""
    for num_experts in (3, 8, 9, 13, 60, 61, 256):
        for value in torch.randn(50).tolist():
            logits = torch.full((5, num_experts), value)
            bias = torch.zeros(num_experts) if has_bias else None
            expert_ids, gates = choose(logits, 3, RouterConfig(kind=kind), bias)
            assert expert_ids.tolist() == [[0, 1, 2]] * 5
            assert len(gates.unique()) == 1


def test_choose_ignores_lanes_that_do_not_exist() -> None:
    """A07 (c): E = 60, every logit below 0."""
    logits = -torch.rand(64, 60) - 1
    expert_ids, _ = choose(logits, 6, RouterConfig(), None)
    assert expert_ids.min() >= 0
    assert expert_ids.max() < 60
    assert_equals_loop(logits.double(), 6, RouterConfig())


@pytest.mark.parametrize("kind", KINDS)
def test_choose_one_expert_normalised_is_one(kind: RouterKind) -> None:
    """A28, A29: exactly 1 for every token by itself, and a gradient of exactly 0."""
    config = RouterConfig(kind=kind, is_normalized=True)
    assert has_constant_gates(config, 1)
    for num_tokens in (1, 7):
        # at -60 a sigmoid is far below the epsilon of the normalisation
        logits = torch.cat([torch.randn(num_tokens, 4), torch.full((1, 4), -60.0)])
        logits.requires_grad_()
        _, gates = choose(logits, 1, config, None)
        assert gates.shape == (num_tokens + 1, 1)
        assert (gates == 1).all()
        (gates * torch.randn_like(gates)).sum().backward()
        assert (logits.grad == 0).all()


@pytest.mark.parametrize("kind", ["softmax_topk", "sigmoid_topk"])
def test_choose_one_expert_unnormalised_has_a_gradient(kind: RouterKind) -> None:
    """A29: the other half."""
    config = RouterConfig(kind=kind, is_normalized=False)
    assert not has_constant_gates(config, 1)
    logits = torch.randn(5, 4, requires_grad=True)
    expert_ids, gates = choose(logits, 1, config, None)
    gates.sum().backward()
    scores = logits.softmax(-1) if kind == "softmax_topk" else logits.sigmoid()
    (wanted,) = torch.autograd.grad(scores.gather(1, expert_ids).sum(), logits)
    torch.testing.assert_close(logits.grad, wanted)
    assert logits.grad.abs().amax(-1).min() > 0


def test_has_constant_gates_needs_one_expert() -> None:
    assert not has_constant_gates(RouterConfig(is_normalized=True), 2)
    assert has_constant_gates(RouterConfig(kind="topk_softmax", is_normalized=False), 1)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("is_normalized", [False, True])
def test_choose_gates_sum_to_one_if_normalised(kind: RouterKind, is_normalized: bool) -> None:
    """A30."""
    config = RouterConfig(kind=kind, is_normalized=is_normalized)
    sums = choose(torch.randn(20, 8), 3, config, None)[1].sum(-1)
    is_one = is_normalized or kind == "topk_softmax"
    assert torch.allclose(sums, torch.ones(20), atol=1e-6) == is_one


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("is_normalized", [False, True])
def test_choose_scales_last(kind: RouterKind, is_normalized: bool) -> None:
    """A31: gates and their gradients by exactly the factor, normalised or not."""
    logits = torch.randn(6, 8, requires_grad=True)
    results = []
    for factor in (1.0, 2.0):
        config = RouterConfig(kind=kind, is_normalized=is_normalized, scaling_factor=factor)
        _, gates = choose(logits, 3, config, None)
        results.append((gates, *torch.autograd.grad(gates[:, 0].sum(), logits)))
    (gates, grad), (scaled_gates, scaled_grad) = results
    assert torch.equal(scaled_gates, gates * 2)
    assert torch.equal(scaled_grad, grad * 2)


@pytest.mark.parametrize("kind", KINDS)
def test_choose_uses_the_bias_in_the_choice_only(kind: RouterKind) -> None:
    """A32."""
    logits = torch.randn(16, 8)
    bias = torch.zeros(8, requires_grad=True)
    config = RouterConfig(kind=kind, is_normalized=False)
    plain_ids, plain_gates = choose(logits, 2, config, None)
    expert_ids, gates = choose(logits, 2, config, bias)
    assert torch.equal(expert_ids, plain_ids)
    assert torch.equal(gates, plain_gates)
    assert not gates.requires_grad
    with torch.no_grad():
        bias[3] = 10.0
    expert_ids, gates = choose(logits, 2, config, bias)
    assert (expert_ids[:, 0] == 3).all()
    scores = {"softmax_topk": logits.softmax(-1), "sigmoid_topk": logits.sigmoid()}
    wanted = scores.get(kind, logits).gather(1, expert_ids)
    wanted = wanted.softmax(-1) if kind == "topk_softmax" else wanted
    torch.testing.assert_close(gates, wanted, rtol=1e-6, atol=0)


def test_choose_keeps_out_of_excluded_groups_with_negative_scores() -> None:
    """A33: the numbers of the report; a mask of 0 instead of -inf would choose {4, 5}."""
    config = RouterConfig(
        kind="sigmoid_topk",
        scaling_factor=2.5,
        num_groups=4,
        num_selected_groups=2,
        group_score="top2_sum",
    )
    logits = torch.tensor([[3, 2.9, 1, 0.9, -1, -1.1, -3, -3.1]])
    expert_ids, gates = choose(logits, 2, config, torch.full((8,), -5.0))
    assert expert_ids.tolist() == [[0, 1]]
    torch.testing.assert_close(gates, torch.tensor([[1.25311, 1.24689]]), rtol=0, atol=5e-6)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("has_bias", [False, True])
def test_choose_keeps_out_of_excluded_groups_with_masked_experts(
    dtype: torch.dtype, has_bias: bool
) -> None:
    """Experts masked by the lowest number, or a bias of -inf, still beat an excluded group's."""
    config = RouterConfig(num_groups=2, num_selected_groups=1)
    lowest = 0.0 if has_bias else torch.finfo(dtype).min
    logits = torch.tensor([[-5.0, -4.0, 1.0, lowest]], dtype=dtype)
    bias = torch.tensor([0.0, 0.0, 0.0, -torch.inf], dtype=dtype) if has_bias else None
    expert_ids, _ = choose(logits, 2, config, bias)
    assert expert_ids.tolist() == [[2, 3]]


def test_choose_group_of_one_counts_its_single_score() -> None:
    """A34: E = num_groups is plain top-k over the selected groups."""
    config = RouterConfig(num_groups=8, num_selected_groups=4, group_score="top2_sum")
    logits = torch.randn(10, 8)
    expert_ids, gates = choose(logits, 4, config, None)
    plain_ids, plain_gates = choose(logits, 4, RouterConfig(), None)
    assert torch.equal(expert_ids, plain_ids)
    assert torch.equal(gates, plain_gates)


def test_exclude_groups_scores() -> None:
    """The best single expert is in group 0, the best pair in group 1."""
    scores = torch.tensor([[5.0, 0.0, 0.0, 4.0, 4.0, 0.0]])
    for group_score, wanted in (("max", [0, 1, 2]), ("top2_sum", [3, 4, 5])):
        config = RouterConfig(num_groups=2, num_selected_groups=1, group_score=group_score)
        order = exclude_groups(scores, scores, config)
        assert order.isfinite().nonzero()[:, 1].tolist() == wanted


def test_exclude_groups_compares_what_is_asked_for() -> None:
    """Sums are of scores, not logits; a maximum is of logits, which do not saturate."""
    config = RouterConfig(
        kind="sigmoid_topk", num_groups=2, num_selected_groups=1, group_score="top2_sum"
    )
    # sums of logits 8 and 4, of sigmoids 1.27 and 1.76
    logits = torch.tensor([[9.0, -1.0, 2.0, 2.0]])
    assert choose(logits, 2, config, None)[0].tolist() == [[2, 3]]
    # in fp32 the sigmoids of 30 and 40 are both 1
    best = dataclasses.replace(config, group_score="max")
    logits = torch.tensor([[30.0, 0.0, 40.0, 0.0]])
    assert choose(logits, 2, best, None)[0].tolist() == [[2, 3]]


def test_choose_all_experts_is_the_dense_mixture() -> None:
    """A35: (E, K) = (4, 4), and (1, 1) with its gradient of 0."""
    logits = torch.randn(9, 4)
    expert_ids, gates = choose(logits, 4, RouterConfig(), None)
    dense = torch.zeros(9, 4).scatter(1, expert_ids, gates)
    torch.testing.assert_close(dense, logits.softmax(-1))
    assert expert_ids.sort(-1).values.tolist() == [[0, 1, 2, 3]] * 9
    one = torch.randn(3, 1, requires_grad=True)
    expert_ids, gates = choose(one, 1, RouterConfig(is_normalized=False), None)
    assert expert_ids.tolist() == [[0]] * 3
    assert (gates == 1).all()
    gates.sum().backward()
    assert (one.grad == 0).all()


def test_choose_far_scores_stay_finite() -> None:
    """Chosen probabilities that all underflow give gates 0 and a finite gradient, not 0 / 0."""
    logits = torch.tensor([[300.0, 0.0, -1.0, -2.0]], requires_grad=True)
    bias = torch.tensor([0.0, 5.0, 5.0, 5.0])
    expert_ids, gates = choose(logits, 2, RouterConfig(), bias)
    assert expert_ids.tolist() == [[1, 2]]
    assert gates.tolist() == [[0.0, 0.0]]
    gates.sum().backward()
    assert logits.grad.isfinite().all()
    for kind in KINDS:
        far = torch.tensor([[1e4, -1e4, 500.0, -500.0]], requires_grad=True)
        _, gates = choose(far, 3, RouterConfig(kind=kind), torch.zeros(4))
        (gates * torch.arange(3)).sum().backward()
        assert gates.isfinite().all()
        assert far.grad.isfinite().all()


def test_choose_a_token_does_not_depend_on_its_neighbours() -> None:
    """A04, A28: T = 1 to 130, K = 2 and K = E."""
    logits = torch.randn(130, 8)
    for kind in KINDS:
        for top_k in (2, 8):
            config = RouterConfig(kind=kind)
            whole = route(logits, top_k, config, correction_bias=torch.arange(8) / 100)
            for num_tokens in range(1, 131):
                part = route(
                    logits[-num_tokens:], top_k, config, correction_bias=torch.arange(8) / 100
                )
                assert torch.equal(part.expert_ids, whole.expert_ids[-num_tokens:])
                assert torch.equal(part.gates, whole.gates[-num_tokens:])
