"""Losses and the loss-free bias update. A..: shared/cases/field_reports."""

import math
import subprocess
import sys
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from piper_kernels.balance import Normalization, balance_loss, updated_correction_bias, z_loss
from piper_kernels.config import RouterConfig
from piper_kernels.errors import ConfigError, DtypeError, ShapeError
from piper_kernels.routing import Routing, count_experts, route

SIGMOID = RouterConfig(kind="sigmoid_topk")
NORMALIZATIONS: tuple[Normalization, ...] = ("per_slot", "per_token")


def one_hot_loss(routing: Routing, normalization: Normalization) -> Tensor:
    """The loss by its formula, with the one-hot tensor, of real tokens only, in fp64."""
    is_real = torch.ones(routing.num_tokens) > 0 if routing.mask is None else routing.mask
    logits, ids = routing.logits[is_real].double(), routing.expert_ids[is_real]
    if routing.kind == "sigmoid_topk":
        probabilities = logits.sigmoid() / logits.sigmoid().sum(-1, keepdim=True)
    else:
        probabilities = logits.exp() / logits.exp().sum(-1, keepdim=True)
    one_hot = torch.nn.functional.one_hot(ids, routing.num_experts).double()
    share = one_hot.sum(1).mean(0)
    if normalization == "per_slot":
        share = share / routing.top_k
    return routing.num_experts * (share * probabilities.mean(0)).sum()


@pytest.mark.parametrize("normalization", NORMALIZATIONS)
@pytest.mark.parametrize("config", [RouterConfig(), SIGMOID], ids=["softmax", "sigmoid"])
@pytest.mark.parametrize("has_mask", [False, True])
def test_balance_loss_equals_the_one_hot_formula(
    normalization: Normalization, config: RouterConfig, has_mask: bool
) -> None:
    logits = torch.randn(40, 7, requires_grad=True)
    mask = torch.rand(40) < 0.6 if has_mask else None
    routing = route(logits, 3, config, mask=mask)
    loss, wanted = (
        balance_loss(routing, normalization=normalization),
        one_hot_loss(routing, normalization),
    )
    torch.testing.assert_close(loss.double(), wanted, rtol=1e-6, atol=0)
    assert loss.shape == ()
    got, want = (torch.autograd.grad(x, logits, retain_graph=True)[0] for x in (loss, wanted))
    torch.testing.assert_close(got, want, rtol=1e-5, atol=1e-8)


@pytest.mark.parametrize("config", [RouterConfig(), SIGMOID], ids=["softmax", "sigmoid"])
def test_balance_loss_at_balance_is_1_or_k(config: RouterConfig) -> None:
    """The two normalisations differ by K: 1 and K where every expert is used alike."""
    # each token prefers its own pair of 4 experts; over the batch all are alike
    logits = torch.tensor([[1.0, 1, 0, 0], [0, 1, 1, 0], [0, 0, 1, 1], [1, 0, 0, 1]])
    routing = route(logits, 2, config)
    assert count_experts(routing.expert_ids, 4).tolist() == [2, 2, 2, 2]
    one = torch.tensor(1.0)
    torch.testing.assert_close(balance_loss(routing, normalization="per_slot"), one)
    torch.testing.assert_close(balance_loss(routing, normalization="per_token"), one * 2)


def test_balance_loss_takes_raw_logits() -> None:
    """A38: 3.970; a second softmax would give 1.892."""
    logits = torch.tensor([[6.0, 0, 0, 0]]).repeat(5, 1)
    routing = route(logits, 1, RouterConfig())
    assert not torch.allclose(routing.logits.sum(-1), torch.ones(5))
    loss = balance_loss(routing, normalization="per_slot").item()
    probability = math.exp(6) / (math.exp(6) + 3)
    assert loss == pytest.approx(4 * probability, rel=1e-6)
    assert loss == pytest.approx(3.970, abs=5e-4)
    torch.testing.assert_close(routing.probabilities, logits.softmax(-1))


def test_probabilities_of_sigmoid_scores_do_not_underflow() -> None:
    logits = torch.tensor([[0.0, 1.0, -1.0], [-200.0, -201.0, -400.0]], requires_grad=True)
    probabilities = route(logits, 1, SIGMOID).probabilities
    torch.testing.assert_close(
        probabilities[0], logits[0].sigmoid() / logits[0].sigmoid().sum(), rtol=1e-6, atol=0
    )
    # far below 0 a sigmoid is an exponential
    torch.testing.assert_close(probabilities[1], logits[1].softmax(-1), rtol=1e-6, atol=0)
    probabilities[:, 0].sum().backward()
    assert logits.grad.isfinite().all()


def test_balance_loss_is_per_layer() -> None:
    """A39: the mean of two layers is 1.8; pooled first they would look balanced at 1.0."""
    layers = [torch.tensor([[0.9, 0.1]]).log(), torch.tensor([[0.1, 0.9]]).log()]
    routings = [route(logits, 1, RouterConfig()) for logits in layers]
    losses = [balance_loss(r, normalization="per_slot").item() for r in routings]
    assert sum(losses) / 2 == pytest.approx(1.8, rel=1e-6)
    pooled = balance_loss(route(torch.cat(layers), 1, RouterConfig()), normalization="per_slot")
    assert pooled.item() == pytest.approx(1.0, rel=1e-6)


@pytest.mark.parametrize("coefficient", [0.0, 1e-3, 1e-2])
def test_balance_loss_reaches_the_router(coefficient: float) -> None:
    """A41: the gradient is coefficient times the loss's own, exactly 0 for 0."""
    x, weight = torch.randn(20, 6), torch.randn(5, 6, requires_grad=True)

    def losses() -> tuple[Tensor, Tensor]:
        routing = route(x @ weight.t(), 2, RouterConfig())
        return routing.gates.sum(), balance_loss(routing, normalization="per_token")

    main, loss = losses()
    (0 * main + coefficient * loss).backward()
    (own,) = torch.autograd.grad(losses()[1], weight)
    assert own.abs().max() > 1e-3
    atol = 1e-6 * coefficient * own.abs().max().item()
    torch.testing.assert_close(weight.grad, coefficient * own, rtol=1e-6, atol=atol)
    if coefficient == 0:
        assert (weight.grad == 0).all()


@pytest.mark.parametrize("num_ranks", [1, 2, 4])
@pytest.mark.parametrize("normalization", NORMALIZATIONS)
def test_balance_loss_does_not_shrink_with_ranks(
    num_ranks: int, normalization: Normalization
) -> None:
    """A42, without processes: with all ranks' counts the mean over ranks is the whole's loss."""
    logits = torch.randn(64, 8, requires_grad=True)
    whole = balance_loss(route(logits, 2, SIGMOID), normalization=normalization)
    (wanted,) = torch.autograd.grad(whole, logits)
    shards = [route(part, 2, SIGMOID) for part in logits.chunk(num_ranks)]
    counts = sum(count_experts(r.expert_ids, 8) for r in shards)
    losses = [balance_loss(r, normalization=normalization, expert_counts=counts) for r in shards]
    mean = torch.stack(losses).mean()
    torch.testing.assert_close(mean, whole)
    torch.testing.assert_close(torch.autograd.grad(mean, logits)[0], wanted)
    local = torch.stack([balance_loss(r, normalization=normalization) for r in shards]).mean()
    by_hand = torch.stack([one_hot_loss(r, normalization) for r in shards]).mean()
    torch.testing.assert_close(local.double(), by_hand, rtol=1e-6, atol=0)


class LargestTensor(TorchDispatchMode):
    """Remembers the bytes of the largest tensor that any operation returned."""

    num_bytes = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        for tensor in torch.utils._pytree.tree_leaves(out):
            if isinstance(tensor, Tensor):
                self.num_bytes = max(self.num_bytes, tensor.untyped_storage().nbytes())
        return out


@pytest.mark.parametrize("normalization", NORMALIZATIONS)
def test_balance_loss_allocates_nothing_larger_than_the_logits(
    normalization: Normalization,
) -> None:
    """A40, scaled: [T, E] fp32 is 0.5 MB here, a one-hot [T, K, E] int64 would be 8 MB."""
    logits = torch.randn(1024, 128, requires_grad=True)
    mask = torch.ones(1024)
    with LargestTensor() as largest:
        routing = route(logits, 8, RouterConfig(), mask=mask)
        loss = balance_loss(routing, normalization=normalization)
        (loss + z_loss(routing.logits, mask=mask)).backward()
    assert largest.num_bytes == 1024 * 128 * 4
    torch.testing.assert_close(
        loss.double(), one_hot_loss(routing, normalization), rtol=1e-6, atol=0
    )


FULL_SIZE = """
import resource, torch
from piper_kernels.balance import balance_loss
from piper_kernels.config import RouterConfig
from piper_kernels.routing import route
def loss(logits):
    return balance_loss(route(logits, 8, RouterConfig()), normalization="per_token")
loss(torch.randn(64, 128, requires_grad=True)).backward()
layers = [torch.randn(8192, 128, requires_grad=True) for _ in range(48)]
before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
routings = [route(logits, 8, RouterConfig()) for logits in layers]
routed = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
sum(balance_loss(r, normalization="per_token") for r in routings).backward()
print(routed - before, resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - routed)
"""


@pytest.mark.slow
@pytest.mark.skipif(sys.platform != "linux", reason="ru_maxrss is in KiB on Linux only")
def test_balance_loss_peak_memory_at_full_size() -> None:
    """A40: 48 layers, T = 8192, E = 128, K = 8, forward and backward below 0.5 GB."""
    done = subprocess.run(
        [sys.executable, "-c", FULL_SIZE], capture_output=True, text=True, check=True
    )
    loss_kib = int(done.stdout.split()[1])
    assert loss_kib * 1024 < 0.5e9


@pytest.mark.parametrize("dtype", [torch.bool, torch.int64, torch.float32])
@pytest.mark.parametrize("num_real", [0, 3, 16])
def test_losses_of_padding(dtype: torch.dtype, num_real: int) -> None:
    """A37: as of the real tokens alone; without any, 0 and a gradient of 0."""
    is_real = torch.zeros(16, dtype=torch.bool)
    is_real[torch.randperm(16)[:num_real]] = True
    logits = torch.randn(16, 8)
    logits[~is_real] = 1e4
    logits[~is_real, 2] = torch.nan
    logits.requires_grad_()
    mask = is_real.to(dtype)
    routing = route(logits, 2, RouterConfig(), mask=mask)
    compact = route(logits[is_real], 2, RouterConfig())
    pairs = [
        (balance_loss(r, normalization=n), z_loss(r.logits, mask=m))
        for n in NORMALIZATIONS
        for r, m in ((routing, mask), (compact, None))
    ]
    for got, want in zip(pairs[::2], pairs[1::2], strict=True):
        torch.testing.assert_close(got, want, rtol=1e-6, atol=0)
        assert (num_real > 0) == (got[0] > 0)
    sum(pairs[0]).backward()
    assert (logits.grad[~is_real] == 0).all()
    assert logits.grad.isfinite().all()
    assert (logits.grad[is_real] != 0).any() == (num_real > 0)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
def test_z_loss_does_not_overflow(dtype: torch.dtype) -> None:
    """A45: 200^2, not infinity; and what is balanced has a finite gradient."""
    logits = torch.tensor([[200.0, 0, 0, 0]] * 3, dtype=dtype, requires_grad=True)
    loss = z_loss(logits)
    assert loss.item() == 40000
    assert loss.dtype == (torch.float64 if dtype == torch.float64 else torch.float32)
    loss.backward()
    wanted = torch.tensor([[400 / 3, 0, 0, 0]] * 3)
    torch.testing.assert_close(logits.grad.float(), wanted.to(dtype).float(), rtol=1e-6, atol=0)


@pytest.mark.parametrize("config", [RouterConfig(), SIGMOID], ids=["softmax", "sigmoid"])
def test_losses_of_a_zero_router(config: RouterConfig) -> None:
    """A45: all logits equal."""
    weight = torch.zeros(8, 4, requires_grad=True)
    routing = route(torch.randn(10, 4) @ weight.t(), 2, config)
    loss = balance_loss(routing, normalization="per_slot")
    assert loss.item() == pytest.approx(1.0, rel=1e-6)
    (loss + z_loss(routing.logits)).backward()
    assert weight.grad.isfinite().all()


def test_losses_gradcheck() -> None:
    mask = torch.tensor([1, 0, 1, 1, 1])
    logits = torch.randn(5, 6, dtype=torch.float64, requires_grad=True)
    assert torch.autograd.gradcheck(lambda z: z_loss(z, mask=mask), logits)
    for config in (RouterConfig(), SIGMOID):
        for normalization in NORMALIZATIONS:

            def loss(
                z: Tensor, c: RouterConfig = config, n: Normalization = normalization
            ) -> Tensor:
                return balance_loss(route(z, 2, c, mask=mask), normalization=n)

            assert torch.autograd.gradcheck(loss, logits)


def test_losses_compute_in_fp32_under_autocast() -> None:
    logits = torch.randn(30, 8)
    with torch.autocast("cpu", torch.bfloat16):
        routing = route(logits, 2, RouterConfig())
        cast = (balance_loss(routing, normalization="per_slot"), z_loss(logits))
    plain = (balance_loss(routing, normalization="per_slot"), z_loss(logits))
    assert all(torch.equal(a, b) for a, b in zip(cast, plain, strict=True))


def test_updated_correction_bias_example_and_purity() -> None:
    bias = torch.zeros(3, requires_grad=True)
    new = updated_correction_bias(bias, torch.tensor([6, 3, 0]), 0.5)
    assert new.tolist() == [-0.5, 0.0, 0.5]
    assert bias.tolist() == [0.0, 0.0, 0.0]
    assert not new.requires_grad
    # nothing routed: an all-pad batch moves nothing
    assert updated_correction_bias(new, torch.zeros(3, dtype=torch.int64), 0.5).equal(new)


def test_updated_correction_bias_sign_is_exact() -> None:
    """Counts beyond fp32's integers: an expert exactly at the mean stays, one off by 1 moves."""
    counts = torch.tensor([2**30, 2**30 + 1, 2**30 - 1])
    assert updated_correction_bias(torch.zeros(3), counts, 1.0).tolist() == [0.0, -1.0, 1.0]
    new = updated_correction_bias(torch.ones(3, dtype=torch.float64), counts.int(), 1e-3)
    assert new.dtype == torch.float64
    assert new.tolist() == [1.0, 1.0 - 1e-3, 1.0 + 1e-3]


def test_updated_correction_bias_balances_a_skewed_router() -> None:
    """Loss-free balancing does what it is for: the busiest expert's load falls to near the mean."""
    logits = torch.randn(512, 8) + torch.linspace(2, -2, 8)
    bias = torch.zeros(8)

    def busiest(bias: Tensor) -> tuple[float, Tensor]:
        counts = count_experts(route(logits, 2, SIGMOID, correction_bias=bias).expert_ids, 8)
        return counts.max().item() / counts.double().mean().item(), counts

    before, counts = busiest(bias)
    for _ in range(200):
        bias = updated_correction_bias(bias, counts, 0.01)
        after, counts = busiest(bias)
    assert before > 2
    assert after < 1.15


def test_balance_messages() -> None:
    routing = route(torch.randn(4, 3), 1, RouterConfig())
    with pytest.raises(
        ConfigError,
        match=r"balance_loss: normalization must be one of per_slot, per_token, got "
        r"'per_tokn'\. Did you mean 'per_token'\?",
    ):
        balance_loss(routing, normalization="per_tokn")
    with pytest.raises(ShapeError, match=r"expert_counts must have shape \(E\) = \(3\), got \(4\)"):
        balance_loss(routing, normalization="per_slot", expert_counts=torch.zeros(4))
    with pytest.raises(ShapeError, match=r"z_loss: logits must have shape \(T, E\)"):
        z_loss(torch.randn(2, 3, 4))
    with pytest.raises(ShapeError, match=r"z_loss: mask must have shape \(T\) = \(6\), got \(2, 3"):
        z_loss(torch.randn(6, 4), mask=torch.ones(2, 3))
    with pytest.raises(DtypeError, match="z_loss: logits must be one of float32"):
        z_loss(torch.ones(2, 2, dtype=torch.int64))


@pytest.mark.parametrize(
    ("bias", "counts", "speed", "error", "match"),
    [
        (torch.zeros(3), torch.zeros(4).long(), 0.1, ShapeError, r"\(E\) = \(3\), got \(4\)"),
        (torch.zeros(2, 2), torch.zeros(4).long(), 0.1, ShapeError, "correction_bias must have"),
        (torch.zeros(3).bfloat16(), torch.zeros(3).long(), 0.1, DtypeError, "buffer in fp32"),
        (torch.zeros(3), torch.zeros(3), 0.1, DtypeError, "expert_counts must be one of int64"),
        (torch.zeros(3), torch.zeros(3).long(), -0.1, ConfigError, "speed must be a finite number"),
        (torch.zeros(3), torch.zeros(3).long(), math.nan, ConfigError, "got nan"),
    ],
)
def test_updated_correction_bias_messages(
    bias: Tensor, counts: Tensor, speed: float, error: type[Exception], match: str
) -> None:
    with pytest.raises(error, match=match):
        updated_correction_bias(bias, counts, speed)
