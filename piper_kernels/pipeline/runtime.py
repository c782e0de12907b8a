"""Runtime: carries out a plan's training step on this rank.

Stages and schedule come from torch.distributed.pipelining, experts are exchanged inside the stages,
gradients reduced over who holds the same parameters. Nothing here decides anything: the plan did.

Letters: M microbatches, b sequences in one, R replicas (dp * ep), S tokens in a sequence.
"""

from collections.abc import Iterable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.pipelining.schedules import _PipelineSchedule

from piper_kernels.dist.mesh import ParallelMesh
from piper_kernels.dist.traffic_classes import TrafficClasses
from piper_kernels.errors import PlanError, require
from piper_kernels.pipeline.forward_only import forward_only
from piper_kernels.pipeline.non_finite import NonFiniteWatch
from piper_kernels.pipeline.plan import Plan
from piper_kernels.pipeline.schedule import stage_owners
from piper_kernels.pipeline.stage import Stage
from piper_kernels.pipeline.stage_gradients import StageGradients
from piper_kernels.pipeline.token_loss import IGNORED, summed_cross_entropy
from piper_kernels.pipeline.torch_schedule import build_torch_schedule


@dataclass(frozen=True, kw_only=True, slots=True)
class LossRules:
    """What is minimised, and in which precision.

    Attributes:
        balance_weight: of the mean balance loss over microbatches and layers.
        z_weight: of the routers' z-loss, likewise.
        is_bf16: stages run under autocast to bfloat16; parameters, their gradients and the
            optimizer stay fp32, so the parameters are the master weights.
    """

    balance_weight: float = 0.0
    z_weight: float = 0.0
    is_bf16: bool = False


@dataclass(frozen=True, kw_only=True, slots=True)
class StepLosses:
    """What one step's forward passes gave; equal on all ranks.

    Attributes:
        loss: cross-entropy per target of the whole step, nats.
        balance_loss: mean over layers, weighted over microbatches by real tokens; top_k at balance.
        z_loss: likewise.
        num_targets: tokens that were predicted.
        expert_counts: ``[num_expert_layers][E]`` rows of each logical expert.
    """

    loss: float
    balance_loss: float
    z_loss: float
    num_targets: int
    expert_counts: list[list[int]]


@dataclass(slots=True, eq=False)
class _Totals:
    """Tokens of the step that is under way, over all replicas."""

    num_targets: Tensor
    num_real: Tensor


@dataclass(kw_only=True, slots=True, eq=False)
class Runtime:
    """One rank's part of a training job.

    Args:
        plan: whose schedule and microbatches are carried out.
        mesh: its process groups.
        stages: this rank's, in model order.
        rules: of the loss.

    Attributes:
        gradients: reduces and clips them.
        modules: all stages, for ``parameters()`` and the like.

    Example:
        ``losses = runtime.forward_backward(inputs, targets)``, then ``runtime.gradients.reduce()``,
        ``runtime.gradients.clip(1.0)``, ``optimizer.step()``, ``optimizer.zero_grad()``.
    """

    plan: Plan
    mesh: ParallelMesh
    stages: tuple[Stage, ...]
    rules: LossRules = field(default_factory=LossRules)
    gradients: StageGradients = field(init=False)
    modules: nn.ModuleList = field(init=False)
    _classes: TrafficClasses = field(init=False)
    _runners: dict[int, nn.Module] = field(init=False)
    _schedules: dict[tuple[int, int], _PipelineSchedule] = field(init=False)
    _totals: _Totals = field(init=False)
    _first_rows: tuple[int, ...] = field(init=False)
    _counts_shape: tuple[int, int] = field(init=False)
    _watches: list[NonFiniteWatch] = field(init=False)

    def __post_init__(self) -> None:
        self.modules = nn.ModuleList(self.stages)
        _share_tied_weight(self.stages)
        self._classes = TrafficClasses()
        self.gradients = StageGradients(self.stages, self.mesh, self._classes)
        self._schedules = {}
        one = torch.ones((), dtype=torch.int64, device=self.device)
        self._totals = _Totals(one, one)
        self._runners = {stage.place.index: _Runner(stage, self) for stage in self.stages}
        for stage in self.stages:
            stage.balance_scale = self.rules.balance_weight
            stage.z_scale = self.rules.z_weight
        self._first_rows, self._counts_shape = self._place_counts()
        self._watches = [NonFiniteWatch(stage) for stage in self.stages]

    @property
    def device(self) -> torch.device:
        """Where the stages are."""
        return next(self.modules.parameters()).device

    @property
    def dtype(self) -> torch.dtype:
        """Of the parameters, and of what stages hand to one another."""
        return next(self.modules.parameters()).dtype

    @property
    def _stages_per_rank(self) -> int:
        return self.num_stages // self.plan.mesh.pp

    @property
    def num_stages(self) -> int:
        """Of the whole pipeline."""
        return len(self.plan.layers_per_stage)

    def forward_backward(
        self, inputs: Tensor, targets: Tensor, mask: Tensor | None = None
    ) -> StepLosses:
        """Run all microbatches of this rank's replica through the pipeline, both ways.

        Gradients of the step's mean loss per target add up in ``.grad``, of this rank's tokens and,
        in experts, of all that were sent here. All ranks call it; those of one pipeline give the
        same batch.

        Args:
            inputs: ``[M * b, S]`` int64 token ids.
            targets: ``[M * b, S]`` int64; ``IGNORED`` where nothing is to be predicted.
            mask: ``[M * b, S]``, 1 for tokens and 0 for padding; ``None``: no padding. On all ranks
                of a pipeline or on none.

        Raises:
            PlanError: on every rank, if batches differ in shape or do not divide into M.
            TransferError: a peer of an exchange died, hangs or disagrees.
        """
        self._agree(inputs, targets, mask)
        for stage in self.stages:
            if stage.counter is not None:
                stage.counter.take()
        for watch in self._watches:
            watch.reset()
        schedule = self._schedule_for(inputs)
        losses = self._run(schedule, inputs, targets, mask)
        return self._collect(losses)

    @torch.no_grad()
    def evaluate(self, inputs: Tensor, targets: Tensor, mask: Tensor | None = None) -> StepLosses:
        """The losses of a batch, without gradients, load counts or router losses.

        Takes what :meth:`forward_backward` takes.
        """
        self._agree(inputs, targets, mask)
        m, losses = self.plan.num_microbatches, list[Tensor]()
        parts, masks = inputs.chunk(m), [None] * m if mask is None else mask.chunk(m)
        wanted = targets.chunk(m)
        self.modules.eval()
        try:
            forward_only(
                self._runners,
                stage_owners(self.plan.schedule, self.plan.mesh.pp, self._stages_per_rank),
                list(zip(parts, masks, strict=True)),
                hidden=self._hidden(parts[0], self.device),
                group=self.mesh.pp_group,
                take=lambda number, logits: losses.append(self._loss(logits, wanted[number])),
            )
        finally:
            self.modules.train()
        return self._collect(losses)

    def find_non_finite(self) -> str:
        """Where the first number of the last step that is not finite arose; equal on all ranks.

        Outputs are watched layer by layer, see :class:`NonFiniteWatch`. All ranks call it.
        """
        mine = [watch.finding() for watch in self._watches]
        found = next((text for text in mine if text), "")
        every: list[Any] = [None] * self.mesh.layout.size
        stage = self.stages[0].place.index
        dist.all_gather_object(every, (bool(not found), stage, f"{self.mesh}: {found}"))
        is_clean, _, text = min(every)
        return "All layers' outputs were finite." if is_clean else f"First seen at {text}."

    def close(self) -> None:
        """End the background thread that reduces gradients."""
        self._classes.close()

    def _run(
        self,
        schedule: _PipelineSchedule,
        inputs: Tensor,
        targets: Tensor,
        mask: Tensor | None,
    ) -> list[Tensor]:
        losses: list[Tensor] = []
        options: dict[str, Any] = {} if mask is None else {"attention_mask": mask}
        has_first = any(stage.place.is_first for stage in self.stages)
        if any(stage.place.is_last for stage in self.stages):
            options |= {"target": targets, "losses": losses}
        schedule.step(*((inputs,) if has_first else ()), return_outputs=False, **options)
        return losses

    def _agree(self, inputs: Tensor, targets: Tensor, mask: Tensor | None) -> None:
        """Compare shapes over all ranks, and count the step's targets and tokens."""
        num_real = inputs.numel() if mask is None else int((mask != 0).sum())
        sizes = [*inputs.shape, int((targets != IGNORED).sum()), num_real]
        mine = torch.tensor(sizes, device=self.device)
        every = [torch.empty_like(mine) for _ in range(self.mesh.layout.size)]
        dist.all_gather(every, mine)
        table = torch.stack(every)
        shapes = {tuple(row) for row in table[:, :2].tolist()}
        where, name = str(self.mesh), "Runtime.forward_backward"
        requirement = "have one shape on all ranks"
        fits = len(shapes) == 1
        value = f"{sorted(shapes)}"
        require(fits, f"{where}: {name}", "inputs", requirement, value, error=PlanError)
        num_rows, num_microbatches = inputs.shape[0], self.plan.num_microbatches
        requirement = f"have rows that divide into {num_microbatches} microbatches"
        fits = num_rows > 0 and num_rows % num_microbatches == 0
        remedy = "Change the batch, or the plan's num_microbatches."
        require(fits, f"{where}: {name}", "inputs", requirement, num_rows, remedy, error=PlanError)
        # the ranks of one stage hold each batch once
        replicas = [group[0] for group in self.mesh.layout.groups("pp")]
        totals = table[replicas, 2:].sum(0).clamp(min=1)
        self._totals = _Totals(totals[0], totals[1])

    def _schedule_for(self, inputs: Tensor) -> _PipelineSchedule:
        """One object for each shape: torch makes its buffers once."""
        plan = self.plan
        size, seq_len = inputs.shape[0] // plan.num_microbatches, inputs.shape[1]
        key = (size, seq_len)
        if key not in self._schedules:
            tokens = torch.empty(size, seq_len, dtype=torch.int64, device="meta")
            hidden = self._hidden(tokens, torch.device("meta"))
            config: Any = self.stages[0].model.config
            self._schedules[key] = build_torch_schedule(
                plan.schedule,
                self._runners,
                self.num_stages,
                plan.num_microbatches,
                tokens=tokens,
                hidden=hidden,
                logits=hidden.new_empty(size, seq_len, config.vocab_size),
                loss=self._loss,
                group=self.mesh.pp_group,
                device=self.device,
            )
        return self._schedules[key]

    def _hidden(self, tokens: Tensor, device: torch.device) -> Tensor:
        """``[b, S, H]``: what stages hand over for such tokens."""
        width = self.stages[0].model.config.hidden_size
        return torch.empty(*tokens.shape, width, dtype=self.dtype, device=device)

    def _loss(self, logits: Tensor, targets: Tensor) -> Tensor:
        return summed_cross_entropy(logits, targets) / self._totals.num_targets

    def _place_counts(self) -> tuple[tuple[int, ...], tuple[int, int]]:
        """Which rows of the whole model's counts are each stage's."""
        layers = [[] if s.counter is None else s.counter.layers for s in self.stages]
        widths = [0 if s.counter is None else s.counter.counts.shape[1] for s in self.stages]
        every: list[Any] = [None] * self.mesh.layout.size
        dist.all_gather_object(every, (layers, max(widths)))
        numbers = sorted({n for found, _ in every for stage in found for n in stage})
        starts = tuple(numbers.index(stage[0]) if stage else 0 for stage in layers)
        return starts, (len(numbers), max(width for _, width in every))

    def _collect(self, losses: Iterable[Tensor]) -> StepLosses:
        """One sum over all ranks: losses of the last stages, router losses and counts of all."""
        num_layers, num_experts = self._counts_shape
        # counts below 2^53 are exact in fp64
        totals = torch.zeros(3 + num_layers * num_experts, dtype=torch.float64, device=self.device)
        counts = totals[3:].view(num_layers, num_experts)
        for loss in losses:
            totals[0] += loss.detach()
        for stage, first in zip(self.stages, self._first_rows, strict=True):
            totals[1] += stage.balance_loss
            totals[2] += stage.z_loss
            stage.balance_loss.zero_()
            stage.z_loss.zero_()
            if stage.counter is not None:
                own = stage.counter.counts
                counts[first : first + len(own), : own.shape[1]] += own
        dist.all_reduce(totals)
        for stage, first in zip(self.stages, self._first_rows, strict=True):
            if stage.counter is not None:
                own = stage.counter.counts
                # the sum over all replicas, for whoever balances by it, until the next step
                own.copy_(counts[first : first + len(own), : own.shape[1]])
        values = totals.tolist()
        return StepLosses(
            loss=values[0],
            balance_loss=values[1],
            z_loss=values[2],
            num_targets=int(self._totals.num_targets),
            expert_counts=counts.long().tolist(),
        )

    def autocast(self) -> AbstractContextManager[Any]:
        """What stages run under."""
        if not self.rules.is_bf16:
            return nullcontext()
        return torch.autocast(self.device.type, dtype=torch.bfloat16)

    def share_of(self, inputs: Tensor, mask: Tensor | None) -> Tensor:
        """A microbatch's real tokens over the step's."""
        num_real = inputs.shape[0] * inputs.shape[1] if mask is None else (mask != 0).sum()
        return num_real / self._totals.num_real.double()


class _Runner(nn.Module):
    """What torch calls for a stage: one tensor in, one of the announced dtype out."""

    def __init__(self, stage: Stage, runtime: Runtime) -> None:
        super().__init__()
        self.stage = stage
        # not a child: its parameters are those of this stage and others
        self._runtime = (runtime,)

    def forward(self, inputs: Tensor, attention_mask: Tensor | None = None) -> Tensor:
        (runtime,) = self._runtime
        self.stage.share = runtime.share_of(inputs, attention_mask)
        with runtime.autocast():
            output: Tensor = self.stage(inputs, attention_mask)
        return output.to(runtime.dtype)


def _share_tied_weight(stages: tuple[Stage, ...]) -> None:
    """On a V the first and the last stage are on one rank: then embedding and head are one."""
    tied = [stage for stage in stages if stage.tied_weight is not None]
    if len(tied) == 2:
        first, last = tied
        last.model.lm_head.weight = first.tied_weight
        last.tied_weight = first.tied_weight
