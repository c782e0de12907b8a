"""The same model and step with each experts implementation, timed side by side in one run."""

import statistics
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from piper_kernels.errors import BackendError, require
from piper_kernels.huggingface.expert_counts import expert_modules, experts_arguments
from piper_kernels.pipeline.token_loss import summed_cross_entropy
from piper_kernels.train.evaluate import autocast
from piper_kernels.train.model import forward_logits
from piper_kernels.train.optimizer import build_optimizer
from piper_kernels.train.settings import TrainSettings

BASELINE = "eager"
# largest relative L2 difference of an output or a gradient, for the same inputs. fp32 kernels
# differ by 1e-6; under autocast some multiply in bfloat16 and some in float32
_TOLERANCE = {"fp32": 1e-4, "bf16": 3e-2}
# what an experts module is called with: hidden states, expert ids, gates
ExpertsInputs = tuple[Tensor, Tensor, Tensor]


@dataclass(frozen=True, kw_only=True, slots=True)
class Timing:
    """How one implementation did.

    Attributes:
        experts: its name.
        difference: largest relative L2 difference from the baseline over the outputs and all
            gradients of all layers, for the same inputs.
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

    The check gives the experts of each layer the same inputs, those of the baseline's forward pass:
    through the whole model a rounding error may send a token to another expert.

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
    differences = check_agreement(model, window, settings, names)
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


def check_agreement(
    model: Any, window: Tensor, settings: TrainSettings, names: Sequence[str]
) -> dict[str, float]:
    """Largest relative difference of each implementation from the first, over layers and tensors.

    Raises:
        BackendError: naming implementation, layer and tensor, if it is above the tolerance.
    """
    tolerance = _TOLERANCE[settings.precision]
    model.set_experts_implementation(names[0])
    inputs = _experts_inputs(model, window, settings)
    differences = dict.fromkeys(names, 0.0)
    for layer, (_, module) in expert_modules(model).items():
        wanted: dict[str, Tensor] = {}
        for name in names:
            model.set_experts_implementation(name)
            results = _outputs_and_gradients(module, inputs[layer], settings)
            wanted = wanted or results
            for what, result in results.items():
                difference = _relative(result, wanted[what])
                argument = f"{name}'s {what} in layer {layer}"
                requirement = f"agree with {names[0]}'s to {tolerance:g}"
                value = f"a relative difference of {difference:.3g}"
                remedy = "Wrong results are not timed: report this with the model's config.json."
                agrees = difference <= tolerance
                error = BackendError
                require(agrees, "compare", argument, requirement, value, remedy, error=error)
                differences[name] = max(differences[name], difference)
    return differences


@torch.no_grad()
def _experts_inputs(
    model: nn.Module, window: Tensor, settings: TrainSettings
) -> dict[int, ExpertsInputs]:
    """What the experts of each layer are called with in one forward pass."""
    inputs: dict[int, ExpertsInputs] = {}
    handles = []
    for layer, (_, module) in expert_modules(model).items():

        def note(_: nn.Module, args: Any, kwargs: Any, layer: int = layer) -> None:
            inputs[layer] = experts_arguments(args, kwargs)

        handles.append(module.register_forward_pre_hook(note, with_kwargs=True))
    with autocast(settings, window.device):
        forward_logits(model, window[:, :-1])
    for handle in handles:
        handle.remove()
    return inputs


def _outputs_and_gradients(
    module: nn.Module, inputs: ExpertsInputs, settings: TrainSettings
) -> dict[str, Tensor]:
    """The output, and gradients of the output's inner product with a fixed random tensor."""
    hidden, expert_ids, gates = inputs
    hidden, gates = (tensor.detach().requires_grad_() for tensor in (hidden, gates))
    with autocast(settings, hidden.device):
        output = module(hidden, expert_ids, gates)
    generator = torch.Generator().manual_seed(0)
    weights = torch.randn(output.shape, generator=generator).to(output.device)
    named = {"hidden_states": hidden, "gates": gates, **dict(module.named_parameters())}
    gradients = torch.autograd.grad((output.float() * weights).sum(), list(named.values()))
    return {"output": output.detach()} | {
        f"gradient of {name}": gradient for name, gradient in zip(named, gradients, strict=True)
    }


def _relative(value: Tensor, want: Tensor) -> float:
    difference, norm = float((value - want).float().norm()), float(want.float().norm())
    return difference / norm if norm > 0 else difference


def _forward_backward(model: nn.Module, window: Tensor, settings: TrainSettings) -> None:
    with autocast(settings, window.device):
        logits, _ = forward_logits(model, window[:, :-1])
    (summed_cross_entropy(logits, window[:, 1:]) / window[:, 1:].numel()).backward()


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
