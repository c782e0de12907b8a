"""Build one stage of a model from its configuration, with the weights of the whole model.

Every tensor is drawn by the model's own rule from a generator of its own, seeded by the run's seed
and the module's name; an expert's by its logical id, too. So one process, four stages and eight
expert ranks begin from the same numbers, and no rank ever holds what it does not need.
"""

from collections.abc import Sequence
from typing import Any

import torch
from torch import nn

from piper_kernels.dist.dispatcher import ExpertParallel
from piper_kernels.errors import ConfigError, instruction
from piper_kernels.huggingface.expert_counts import expert_modules
from piper_kernels.huggingface.local_experts import keep_local_experts
from piper_kernels.pipeline.stage import Stage, StagePlace, base_model, cut_stage, is_tied
from piper_kernels.strict_model import digest_of, digest_to_int


def build_stage(
    config: Any,
    place: StagePlace,
    *,
    seed: int,
    experts: str = "piper",
    dtype: torch.dtype = torch.float32,
    device: torch.device | str = "cpu",
    ep: ExpertParallel | None = None,
) -> Stage:
    """A stage in training mode with weights drawn from ``seed``.

    Args:
        config: of a Hugging Face causal language model.
        place: which part of it.
        seed: equal seeds give equal weights, whatever the other stages are.
        experts: the experts implementation.
        dtype: of the weights.
        device: where they go.
        ep: ranks that share the experts; this one never holds more than its own.

    Raises:
        PlanError: the place names no layers of this model.
        ConfigError: the model cannot be cut into stages, or has fewer experts than ``ep`` ranks.
    """
    from transformers import AutoModelForCausalLM

    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(
            config, experts_implementation=experts, dtype=dtype
        )
    num_expert_layers = cut_stage(model, place)
    local_experts = None if ep is None else keep_local_experts(model, ep)
    draw_weights(model, place, seed, torch.device(device), local_experts)
    return Stage(model, place, num_expert_layers).train()


def draw_weights(
    model: nn.Module,
    place: StagePlace,
    seed: int,
    device: torch.device,
    local_experts: Sequence[int] | None = None,
) -> None:
    """Give what ``cut_stage`` left of a model on the meta device its weights, in place.

    Args:
        model: its experts' tensors may have been cut to the local ones.
        place: which part of the model it is.
        seed: of the run.
        device: where the weights go.
        local_experts: logical ids of the experts that the tensors hold, in order; ``None``: all.

    Raises:
        ConfigError: the model's own rule leaves a tensor without values.
    """
    model.to_empty(device=device)
    for tensor in _floats(model).values():
        tensor.fill_(float("nan"))
    experts = {name for name, _ in expert_modules(model).values()}
    with torch.random.fork_rng(devices=[device] if device.type == "cuda" else []), torch.no_grad():
        for name, module in model.named_modules():
            if name in experts:
                _draw_experts(model, module, name, seed, local_experts)
            elif [*module.parameters(recurse=False), *module.buffers(recurse=False)]:
                _draw(model, module, seed, name)
        if is_tied(model) and place.is_last:
            _tie(model, place, seed)
    unset = [name for name, tensor in _floats(model).items() if bool(tensor.isnan().any())]
    if unset:
        requirement = "draw every tensor in its _init_weights"
        value = f"none for {', '.join(unset[:3])}"
        remedy = "Begin from saved weights."
        raise ConfigError(instruction("draw_weights", "model", requirement, value, remedy))


def _floats(model: nn.Module) -> dict[str, torch.Tensor]:
    tensors = (*model.named_parameters(), *model.named_buffers())
    return {name: tensor.detach() for name, tensor in tensors if tensor.is_floating_point()}


def _draw(model: Any, module: nn.Module, *names: object) -> None:
    torch.manual_seed(digest_to_int(digest_of(*map(str, names))))
    model._init_weights(module)


def _draw_experts(
    model: Any, module: nn.Module, name: str, seed: int, local_experts: Sequence[int] | None
) -> None:
    """One expert after the other: the rule sees a module that holds one."""
    whole = dict(module.named_parameters(recurse=False))
    num_local = len(next(iter(whole.values())))
    ids = range(num_local) if local_experts is None else local_experts
    try:
        for index, expert in enumerate(ids):
            for key, parameter in whole.items():
                one = nn.Parameter(parameter.data[index : index + 1], requires_grad=False)
                module._parameters[key] = one
            _draw(model, module, seed, name, expert)
    finally:
        module._parameters.update(whole)


def _tie(model: Any, place: StagePlace, seed: int) -> None:
    """The head is the embedding: the same object, or drawn once more where that is elsewhere."""
    if place.is_first:
        model.tie_weights()
        return
    weight = model.lm_head.weight
    padding = getattr(base_model(model), "padding_idx", None)
    rows, width = weight.shape
    embedding = nn.Embedding(rows, width, padding_idx=padding, _weight=weight.detach())
    _draw(model, embedding, seed, f"{model.base_model_prefix}.embed_tokens")
