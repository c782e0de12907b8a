"""PiperMoE inside DDP, FSDP2 and accelerate, without expert parallelism.

Field report A58: ranks whose tokens go to different experts, and a rank without tokens, must
neither hang nor be told of unused parameters, and gradients are the average over ranks.
"""

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel

from piper_kernels import PiperMoE, RouterConfig, SharedExpertsConfig
from piper_kernels.testing import run_ranks

H, E = 8, 4
COEFFICIENT = 0.01
# one step per entry: tokens of rank 0 and of rank 1
STEPS = [(5, 5), (3, 6), (4, 4), (5, 0)]

Wrap = Callable[[nn.Module], nn.Module]


class Model(nn.Module):
    """A dense layer, a MoE layer and a dense head; returns outputs and the weighted aux loss."""

    def __init__(self, **options: Any) -> None:
        super().__init__()
        self.first = nn.Linear(H, H)
        self.moe = PiperMoE(
            H,
            6,
            E,
            1,
            router=RouterConfig(is_normalized=False, has_bias=True),
            shared_experts=SharedExpertsConfig(intermediate_size=5, is_gated_by_token=True),
            **options,
        )
        self.head = nn.Linear(H, 3)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        y, stats = self.moe(self.first(x), return_stats=True)
        return self.head(y), COEFFICIENT * (stats.balance_loss + stats.z_loss)


def make_model() -> Model:
    """Equal on all ranks; the router sends x to the expert whose number stands in x's column 0."""
    torch.manual_seed(0)
    model = Model().double()
    with torch.no_grad():
        model.first.weight.copy_(torch.eye(H))
        model.first.bias.zero_()
        model.moe.router.weight.mul_(0.01)
        # logits[e] = 40 * e * x0 - 20 * e^2, the largest at e = x0
        model.moe.router.weight[:, 0] = 40.0 * torch.arange(E)
        model.moe.router.bias.copy_(-20.0 * torch.arange(E) ** 2)
    return model


def make_batch(rank: int, step: int) -> Tensor:
    generator = torch.Generator().manual_seed(10 * step + rank)
    x = torch.randn(STEPS[step][rank], H, generator=generator, dtype=torch.float64)
    x[:, 0] = rank
    return x


def loss_of(model: nn.Module, x: Tensor) -> Tensor:
    y, aux_loss = model(x)
    return y.square().sum() + aux_loss


def full(tensor: Tensor) -> Tensor:
    return tensor.full_tensor() if hasattr(tensor, "full_tensor") else tensor


def train(wrap: Wrap) -> list[dict[str, Tensor]]:
    """Gradients of each step, by the parameters' own names, and the final parameters."""
    model = wrap(make_model())
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
    history = []
    for step in range(len(STEPS)):
        optimizer.zero_grad()
        loss_of(model, make_batch(dist.get_rank(), step)).backward()
        grads = {name: full(p.grad).clone() for name, p in model.named_parameters()}
        history.append({name.removeprefix("module."): grad for name, grad in grads.items()})
        optimizer.step()
    parameters = {name: full(p).detach().clone() for name, p in model.named_parameters()}
    return [*history, {name.removeprefix("module."): p for name, p in parameters.items()}]


def expected_history() -> list[dict[str, Tensor]]:
    """The same in one process: per-rank losses, averaged."""
    model = make_model()
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
    history = []
    for step in range(len(STEPS)):
        optimizer.zero_grad()
        ids = [model.moe.route(model.first(make_batch(rank, step))).expert_ids for rank in (0, 1)]
        assert (ids[0] == 0).all()
        assert (ids[1] == 1).all()
        for rank in (0, 1):
            (loss_of(model, make_batch(rank, step)) / 2).backward()
        history.append({name: p.grad.clone() for name, p in model.named_parameters()})
        optimizer.step()
    return [*history, {name: p.detach().clone() for name, p in model.named_parameters()}]


def wrap_ddp(model: nn.Module) -> nn.Module:
    return DistributedDataParallel(model, find_unused_parameters=False)


def wrap_ddp_static(model: nn.Module) -> nn.Module:
    return DistributedDataParallel(model, static_graph=True, gradient_as_bucket_view=True)


def wrap_fsdp(model: nn.Module) -> nn.Module:
    mesh = dist.init_device_mesh("cpu", (dist.get_world_size(),))
    fully_shard(model.moe, mesh=mesh)
    fully_shard(model, mesh=mesh)
    return model


def wrap_fsdp_by_part(model: nn.Module) -> nn.Module:
    mesh = dist.init_device_mesh("cpu", (dist.get_world_size(),))
    fully_shard(model.moe.experts, mesh=mesh)
    return wrap_fsdp(model)


def wrap_accelerate(model: nn.Module) -> nn.Module:
    from accelerate import Accelerator

    return Accelerator(cpu=True).prepare(model)


@pytest.mark.parametrize(
    "wrap",
    [wrap_ddp, wrap_ddp_static, wrap_fsdp, wrap_fsdp_by_part, wrap_accelerate],
    ids=["ddp", "ddp_static_graph", "fsdp2", "fsdp2_by_part", "accelerate"],
)
def test_moe_gradients_are_the_average_over_ranks(wrap: Wrap) -> None:
    """A58, and A44: the auxiliary losses are part of the loss behind any wrapper."""
    expected = expected_history()
    for history in run_ranks(train, 2, wrap, timeout_s=60):
        for found, wanted in zip(history, expected, strict=True):
            assert found.keys() == wanted.keys()
            for name, value in wanted.items():
                torch.testing.assert_close(found[name], value, rtol=1e-9, atol=1e-12, msg=name)


def replay_twice() -> list[Tensor]:
    torch.manual_seed(0)
    moe = DistributedDataParallel(PiperMoE(H, 6, E, 2, dtype=torch.float64))
    torch.manual_seed(1 + dist.get_rank())
    grads = []
    for _ in range(2):
        moe.zero_grad()
        x = torch.randn(5, H, dtype=torch.float64)
        with torch.no_grad():
            routing = moe.module.route(x)
        # DDP complains at the second step if a parameter got no gradient in the first
        moe(x, routing=routing).sum().backward()
        grads.append(moe.module.router.weight.grad)
    return grads


def test_moe_replays_under_ddp_without_unused_parameters() -> None:
    for grads in run_ranks(replay_twice, 2):
        for grad in grads:
            assert torch.equal(grad, torch.zeros(E, H, dtype=torch.float64))
