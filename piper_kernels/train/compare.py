"""The same model and step with each experts implementation, timed side by side in one run."""

import statistics
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from piper_kernels.errors import BackendError, instruction
from piper_kernels.train.evaluate import autocast, summed_cross_entropy
from piper_kernels.train.model import forward_logits
from piper_kernels.train.optimizer import build_optimizer
from piper_kernels.train.settings import TrainSettings

BASELINE = "eager"
# largest relative L2 difference of logits and of all gradients. fp32 kernels differ by 1e-6; one
# token that a rounding error sends to another expert makes 1e-3 of a gradient of some thousand
_TOLERANCE = {"fp32": 5e-3, "bf16": 5e-2}


@dataclass(frozen=True, kw_only=True, slots=True)
class Timing:
    """How one implementation did.

    Attributes:
        experts: its name.
        difference: relative L2 difference of its gradients from the baseline's.
        step_s: seconds of each timed step, in the order of the rounds.
        tokens: tokens per step.
        speedups: per round, the baseline's time over this one's.
    """

    experts: str
    difference: float
    step_s: tuple[float, ...]
    tokens: int
    speedups: tuple[float, ...]

    @property
    def median_s(self) -> float:
        """Median seconds per step."""
        return statistics.median(self.step_s)


def compare_experts(
    model: Any,
    windows: Tensor,
    settings: TrainSettings,
    names: Sequence[str] = (BASELINE, "grouped_mm", "piper"),
) -> list[Timing]:
    """Check that all implementations agree, then time whole training steps, interleaved.

    A step is forward, backward, clipping and AdamW at learning rate 0, so the weights stay what
    they are, to the bit. Each round runs every implementation once, each time another one first.

    Args:
        model: the trained model; afterwards it runs ``settings.experts`` again, without gradients.
        windows: ``[B, S + 1]`` int64, one microbatch.
        settings: of the run; ``compare_rounds`` rounds are timed after one that is not.
        names: implementations, the baseline first.

    Raises:
        BackendError: if one computes something else than the baseline: wrong results are not timed.
    """
    window = windows.to(next(model.parameters()).device)
    differences = _agreement(model, window, settings, names)
    optimizer = build_optimizer(model, settings)
    for group in optimizer.param_groups:
        group["lr"] = 0.0
    seconds: dict[str, list[float]] = {name: [] for name in names}
    for round_number in range(settings.compare_rounds + 1):
        shift = round_number % len(names)
        for name in (*names[shift:], *names[:shift]):
            model.set_experts_implementation(name)
            elapsed = _timed_step(model, window, optimizer, settings)
            if round_number > 0:
                seconds[name].append(elapsed)
    model.set_experts_implementation(settings.experts)
    baseline = seconds[names[0]]
    return [
        Timing(
            experts=name,
            difference=differences[name],
            step_s=tuple(seconds[name]),
            tokens=window[:, 1:].numel(),
            speedups=tuple(b / s for b, s in zip(baseline, seconds[name], strict=True)),
        )
        for name in names
    ]


def _agreement(
    model: Any, window: Tensor, settings: TrainSettings, names: Sequence[str]
) -> dict[str, float]:
    """Relative difference of each implementation's logits and gradients from the first one's."""
    tolerance = _TOLERANCE[settings.precision]
    results = {}
    for name in names:
        model.set_experts_implementation(name)
        logits = _forward_backward(model, window, settings)
        gradients = [p.grad for p in model.parameters() if p.grad is not None]
        results[name] = (logits, torch.cat([gradient.flatten() for gradient in gradients]))
        model.zero_grad(set_to_none=True)
    differences = {}
    for name, values in results.items():
        parts = [
            _relative(value, want) for value, want in zip(values, results[names[0]], strict=True)
        ]
        for what, difference in zip(("logits", "gradients"), parts, strict=True):
            if not difference <= tolerance:
                argument = f"{name}'s {what}"
                requirement = f"agree with {names[0]}'s to {tolerance:g}"
                remedy = "Wrong results are not timed: report this with the model's config.json."
                value = f"a relative difference of {difference:.3g}"
                raise BackendError(instruction("compare", argument, requirement, value, remedy))
        differences[name] = max(parts)
    return differences


def _relative(value: Tensor, want: Tensor) -> float:
    return float((value - want).norm() / want.norm())


def _forward_backward(model: nn.Module, window: Tensor, settings: TrainSettings) -> Tensor:
    with autocast(settings, window.device):
        logits, _ = forward_logits(model, window[:, :-1])
    (summed_cross_entropy(logits, window[:, 1:]) / window[:, 1:].numel()).backward()
    return logits.detach().float()


def _timed_step(
    model: nn.Module, window: Tensor, optimizer: torch.optim.Optimizer, settings: TrainSettings
) -> float:
    _wait(window.device)
    started = time.perf_counter()
    _forward_backward(model, window, settings)
    nn.utils.clip_grad_norm_(model.parameters(), settings.clip_norm)
    optimizer.step()
    optimizer.zero_grad(set_to_none=True)
    _wait(window.device)
    return time.perf_counter() - started


def _wait(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)
