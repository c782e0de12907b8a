"""The training step: microbatches, loss, gradients, clipping, AdamW. Nothing else."""

import math
import time
from dataclasses import dataclass, field

import torch
from torch import Tensor, nn

from piper_kernels.errors import TrainingError, instruction
from piper_kernels.huggingface.balancing import (
    correction_biases,
    mean_balance_loss,
    mean_z_loss,
    update_correction_biases,
)
from piper_kernels.huggingface.expert_counts import ExpertCounter
from piper_kernels.pipeline.token_loss import summed_cross_entropy
from piper_kernels.train.evaluate import autocast
from piper_kernels.train.metrics import StepRecord
from piper_kernels.train.model import forward_logits
from piper_kernels.train.optimizer import learning_rate
from piper_kernels.train.sampler import WindowSampler
from piper_kernels.train.settings import TrainSettings


@dataclass(kw_only=True, slots=True, eq=False)
class Trainer:
    """A model in training, and where it stands.

    Attributes:
        model: a causal language model in training mode.
        optimizer: over the model's parameters.
        sampler: the data, by number of windows drawn.
        settings: of the run.
        tokens_per_byte: turns nats per token into nats per byte.
        step: optimizer steps done.
        counter: which experts were chosen.
        correction_biases: ``[E]`` per layer, of models that balance without a loss; else empty.
    """

    model: nn.Module
    optimizer: torch.optim.Optimizer
    sampler: WindowSampler
    settings: TrainSettings
    tokens_per_byte: float
    step: int = 0
    counter: ExpertCounter = field(init=False)
    correction_biases: list[Tensor] = field(init=False)

    def __post_init__(self) -> None:
        self.counter = ExpertCounter(self.model)
        self.correction_biases = correction_biases(self.model)

    @property
    def samples_drawn(self) -> int:
        """Windows of text seen so far: the whole state of the data."""
        return self.step * self.settings.batch_size

    def train_step(self) -> StepRecord:
        """Draw the next batch and make one optimizer step.

        Raises:
            TrainingError: if the loss or the gradient is not finite; the weights stay as they were.
        """
        started = time.perf_counter()
        settings = self.settings
        rate = learning_rate(self.step + 1, settings)
        for group in self.optimizer.param_groups:
            group["lr"] = rate
        windows = self.sampler.windows(self.samples_drawn, settings.batch_size)
        loss, balance_loss = self._accumulate(windows)
        self._require_finite("loss", loss)
        grad_norm = float(nn.utils.clip_grad_norm_(self.model.parameters(), settings.clip_norm))
        self._require_finite("grad_norm", grad_norm)
        self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=True)
        if self.correction_biases:
            speed = settings.correction_bias_speed
            update_correction_biases(self.correction_biases, self.counter, speed)
        self.step += 1
        return StepRecord(
            step=self.step,
            loss=loss * self.tokens_per_byte,
            balance_loss=balance_loss,
            learning_rate=rate,
            grad_norm=grad_norm,
            tokens=self.samples_drawn * settings.sequence_length,
            step_s=time.perf_counter() - started,
            expert_counts=self.counter.take(),
        )

    def _accumulate(self, windows: Tensor) -> tuple[float, float | None]:
        """Add up the gradients of all microbatches; mean loss per token and mean balance loss.

        Every microbatch is divided by the tokens of the whole batch, so cutting a batch into more
        microbatches changes nothing. The balance loss alone is a mean over microbatches: each
        balances itself.
        """
        settings = self.settings
        device = next(self.model.parameters()).device
        num_targets = windows.shape[0] * settings.sequence_length
        total, total_balance = torch.zeros((), device=device), torch.zeros((), device=device)
        wants_balance = settings.balance_loss_weight > 0 and not self.correction_biases
        wants_z = settings.z_loss_weight > 0
        balance = None
        for microbatch in windows.split(settings.microbatch_size):
            window = microbatch.to(device)
            with self.counter.counting(), autocast(settings, device):
                logits, router_logits = forward_logits(
                    self.model, window[:, :-1], wants_router_logits=wants_balance or wants_z
                )
            loss = summed_cross_entropy(logits, window[:, 1:]) / num_targets
            total += loss.detach()
            if router_logits is not None and wants_z:
                z_loss = mean_z_loss(router_logits) / settings.accumulate
                loss = loss + settings.z_loss_weight * z_loss
            if router_logits is not None and wants_balance:
                balance = mean_balance_loss(router_logits, self.counter) / settings.accumulate
                total_balance += balance.detach()
                loss = loss + settings.balance_loss_weight * balance
            loss.backward()
        return float(total), None if balance is None else float(total_balance)

    def _require_finite(self, name: str, value: float) -> None:
        if not math.isfinite(value):
            where = f"{name} of step {self.step + 1}"
            remedy = "Start a new run with a lower --learning-rate or --clip-norm."
            message = instruction("train_step", where, "be a finite number", value, remedy)
            raise TrainingError(message)
