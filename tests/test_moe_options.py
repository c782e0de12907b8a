"""What each option of PiperMoE does to the layer, and what it says about bad input."""

import dataclasses
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from piper_kernels import Activation, PiperMoE, RouterConfig, SharedExpertsConfig
from piper_kernels.errors import ConfigError, DeviceError, DtypeError, ShapeError
from piper_kernels.routing import count_experts


def small_moe(**options: Any) -> PiperMoE:
    """H = 8, I = 6, E = 4, K = 2 unless told otherwise, with biases that are not 0."""
    sizes = {"hidden_size": 8, "intermediate_size": 6, "num_experts": 4, "top_k": 2}
    moe = PiperMoE(**{**sizes, **options})
    for name, tensor in [*moe.named_parameters(), *moe.named_buffers()]:
        if "bias" in name:
            torch.nn.init.normal_(tensor, std=0.1)
    return moe


# ---- options of the router, as they act on the layer


def test_moe_with_one_expert_is_an_mlp() -> None:
    """Field report A35, (E, K) = (1, 1)."""
    moe = small_moe(num_experts=1, top_k=1)
    x = torch.randn(5, 8)
    gate, up = F.linear(x, moe.experts.gate_up_proj[0]).chunk(2, -1)
    mlp = F.linear(F.silu(gate) * up, moe.experts.down_proj[0])
    y = moe(x)
    torch.testing.assert_close(y, mlp)
    y.sum().backward()
    assert torch.equal(moe.router.weight.grad, torch.zeros(1, 8))


def test_moe_with_all_experts_is_the_dense_mixture() -> None:
    """Field report A35, (E, K) = (4, 4)."""
    moe = small_moe(top_k=4, dtype=torch.float64)
    x = torch.randn(5, 8, dtype=torch.float64)
    gates = F.linear(x, moe.router.weight).softmax(-1)
    gate, up = torch.einsum("th,eoh->eto", x, moe.experts.gate_up_proj).chunk(2, -1)
    out = torch.einsum("eti,ehi->teh", F.silu(gate) * up, moe.experts.down_proj)
    torch.testing.assert_close(moe(x), torch.einsum("te,teh->th", gates, out))


@pytest.mark.parametrize(
    ("num_experts", "top_k", "message"),
    [
        (4, 5, "top_k must be at most num_experts = 4, got 5"),
        (4, 0, "top_k must be an integer >= 1, got 0"),
        (0, 1, "num_experts must be an integer >= 1, got 0"),
    ],
)
def test_moe_refuses_impossible_sizes(num_experts: int, top_k: int, message: str) -> None:
    """Field report A35."""
    with pytest.raises(ConfigError, match=message):
        PiperMoE(8, 6, num_experts, top_k)


@pytest.mark.parametrize("kind", ["softmax_topk", "topk_softmax", "sigmoid_topk"])
def test_moe_warns_of_a_router_that_cannot_learn(kind: Any) -> None:
    """Field report A29: with K = 1 a normalised gate is the constant 1."""
    with pytest.warns(UserWarning, match=r"top_k = 1 with normalised gates.*is_normalized=False"):
        moe = small_moe(top_k=1, router=RouterConfig(kind=kind))
    moe(torch.randn(5, 8)).square().sum().backward()
    assert torch.equal(moe.router.weight.grad, torch.zeros(4, 8))


def test_moe_with_one_unnormalised_gate_learns() -> None:
    """Field report A29; the value is held to the oracle by test_moe_equals_the_oracle."""
    moe = small_moe(top_k=1, router=RouterConfig(is_normalized=False))
    moe(torch.randn(5, 8)).square().sum().backward()
    assert moe.router.weight.grad.abs().max() > 0


@pytest.mark.parametrize("is_normalized", [True, False])
def test_moe_scales_the_routed_part_only(is_normalized: bool) -> None:
    """Field report A31; with gradients."""
    results = []
    x, grad_y = torch.randn(5, 8, dtype=torch.float64), torch.randn(5, 8, dtype=torch.float64)
    state = None
    for factor in (1.0, 2.5):
        moe = small_moe(
            router=RouterConfig(is_normalized=is_normalized, scaling_factor=factor),
            shared_experts=SharedExpertsConfig(intermediate_size=5),
            dtype=torch.float64,
        )
        state = state or moe.state_dict()
        moe.load_state_dict(state)
        y = moe(x)
        (y * grad_y).sum().backward()
        results.append((y - moe.shared_experts(x), moe))
    (plain, plain_moe), (scaled, scaled_moe) = results
    torch.testing.assert_close(scaled, 2.5 * plain)
    for (name, a), b in zip(plain_moe.named_parameters(), scaled_moe.parameters(), strict=True):
        factor = 1.0 if name.startswith("shared_experts") else 2.5
        torch.testing.assert_close(b.grad, factor * a.grad, msg=name)


def test_moe_jitter_acts_on_the_router_in_training_only() -> None:
    """Field report A36: experts never see the noise, and x is not changed."""
    moe = small_moe(router=RouterConfig(jitter=0.5))
    quiet = small_moe()
    quiet.load_state_dict(moe.state_dict())
    x = torch.randn(6, 8)
    before = x.clone()
    assert not torch.equal(moe(x, return_stats=True)[1].routing.logits, quiet.router(x).logits)
    assert torch.equal(moe.eval()(x), quiet(x))
    assert torch.equal(moe(x), moe(x))
    with torch.no_grad():
        for layer in (moe.train(), quiet):
            layer.router.weight.zero_()
    assert torch.equal(moe(x), quiet(x))
    assert torch.equal(x, before)


# ---- padding


@pytest.mark.parametrize("dtype", [torch.bool, torch.int64, torch.float32], ids=str)
@pytest.mark.parametrize("pad_value", [1e4, torch.nan], ids=["1e4", "nan"])
def test_moe_ignores_padding(dtype: torch.dtype, pad_value: float) -> None:
    """Field report A37: as if the padded tokens were not there; left, right, and a whole row."""
    moe = small_moe(router=RouterConfig(has_bias=True), dtype=torch.float64)
    mask = torch.tensor([[0, 0, 1, 1, 1], [1, 1, 0, 0, 0], [0, 0, 0, 0, 0]], dtype=torch.bool)
    x = torch.randn(3, 5, 8, dtype=torch.float64)
    x[~mask] = pad_value
    grad_y = torch.randn_like(x)
    results = []
    for tokens, grad, given_mask in (
        (x, grad_y, mask.to(dtype)),
        (x.view(-1, 8), grad_y.view(-1, 8), mask.view(-1).to(dtype)),
        (x[mask], grad_y[mask], None),
        (x[mask], grad_y[mask], torch.ones(5)),
    ):
        moe.zero_grad()
        leaf = tokens.clone().requires_grad_()
        y, stats = moe(leaf, mask=given_mask, return_stats=True)
        loss = (y * grad).sum() + stats.balance_loss + stats.z_loss
        loss.backward()
        is_real = torch.ones(len(tokens), dtype=torch.bool)
        if given_mask is not None:
            is_real = given_mask != 0
            assert torch.equal(y[~is_real], torch.zeros_like(y[~is_real]))
            assert torch.equal(leaf.grad[~is_real], torch.zeros_like(leaf.grad[~is_real]))
        results.append(
            {
                "y": y[is_real],
                "x": leaf.grad[is_real],
                "balance_loss": stats.balance_loss,
                "z_loss": stats.z_loss,
                "counts": stats.expert_counts,
                **{name: parameter.grad for name, parameter in moe.named_parameters()},
            }
        )
    assert results[0]["counts"].sum() == 5 * 2
    for other in results[1:]:
        for name, value in results[0].items():
            torch.testing.assert_close(value, other[name], msg=name)


def test_moe_with_padding_only() -> None:
    """Field report A37: a wholly padded batch."""
    moe = small_moe(capacity_factor=1.0)
    y, stats = moe(torch.full((2, 3, 8), 1e4), mask=torch.zeros(2, 3), return_stats=True)
    assert torch.equal(y, torch.zeros(2, 3, 8))
    assert stats.balance_loss.item() == stats.z_loss.item() == 0.0
    assert stats.expert_counts.sum().item() == stats.num_dropped.item() == 0
    (y.sum() + stats.balance_loss + stats.z_loss).backward()
    for name, parameter in moe.named_parameters():
        assert torch.equal(parameter.grad, torch.zeros_like(parameter)), name


def test_moe_gives_padding_to_the_shared_experts() -> None:
    moe = small_moe(shared_experts=SharedExpertsConfig(intermediate_size=5))
    x = torch.randn(4, 8)
    y = moe(x, mask=torch.tensor([True, False, True, False]))
    torch.testing.assert_close(y[1::2], moe.shared_experts(x[1::2]))


# ---- capacity


def test_moe_drops_beyond_capacity() -> None:
    """Field report A66: five tokens on expert 0, room for four; equal gates, so the last goes."""
    shared = SharedExpertsConfig(intermediate_size=5)
    router = RouterConfig(is_normalized=False)
    moe = small_moe(top_k=1, router=router, shared_experts=shared, capacity_factor=3.2)
    with torch.no_grad():
        moe.router.weight.zero_()
    x = torch.randn(5, 8)
    y, stats = moe(x, return_stats=True)
    assert stats.num_dropped.item() == 1
    assert stats.routing.expert_ids.flatten().tolist() == [0, 0, 0, 0, 4]
    assert stats.routing.gates.flatten().tolist() == [0.25] * 4 + [0.0]
    assert stats.expert_counts.tolist() == [5, 0, 0, 0], "what the router wanted"
    shared_y = moe.shared_experts(x)
    torch.testing.assert_close(y[4], shared_y[4])
    assert (y - shared_y)[:4].abs().amax(-1).min() > 0


@pytest.mark.parametrize("num_tokens", [1, 7])
def test_moe_with_ample_capacity_drops_nothing(num_tokens: int) -> None:
    """Field report A66: a factor of 8 with E = 4 is more than every token."""
    moe, ample = small_moe(), small_moe(capacity_factor=8.0)
    ample.load_state_dict(moe.state_dict())
    x = torch.randn(num_tokens, 8)
    y, stats = ample(x, return_stats=True)
    assert torch.equal(y, moe(x))
    assert stats.num_dropped.item() == 0


def test_moe_keeps_the_other_gate_of_a_dropped_slot() -> None:
    """Field report A66, K = 2 normalised: the remaining gate is not scaled up."""
    moe = small_moe(capacity_factor=1.0)
    with torch.no_grad():
        moe.router.weight.zero_()
    x = torch.randn(4, 8)
    # all want experts 0 and 1, each takes ceil(1.0 * 4 * 2 / 4) = 2
    y, stats = moe(x, return_stats=True)
    assert stats.routing.expert_ids.tolist() == [[0, 1], [0, 1], [4, 4], [4, 4]]
    assert stats.num_dropped.item() == 4
    with torch.no_grad():
        moe.router.weight[0, 0] = 1.0
    x = torch.zeros(4, 8)
    x[:, 0] = torch.tensor([0.0, 0.0, 1.0, 1.0])
    _, stats = moe(x, return_stats=True)
    # tokens 2 and 3 like expert 0 more; expert 1 falls to tokens 0 and 1, whose gates are higher
    assert stats.routing.expert_ids.tolist() == [[4, 1], [4, 1], [0, 4], [0, 4]]
    torch.testing.assert_close(stats.routing.gates[2, 0], torch.tensor(1.0).sigmoid())
    assert y.isfinite().all()


# ---- losses and stats


def test_moe_losses_reach_the_router_linearly() -> None:
    """Field report A41: the gradient is c times that of the loss, and 0 for c = 0."""
    moe = small_moe(dtype=torch.float64)
    x = torch.randn(9, 8, dtype=torch.float64)
    grads = {}
    for coefficient in (0.0, 1e-3, 1e-2):
        moe.zero_grad()
        y, stats = moe(x, return_stats=True)
        (0.0 * y.sum() + coefficient * (stats.balance_loss + stats.z_loss)).backward()
        grads[coefficient] = moe.router.weight.grad.clone()
    weight = moe.router.weight.detach().requires_grad_()
    logits, ids = F.linear(x, weight), stats.routing.expert_ids
    share = F.one_hot(ids, 4).double().mean((0, 1))
    balance_loss = 4 * (share * logits.softmax(-1).mean(0)).sum()
    (balance_loss + logits.logsumexp(-1).square().mean()).backward()
    assert torch.equal(grads[0.0], torch.zeros_like(weight))
    for coefficient in (1e-3, 1e-2):
        torch.testing.assert_close(grads[coefficient], coefficient * weight.grad)


def test_moe_keeps_no_state_between_calls() -> None:
    """Field report A43: evaluation, other layers and errors leave a step's losses alone."""
    moe, other = small_moe(), small_moe()
    x = torch.randn(5, 8)
    _, before = moe(x, return_stats=True)
    with torch.no_grad():
        for _ in range(10):
            moe.eval()(torch.randn(3, 8))
            other(torch.randn(3, 8), return_stats=True)
    with pytest.raises(ShapeError):
        moe(torch.randn(3, 7))
    _, after = moe.train()(x, return_stats=True)
    assert torch.equal(before.balance_loss, after.balance_loss)
    assert torch.equal(before.z_loss, after.z_loss)
    assert torch.equal(before.expert_counts, after.expert_counts)
    names = [vars(module).keys() for module in moe.modules()]
    moe(x)
    assert [vars(module).keys() for module in moe.modules()] == names
    assert not any(isinstance(v, Tensor) for module in moe.modules() for v in vars(module).values())


def test_moe_stats_describe_the_call() -> None:
    moe = small_moe()
    x = torch.randn(6, 8)
    y, stats = moe(x, return_stats=True)
    assert torch.equal(y, moe(x))
    torch.testing.assert_close(stats.routing.logits, F.linear(x, moe.router.weight))
    assert torch.equal(stats.expert_counts, count_experts(stats.routing.expert_ids, 4))
    with pytest.raises(dataclasses.FrozenInstanceError):
        stats.num_dropped = torch.tensor(1)


# ---- replay


def test_moe_replays_a_routing() -> None:
    moe = small_moe(capacity_factor=1.0, router=RouterConfig(jitter=0.3))
    x, grad_y = torch.randn(2, 4, 8), torch.randn(2, 4, 8)
    mask = torch.tensor([[1, 1, 1, 0], [1, 1, 1, 1]])
    results = []
    y, stats = moe(x, mask=mask, return_stats=True)
    routing = stats.routing
    for replays in (False, True):
        moe.zero_grad()
        if replays:
            y, again = moe(x, routing=routing, return_stats=True)
            assert torch.equal(again.routing.expert_ids, routing.expert_ids)
        (y * grad_y).sum().backward(retain_graph=True)
        results.append([y, *(p.grad for p in moe.parameters())])
    for first, replayed in zip(*results, strict=True):
        assert torch.equal(first, replayed)


def test_moe_replays_a_detached_routing_after_its_backward() -> None:
    moe = small_moe()
    x = torch.randn(6, 8)
    y, stats = moe(x, return_stats=True)
    y.sum().backward()
    moe.zero_grad()
    again, replayed = moe(x, routing=stats.routing.detach(), return_stats=True)
    assert torch.equal(again, y)
    assert not replayed.balance_loss.requires_grad
    again.sum().backward()
    assert torch.equal(moe.router.weight.grad, torch.zeros(4, 8))
    assert moe.experts.down_proj.grad.abs().max() > 0


@pytest.mark.parametrize("num_tokens", [0, 5])
def test_moe_gives_an_idle_router_zero_gradients(num_tokens: int) -> None:
    moe = small_moe(router=RouterConfig(has_bias=True))
    x = torch.randn(num_tokens, 8)
    with torch.no_grad():
        routing = moe.route(x)
        moe.router.weight.fill_(torch.nan)
    y = moe(x, routing=routing)
    y.sum().backward()
    assert y.isfinite().all()
    assert torch.equal(moe.router.weight.grad, torch.zeros(4, 8))
    assert torch.equal(moe.router.bias.grad, torch.zeros(4))


def test_moe_route_is_what_forward_uses() -> None:
    moe = small_moe(capacity_factor=0.75)
    x, mask = torch.randn(2, 4, 8), torch.tensor([[1, 1, 1, 0], [1, 1, 1, 1]])
    routing = moe.route(x, mask=mask)
    _, stats = moe(x, mask=mask, return_stats=True)
    assert torch.equal(routing.expert_ids, stats.routing.expert_ids)
    assert torch.equal(routing.gates, stats.routing.gates)


# ---- explain


@pytest.mark.parametrize("save", ["preact", "x"])
def test_moe_explain_counts_what_the_experts_keep(save: Any) -> None:
    moe = small_moe(save=save, num_experts=3)
    x = torch.randn(2, 10, 8, requires_grad=True)
    tokens, routing = x.view(-1, 8), moe.route(x)
    parameters = {parameter.data_ptr() for parameter in moe.parameters()}
    kept = {}

    def keep(tensor: Tensor) -> Tensor:
        if tensor.data_ptr() not in parameters:
            kept[tensor.data_ptr()] = tensor.nbytes
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        moe.experts(tokens, routing.expert_ids, routing.gates)
    explanation = moe.explain(x)
    assert explanation.backend == "cpu"
    assert explanation.saved_bytes == sum(kept.values())
    assert moe.explain(20) == explanation
    assert moe.explain(0).saved_bytes is not None


def test_moe_explain_needs_its_own_experts() -> None:
    moe = small_moe()
    foreign = PiperMoE.from_parts(moe.config, moe.router, torch.nn.Identity())
    with pytest.raises(ConfigError, match="experts must be piper_kernels' own, got Identity"):
        foreign.explain(3)


# ---- bad input


def test_moe_words_its_errors() -> None:
    moe = small_moe()
    with pytest.raises(ShapeError, match=r"x must have at least 2 dims.*got shape \(8,\). Use x\["):
        moe(torch.randn(8))
    with pytest.raises(ShapeError, match=r"the last of hidden_size = 8, got shape \(3, 7\)"):
        moe(torch.randn(3, 7))
    with pytest.raises(DtypeError, match=r"x must be one of float32, bfloat16, .*got int64"):
        moe(torch.ones(3, 8, dtype=torch.int64))
    with pytest.raises(DeviceError, match=r"x must be on the device of router.weight \(cpu\), got"):
        moe(torch.randn(3, 8, device="meta"))
    with pytest.raises(ShapeError, match=r"mask must have x's leading dims \(2, 3\), or \[T\] = "):
        moe(torch.randn(2, 3, 8), mask=torch.ones(2, 1, 3, 3))
    routing = moe.route(torch.randn(5, 8))
    with pytest.raises(ShapeError, match=r"routing.expert_ids .*got \(5, 2\). The routing belongs"):
        moe(torch.randn(3, 8), routing=routing)
    with pytest.raises(ShapeError, match=r"routing.logits must have shape \(T, E\) = \(5, 6\)"):
        small_moe(num_experts=6)(torch.randn(5, 8), routing=routing)
    with pytest.raises(ConfigError, match="mask must be None when routing is given"):
        moe(torch.randn(5, 8), routing=routing, mask=torch.ones(5))
    with pytest.raises(ConfigError, match=r"save must be one of preact, x, got 'pre'. Did you"):
        small_moe(save="pre")
    with pytest.raises(ConfigError, match=r"backend must be one of .*got 'tritn'. Did you mean"):
        small_moe(backend="tritn")
    with pytest.raises(ConfigError, match=r"function must be one of .*got 'sillu'. Did you mean"):
        small_moe(activation=Activation(function="sillu"))  # type: ignore[arg-type]


def test_moe_prints_what_is_not_default() -> None:
    text = repr(small_moe(router=RouterConfig(kind="sigmoid_topk"), save="x"))
    for part in ("hidden_size=8", "kind='sigmoid_topk'", "save='x'", "2 of 4, sigmoid_topk"):
        assert part in text
    for part in ("capacity_factor", "layout", "shared_experts"):
        assert part not in text


@pytest.mark.parametrize("dtype", [torch.int32, torch.complex64, torch.float8_e4m3fn])
def test_moe_refuses_a_dtype_that_no_layer_computes_in(dtype: torch.dtype) -> None:
    with pytest.raises(DtypeError, match=r"PiperMoE: dtype must be one of float32, .*, got"):
        PiperMoE(8, 6, 4, 2, dtype=dtype)
