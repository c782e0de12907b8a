"""The optimizer, by default AdamW, with a warm-up and a cosine."""

import math

import torch
from torch import nn

from piper_kernels.pipeline.memory_settings import OptimizerKind
from piper_kernels.train.settings import TrainSettings


def build_optimizer(
    model: nn.Module, settings: TrainSettings, kind: OptimizerKind = "adamw"
) -> torch.optim.Optimizer:
    """Over all parameters; vectors and biases (norms, expert biases) are not decayed.

    Args:
        model: whose parameters; each counts once.
        settings: rates, betas, decay.
        kind: ``adamw``, ``sgd``, or ``sgd_momentum``, whose momentum is ``beta1``.
    """
    decayed: list[nn.Parameter] = []
    free: list[nn.Parameter] = []
    for name, parameter in model.named_parameters():
        if parameter.requires_grad:
            is_free = parameter.ndim < 2 or name.endswith("bias")
            (free if is_free else decayed).append(parameter)
    groups = [
        {"params": decayed, "weight_decay": settings.weight_decay},
        {"params": free, "weight_decay": 0.0},
    ]
    groups = [group for group in groups if group["params"]]
    if kind != "adamw":
        momentum = settings.beta1 if kind == "sgd_momentum" else 0.0
        return torch.optim.SGD(groups, lr=settings.learning_rate, momentum=momentum)
    return torch.optim.AdamW(
        groups,
        lr=settings.learning_rate,
        betas=(settings.beta1, settings.beta2),
        eps=settings.epsilon,
        fused=True,
    )


def learning_rate(step: int, settings: TrainSettings) -> float:
    """The learning rate of step 1, 2, ..., ``settings.steps``.

    It rises linearly for ``warmup_fraction`` of the steps, to ``learning_rate``, and falls along
    half a cosine to ``final_learning_rate_fraction`` of that at the last step.

    Example:
        >>> settings = TrainSettings(steps=12, warmup_fraction=1 / 6, learning_rate=1.0,
        ...                          final_learning_rate_fraction=0.0)
        >>> [round(learning_rate(step, settings), 3) for step in (1, 2, 7, 12)]
        [0.5, 1.0, 0.5, 0.0]
    """
    num_warmup_steps = round(settings.warmup_fraction * settings.steps)
    if step <= num_warmup_steps:
        return settings.learning_rate * step / num_warmup_steps
    progress = (step - num_warmup_steps) / (settings.steps - num_warmup_steps)
    floor = settings.final_learning_rate_fraction
    cosine = 0.5 * (1.0 + math.cos(math.pi * progress))
    return settings.learning_rate * (floor + (1.0 - floor) * cosine)
