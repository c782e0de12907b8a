"""Training a small model on several ranks equals one process: losses, gradients, parameters."""

from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn import functional as F

from piper_kernels import PiperMoE, RouterConfig, SharedExpertsConfig, balance_loss
from piper_kernels.dist import (
    ExchangeGroup,
    ExpertParallel,
    clip_grad_norm_,
    global_balance_loss,
    reduce_gradients,
)
from piper_kernels.dist.placement_map import PlacementMap
from piper_kernels.dist.topology_presets import frontier
from piper_kernels.testing import run_ranks

VOCAB, H, E, K, NUM_STEPS, BATCH = 11, 6, 7, 3, 2, 5
COPIED = ((0, 1, 2), (3, 0), (4, 5, 0), (6, 3))


class Model(nn.Module):
    """Embedding, two layers of experts with a residual, output."""

    def __init__(self, ep: ExpertParallel | None) -> None:
        super().__init__()
        self.embedding = nn.Embedding(VOCAB, H, dtype=torch.float64)
        shared = SharedExpertsConfig(intermediate_size=4)
        router = RouterConfig(kind="sigmoid_topk")
        options: dict[str, Any] = {"shared_experts": shared, "router": router, "ep": ep}
        self.layers = nn.ModuleList(
            PiperMoE(H, 5, E, K, dtype=torch.float64, **options) for _ in range(2)
        )
        self.output = nn.Linear(H, VOCAB, dtype=torch.float64)

    def forward(self, tokens: Tensor, targets: Tensor, *, is_parallel: bool) -> Tensor:
        x = self.embedding(tokens)
        balance = x.new_zeros(())
        for layer in self.layers:
            y, stats = layer(x, return_stats=True)
            x = x + y
            balance = balance + (
                global_balance_loss(stats.routing)
                if is_parallel
                else balance_loss(stats.routing, normalization="per_slot")
            )
        return F.cross_entropy(self.output(x), targets) + 0.1 * balance


@dataclass
class Run:
    """What a training run did: losses, and every gradient and parameter by logical name."""

    losses: list[float]
    grads: dict[str, Tensor]
    parameters: dict[str, Tensor]


def batch(step: int, rank: int) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(10 * step + rank)
    tokens, targets = torch.randint(0, VOCAB, (2, BATCH), generator=generator)
    return tokens, targets


def by_expert(model: Model, tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    """One entry for each logical expert that is here."""
    named: dict[str, Tensor] = {}
    for name, tensor in tensors.items():
        if ".experts." not in name:
            named[name] = tensor.clone()
            continue
        dispatcher = model.layers[int(name.split(".")[1])].dispatcher
        local = range(E) if dispatcher is None else dispatcher.local_experts  # type: ignore[union-attr]
        named |= {f"{name}.{e}": tensor[slot].clone() for slot, e in enumerate(local)}
    return named


def train(model: Model, ranks: list[int], *, is_parallel: bool) -> Run:
    # before the first step: A71, the optimizer's parameters are the ones that train
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.05)
    losses = []
    for step in range(NUM_STEPS):
        parts = [batch(step, rank) for rank in ranks]
        tokens, targets = (torch.cat(tensors) for tensors in zip(*parts, strict=True))
        loss = model(tokens, targets, is_parallel=is_parallel)
        optimizer.zero_grad()
        loss.backward()
        mean = loss.detach().clone()
        if is_parallel:
            reduce_gradients(model)
            clip_grad_norm_(model, 0.5)
            dist.all_reduce(mean)
            mean /= dist.get_world_size()
        else:
            nn.utils.clip_grad_norm_(model.parameters(), 0.5)
        losses.append(mean.item())
        optimizer.step()
    grads = {n: p.grad for n, p in model.named_parameters() if p.grad is not None}
    parameters = {n: p.detach() for n, p in model.named_parameters()}
    return Run(losses, by_expert(model, grads), by_expert(model, parameters))


def adopt(model: Model, whole: Model) -> None:
    """Start from the whole model's parameters."""
    for name, parameter in model.named_parameters():
        source = whole.get_parameter(name).detach()
        if ".experts." in name:
            dispatcher = model.layers[int(name.split(".")[1])].dispatcher
            source = source[list(dispatcher.local_experts)]  # type: ignore[union-attr]
        parameter.data.copy_(source)


def worst_difference(have: Run, want: Run) -> float:
    assert set(have.grads) == set(have.parameters)
    pairs = [(have.grads[name], want.grads[name]) for name in have.grads]
    pairs += [(have.parameters[name], want.parameters[name]) for name in have.parameters]
    pairs.append((torch.tensor(have.losses), torch.tensor(want.losses)))
    return max((a - b).abs().max().item() for a, b in pairs)


def train_both(setups: list[tuple[Any, Any]]) -> dict[str, Any]:
    torch.manual_seed(0)
    whole = Model(None)
    models = []
    exchange = ExchangeGroup(None, frontier(1).lay_out((2, 2)))
    for algorithm, slots in setups:
        placement = None if slots is None else PlacementMap(num_experts=E, slots=slots)
        models.append(Model(ExpertParallel(exchange, exchange=algorithm, placement=placement)))
        adopt(models[-1], whole)
    start = {name: p.detach().clone() for name, p in whole.named_parameters()}
    want = train(whole, list(range(dist.get_world_size())), is_parallel=False)
    runs = [train(model, [dist.get_rank()], is_parallel=True) for model in models]
    moved = min((p - start[name]).abs().max().item() for name, p in whole.named_parameters())
    return {
        "worst": [worst_difference(run, want) for run in runs],
        "moved": moved,
        "runs": runs,
    }


def test_training_equals_one_process() -> None:
    # A60, A70, A71
    setups = [("flat", None), ("halo", None), ("halo_dedup", None), ("halo_dedup", COPIED)]
    found = run_ranks(train_both, 4, setups)
    for rank in found:
        # AdamW divides by a root: 1e-15 in a gradient may be 1e-9 in a parameter
        assert max(rank["worst"]) < 1e-8
        assert rank["moved"] > 1e-3
    for index in range(len(setups)):
        runs = [rank["runs"][index] for rank in found]
        assert all(run.losses == runs[0].losses for run in runs)
        for name in runs[0].parameters:
            # what several ranks hold, copies of experts included, has not drifted apart by a bit
            held = [run.parameters[name] for run in runs if name in run.parameters]
            assert all(torch.equal(held[0], other) for other in held[1:])
