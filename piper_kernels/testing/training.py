"""One training run twice: by the runtime on ranks, and by a plain loop in one process.

The loop shares neither schedule nor losses nor clipping with the runtime, so that equality of the
two says something. Imported by its own name only: the other helpers need no transformers.
"""

from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from piper_kernels.huggingface.expert_counts import (
    expert_modules,
    local_expert_ids,
    num_logical_experts,
)
from piper_kernels.pipeline.launch import build_runtime
from piper_kernels.pipeline.memory_settings import Checkpointing
from piper_kernels.pipeline.plan import Mesh, Plan
from piper_kernels.pipeline.runtime import LossRules, Runtime
from piper_kernels.pipeline.schedule import ScheduleName
from piper_kernels.pipeline.stage import StagePlace
from piper_kernels.pipeline.stage_build import build_stage
from piper_kernels.testing.tiny_models import tiny_config

IGNORED = -100


@dataclass(frozen=True, kw_only=True, slots=True)
class TrainingCase:
    """What is trained, how, and on which mesh.

    Attributes:
        pp: pipeline ranks.
        dp: replicas of the experts.
        ep: ranks that share experts.
        schedule: of the pipeline.
        layers: of each stage.
        num_microbatches: M, per replica.
        rows: sequences of a step, over all replicas.
        seq_len: tokens of a sequence.
        family: of the model; a softmax router for the plain loop's balance loss.
        config: what to change in its config.
        dtype: of the parameters.
        optimizer: ``sgd`` or ``adamw``.
        num_steps: of the run.
        is_padded: sequences are padded on the right, and all of the last replica's in some steps.
        balance_weight: of the balance loss.
        z_weight: of the z-loss.
        clip_norm: largest gradient norm.
        checkpointing: of activations.
        is_skewed: routers begin at zero, so all tokens go to the first experts of each layer.
    """

    pp: int = 1
    dp: int = 1
    ep: int = 1
    schedule: ScheduleName = "gpipe"
    layers: tuple[int, ...] = (4,)
    num_microbatches: int = 2
    rows: int = 8
    seq_len: int = 7
    family: str = "mixtral"
    config: dict[str, Any] = field(default_factory=dict)
    dtype: torch.dtype = torch.float64
    optimizer: str = "adamw"
    num_steps: int = 3
    is_padded: bool = False
    balance_weight: float = 0.1
    z_weight: float = 0.01
    clip_norm: float = 0.5
    checkpointing: Checkpointing = "none"
    is_skewed: bool = False

    @property
    def num_ranks(self) -> int:
        """Ranks in all."""
        return self.pp * self.dp * self.ep

    @property
    def num_replicas(self) -> int:
        """R."""
        return self.dp * self.ep

    @property
    def microbatch_size(self) -> int:
        """Sequences of a microbatch."""
        return self.rows // (self.num_microbatches * self.num_replicas)

    def plan(self) -> Plan:
        """The plan that the runtime carries out."""
        return Plan(
            model_digest="0" * 32,
            world_size=self.num_ranks,
            mesh=Mesh(pp=self.pp, dp=self.dp, ep=self.ep),
            layers_per_stage=self.layers,
            schedule=self.schedule,
            num_microbatches=self.num_microbatches,
            microbatch_size=self.microbatch_size,
            seq_len=self.seq_len,
            checkpointing=self.checkpointing,
        )

    def build_config(self) -> Any:
        """The model's config."""
        return tiny_config(self.family, num_hidden_layers=sum(self.layers), **self.config)

    def batch(self, step: int) -> tuple[Tensor, Tensor, Tensor | None]:
        """Inputs, targets and mask of all replicas, ``[rows, seq_len]`` each."""
        generator = torch.Generator().manual_seed(100 + step)
        tokens = torch.randint(3, 60, (self.rows, self.seq_len + 1), generator=generator)
        inputs, targets = tokens[:, :-1], tokens[:, 1:].clone()
        if not self.is_padded:
            return inputs, targets, None
        lengths = torch.randint(2, self.seq_len + 1, (self.rows,), generator=generator)
        if step % 2 == 1:
            lengths[-(self.rows // self.num_replicas) :] = 0 if self.num_replicas > 1 else 1
        mask = (torch.arange(self.seq_len) < lengths[:, None]).long()
        targets[mask == 0] = IGNORED
        return inputs, targets, mask


@dataclass(slots=True, eq=False)
class Trained:
    """What a run gave.

    Attributes:
        losses: cross-entropy of each step.
        balance_losses: of each step.
        z_losses: of each step.
        norms: of all gradients before clipping.
        counts: rows by layer and expert, of each step.
        parameters: at the end, one entry for each logical expert that is here.
    """

    losses: list[float] = field(default_factory=list)
    balance_losses: list[float] = field(default_factory=list)
    z_losses: list[float] = field(default_factory=list)
    norms: list[float] = field(default_factory=list)
    counts: list[list[list[int]]] = field(default_factory=list)
    parameters: dict[str, Tensor] = field(default_factory=dict)

    def numbers(self) -> Tensor:
        """All losses and norms, ``[4, num_steps]`` fp64."""
        rows = [self.losses, self.balance_losses, self.z_losses, self.norms]
        return torch.tensor(rows, dtype=torch.float64)


def train_on_ranks(cases: list[TrainingCase]) -> list[Trained]:
    """Train each case through the runtime; to be called on every rank."""
    return [_train(case) for case in cases]


def train_plainly(case: TrainingCase) -> Trained:
    """Train the whole model in this process, microbatch after microbatch."""
    num_layers = sum(case.layers)
    place = StagePlace(index=0, num_stages=1, layers=range(num_layers))
    model: Any = build_stage(case.build_config(), place, seed=0, dtype=case.dtype).model
    _skew(model, case)
    optimizer = _optimizer(model, case)
    found = Trained()
    for step in range(case.num_steps):
        _plain_step(model, optimizer, case, case.batch(step), found)
    found.parameters = _by_expert(model)
    return found


def worst_difference(have: Trained, want: Trained) -> float:
    """Largest difference of any loss, norm or parameter."""
    assert have.counts == want.counts, "rows of experts differ"
    pairs = [(tensor, want.parameters[name]) for name, tensor in have.parameters.items()]
    pairs.append((have.numbers(), want.numbers()))
    return max(float((a - b).abs().max()) for a, b in pairs)


def _train(case: TrainingCase) -> Trained:
    rules = LossRules(balance_weight=case.balance_weight, z_weight=case.z_weight)
    config = case.build_config()
    runtime = build_runtime(case.plan(), config, seed=0, rules=rules, dtype=case.dtype)
    _skew(runtime.modules, case)
    optimizer = _optimizer(runtime.modules, case)
    where, found = runtime.mesh.coordinates, Trained()
    replica, share = where["dp"] * case.ep + where["ep"], case.rows // case.num_replicas
    rows = slice(replica * share, (replica + 1) * share)
    for step in range(case.num_steps):
        inputs, targets, mask = case.batch(step)
        part = None if mask is None else mask[rows]
        before = runtime.evaluate(inputs[rows], targets[rows], part)
        losses = runtime.forward_backward(inputs[rows], targets[rows], part)
        # the same forwards, in another order, that leave nothing behind
        assert abs(before.loss - losses.loss) < 1e-4, (before.loss, losses.loss)
        runtime.gradients.reduce()
        found.norms.append(runtime.gradients.clip(case.clip_norm))
        optimizer.step()
        optimizer.zero_grad()
        found.losses.append(losses.loss)
        found.balance_losses.append(losses.balance_loss)
        found.z_losses.append(losses.z_loss)
        found.counts.append(losses.expert_counts)
    found.parameters = runtime_parameters(runtime)
    runtime.close()
    return found


def runtime_parameters(runtime: Runtime) -> dict[str, Tensor]:
    """This rank's parameters by the whole model's names, one entry for each logical expert."""
    found: dict[str, Tensor] = {}
    for stage in runtime.stages:
        found |= _by_expert(stage.model)
    return found


def _by_expert(model: nn.Module) -> dict[str, Tensor]:
    experts = dict(expert_modules(model).values())
    found: dict[str, Tensor] = {}
    for name, parameter in model.named_parameters(remove_duplicate=False):
        module = experts.get(name.rpartition(".")[0])
        tensor = parameter.detach().clone()
        if module is None or len(tensor) != module.num_experts:
            found[name] = tensor
            continue
        ids = local_expert_ids(module)
        found |= {f"{name}.{e}": tensor[slot] for slot, e in enumerate(ids)}
    return found


def _skew(model: nn.Module, case: TrainingCase) -> None:
    if case.is_skewed:
        for name, parameter in model.named_parameters():
            if name.endswith("gate.weight"):
                parameter.data.zero_()


def _optimizer(model: nn.Module, case: TrainingCase) -> torch.optim.Optimizer:
    if case.optimizer == "sgd":
        return torch.optim.SGD(model.parameters(), lr=0.1)
    return torch.optim.AdamW(model.parameters(), lr=1e-2, weight_decay=0.1)


def _plain_step(
    model: Any,
    optimizer: torch.optim.Optimizer,
    case: TrainingCase,
    batch: tuple[Tensor, Tensor, Tensor | None],
    found: Trained,
) -> None:
    inputs, targets, mask = batch
    num_targets = int((targets != IGNORED).sum())
    num_real = inputs.numel() if mask is None else int(mask.sum())
    sums = torch.zeros(3, dtype=torch.float64)
    experts = [module for _, module in expert_modules(model).values()]
    shape = len(experts), num_logical_experts(experts[0])
    counts = torch.zeros(shape, dtype=torch.int64)
    for first in range(0, case.rows, case.microbatch_size):
        rows = slice(first, first + case.microbatch_size)
        part = None if mask is None else mask[rows]
        output = model(
            inputs[rows], attention_mask=part, use_cache=False, output_router_logits=True
        )
        wide = output.logits if case.dtype == torch.float64 else output.logits.float()
        loss = functional.cross_entropy(
            wide.flatten(0, 1), targets[rows].flatten(), ignore_index=IGNORED, reduction="sum"
        )
        loss = loss / num_targets
        is_real = torch.ones(inputs[rows].numel(), dtype=torch.bool)
        is_real = is_real if part is None else part.flatten().bool()
        share = int(is_real.sum()) / num_real
        balance, z = _router_losses(model, output.router_logits, is_real, counts)
        total = loss + share * (case.balance_weight * balance + case.z_weight * z)
        total.backward()
        sums += torch.stack([loss.detach(), share * balance.detach(), share * z.detach()])
    norm = nn.utils.clip_grad_norm_(model.parameters(), case.clip_norm)
    optimizer.step()
    optimizer.zero_grad()
    found.losses.append(float(sums[0]))
    found.balance_losses.append(float(sums[1]))
    found.z_losses.append(float(sums[2]))
    found.norms.append(float(norm))
    found.counts.append(counts.tolist())


def _router_losses(
    model: Any, router_logits: tuple[Tensor, ...], is_real: Tensor, counts: Tensor
) -> tuple[Tensor, Tensor]:
    """Balance and z-loss of a microbatch, straight from their formulas; rows are counted."""
    balance, z = [], []
    for layer, logits in enumerate(router_logits):
        real = logits[is_real]
        real = real if real.dtype == torch.float64 else real.float()
        num_tokens, num_experts = max(len(real), 1), logits.shape[1]
        chosen = real.topk(model.config.num_experts_per_tok).indices.flatten()
        rows = torch.bincount(chosen, minlength=num_experts)
        counts[layer] += rows
        share = rows.to(real.dtype) / num_tokens
        balance.append(num_experts * (share * (real.softmax(-1).sum(0) / num_tokens)).sum())
        z.append(real.logsumexp(-1).square().sum() / num_tokens)
    return torch.stack(balance).mean(), torch.stack(z).mean()
