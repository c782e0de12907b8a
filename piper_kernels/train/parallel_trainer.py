"""The training step on ranks: the runtime's losses and gradients, clipping, the optimizer.

The same numbers as ``loop.Trainer`` gives in one process, with the same records.
"""

import math
import time
from dataclasses import dataclass, field

import torch
from torch import Tensor
from torch.nn import functional

from piper_kernels.errors import TrainingError, instruction
from piper_kernels.huggingface.balancing import correction_biases, update_correction_biases
from piper_kernels.pipeline.runtime import LossRules, Runtime
from piper_kernels.pipeline.token_loss import IGNORED
from piper_kernels.train.evaluate import HeldOut
from piper_kernels.train.metrics import StepRecord
from piper_kernels.train.optimizer import learning_rate
from piper_kernels.train.sampler import WindowSampler
from piper_kernels.train.settings import TrainSettings


def loss_rules(settings: TrainSettings, *, has_correction_bias: bool) -> LossRules:
    """What the settings mean for the runtime: a model that balances by a bias has no loss for it.

    Example:
        >>> loss_rules(TrainSettings(), has_correction_bias=True).balance_weight
        0.0
    """
    return LossRules(
        balance_weight=0.0 if has_correction_bias else settings.balance_loss_weight,
        z_weight=settings.z_loss_weight,
        is_bf16=settings.precision == "bf16",
    )


@dataclass(kw_only=True, slots=True, eq=False)
class ParallelTrainer:
    """One rank's stages in training, and where the run stands.

    Attributes:
        runtime: of this rank.
        optimizer: over its parameters.
        sampler: the data, by number of windows drawn; every rank can draw every window.
        settings: of the run.
        tokens_per_byte: turns nats per token into nats per byte.
        step: optimizer steps done or skipped.
        num_skipped: steps whose loss or gradient was not finite.
        biases: per stage, the correction bias of each layer that has one.
    """

    runtime: Runtime
    optimizer: torch.optim.Optimizer
    sampler: WindowSampler
    settings: TrainSettings
    tokens_per_byte: float
    step: int = 0
    num_skipped: int = 0
    biases: list[list[Tensor]] = field(init=False)

    def __post_init__(self) -> None:
        self.biases = [correction_biases(stage.model) for stage in self.runtime.stages]

    @property
    def replica(self) -> int:
        """Which part of each batch is this rank's."""
        where = self.runtime.mesh.coordinates
        return where["dp"] * self.runtime.plan.mesh.ep + where["ep"]

    def train_step(self) -> StepRecord:
        """Draw this rank's part of the next batch and make one optimizer step.

        Raises:
            TrainingError: on every rank, if the loss or the gradient is not finite and the settings
                say stop; the weights stay as they were.
            TransferError: a peer died, hangs or disagrees.
        """
        started = time.perf_counter()
        settings = self.settings
        rate = learning_rate(self.step + 1, settings)
        for group in self.optimizer.param_groups:
            group["lr"] = rate
        rows = settings.batch_size // self.runtime.plan.mesh.num_replicas
        first = self.step * settings.batch_size + self.replica * rows
        window = self.sampler.windows(first, rows).to(self.runtime.device)
        losses = self.runtime.forward_backward(window[:, :-1], window[:, 1:])
        self.runtime.gradients.reduce()
        norm = self.runtime.gradients.clip(settings.clip_norm)
        # both numbers are equal on all ranks, so all decide alike
        if self._is_finite(losses.loss, norm):
            self.optimizer.step()
            for stage, biases in zip(self.runtime.stages, self.biases, strict=True):
                if biases and stage.counter is not None:
                    speed = settings.correction_bias_speed
                    update_correction_biases(biases, stage.counter, speed)
        else:
            self.num_skipped += 1
        self.optimizer.zero_grad(set_to_none=True)
        self.step += 1
        has_balance = self.runtime.rules.balance_weight > 0
        return StepRecord(
            step=self.step,
            loss=losses.loss * self.tokens_per_byte,
            balance_loss=losses.balance_loss if has_balance else None,
            learning_rate=rate,
            grad_norm=norm,
            tokens=self.step * settings.batch_size * settings.sequence_length,
            step_s=time.perf_counter() - started,
            expert_counts=losses.expert_counts,
        )

    def held_out_loss(self, held_out: HeldOut) -> float:
        """Cross-entropy of the held-out text, nats per byte; equal on all ranks."""
        plan = self.runtime.plan
        rows = plan.num_microbatches * plan.microbatch_size
        batch = rows * plan.mesh.num_replicas
        total = 0.0
        for windows in held_out.windows.split(batch):
            missing = batch - len(windows)
            # windows without a target fill the last batch
            whole = functional.pad(windows, (0, 0, 0, missing), value=IGNORED)
            part = whole[self.replica * rows : (self.replica + 1) * rows].to(self.runtime.device)
            losses = self.runtime.evaluate(part[:, :-1].clamp(min=0), part[:, 1:])
            total += losses.loss * losses.num_targets
        return total / held_out.scored_bytes

    def _is_finite(self, loss: float, norm: float) -> bool:
        name, value = ("loss", loss) if not math.isfinite(loss) else ("grad_norm", norm)
        if math.isfinite(value):
            return True
        if self.settings.non_finite == "stop":
            where = f"{self.runtime.mesh}: {name} of step {self.step + 1}"
            culprit = self.runtime.find_non_finite()
            remedy = f"{culprit} Lower --learning-rate, or skip such steps: --non-finite skip."
            message = instruction("train_step", where, "be a finite number", value, remedy)
            raise TrainingError(message)
        return False
