"""LoRA on expert weights with PEFT: which parameters to target, and whether it took.

PEFT adapts a parameter (``LoraConfig(target_parameters=...)``) by a parametrization: while the
experts run, reading ``gate_up_proj`` gives ``W + s * B A`` of all experts, made anew. So the
``"piper"`` experts need nothing special, and the adapter is exact: unmerged, merged, saved and
loaded it is the same function.

The limit: the adapted weight is as large as the weight itself. Per layer and adapted weight that is
one more copy from the forward until the backward, and one for its gradient during the backward,
whatever the rank; activation checkpointing bounds the former to one layer. For inference merge
first. Measured with ``python -m bench.lora_cost`` (see there).
"""

from typing import Any

from torch import nn

from piper_kernels.errors import ConfigError, instruction
from piper_kernels.huggingface.layouts import is_experts_module


def _weights_of(experts: Any) -> tuple[str, str]:
    return ("gate_up_proj" if experts.has_gate else "up_proj"), "down_proj"


def lora_targets(model: nn.Module) -> list[str]:
    """Names of all expert weights of a transformers model, for ``LoraConfig.target_parameters``.

    In transformers 5 experts are 3-dimensional parameters, not linear layers, so names such as
    ``gate_proj`` in ``target_modules`` do not reach them.

    Args:
        model: before PEFT wraps it.

    Raises:
        ConfigError: the model has no experts module on transformers' registry.

    Example:
        On any Mixture-of-Experts ``model`` of transformers::

            config = peft.LoraConfig(r=8, target_modules=[], target_parameters=lora_targets(model))
            model = peft.get_peft_model(model, config)
            check_lora(model)
    """
    targets = [
        f"{name}.{weight}"
        for name, module in model.named_modules()
        if is_experts_module(module)
        for weight in _weights_of(module)
    ]
    if not targets:
        given = f"none in {type(model).__name__}"
        raise ConfigError(instruction("lora_targets", "model", "have experts", given))
    return targets


def check_lora(model: nn.Module) -> None:
    """Raise unless every expert weight of the model has a trainable LoRA adapter.

    PEFT matches names, and goes on if only some of them match: training then moves the attention's
    adapters while all experts stay frozen.

    Args:
        model: what ``get_peft_model`` returned.

    Raises:
        ConfigError: naming the expert weights without an adapter, or with a frozen one.
    """
    bare = {
        (id(module), weight): f"{name}.{weight}"
        for name, module in model.named_modules()
        if is_experts_module(module)
        for weight in _weights_of(module)
    }
    num_weights = len(bare)
    wrapper: Any
    for wrapper in model.modules():
        # PEFT's wrapper of one parameter; wrappers of several are nested
        if hasattr(wrapper, "parameter_name") and hasattr(wrapper, "lora_A"):
            factors = (*wrapper.lora_A.parameters(), *wrapper.lora_B.parameters())
            if factors and all(factor.requires_grad for factor in factors):
                bare.pop((id(wrapper.get_base_layer()), wrapper.parameter_name), None)
    if not num_weights or bare:
        names = ", ".join(name.replace(".base_layer", "") for name in bare.values()) or "no experts"
        requirement = f"have a trainable adapter on each of its {num_weights} expert weights"
        remedy = "Pass target_parameters=lora_targets(model) to LoraConfig."
        given = f"none on {names}" if bare else names
        raise ConfigError(instruction("check_lora", "model", requirement, given, remedy))
