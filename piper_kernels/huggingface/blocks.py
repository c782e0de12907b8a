"""Put PiperMoE layers into a transformers model, and take them out again."""

import logging

from torch import nn

from piper_kernels.errors import ConfigError, instruction
from piper_kernels.huggingface.block import HuggingFaceMoE
from piper_kernels.huggingface.families import FAMILIES, find_family
from piper_kernels.huggingface.layouts import is_experts_module

logger = logging.getLogger(__name__)


def _exchange(model: nn.Module, replacements: dict[nn.Module, nn.Module]) -> list[str]:
    """Put each value where its key was, at every place; the names of the places."""
    places: list[str] = []
    for parent_name, parent in list(model.named_modules(remove_duplicate=False)):
        for name, child in list(parent._modules.items()):
            if child is not None and child in replacements:
                parent._modules[name] = replacements[child]
                places.append(f"{parent_name}.{name}".lstrip("."))
    return places


def _check_blocks(model: nn.Module, blocks: list[nn.Module]) -> None:
    """Every experts module must lie in a block of the table, or in one replaced already."""
    name = "replace_moe_blocks"
    supported = ", ".join(key.rsplit(".", 1)[-1] for key in FAMILIES)
    done = [module for module in model.modules() if isinstance(module, HuggingFaceMoE)]
    if find_family(model) is not None:
        remedy = "Pass the module that contains the block."
        raise ConfigError(instruction(name, "model", "be more than an MoE block", model, remedy))
    covered = {inner for block in (*blocks, *done) for inner in block.modules()}
    for path, parent in model.named_modules():
        if any(is_experts_module(m) and m not in covered for m in parent.children()):
            given = f"{type(parent).__name__} at {path!r}"
            remedy = 'Select experts_implementation="piper" instead: it covers every family.'
            raise ConfigError(instruction(name, "MoE blocks", f"be of {supported}", given, remedy))
    if not covered:
        given = f"no such block in {type(model).__name__}"
        raise ConfigError(instruction(name, "model", f"contain one of {supported}", given))


def replace_moe_blocks(model: nn.Module) -> list[str]:
    """Put a PiperMoE in the place of every MoE block of a transformers model.

    Nothing else changes: parameters are the same objects (an optimizer made before still holds
    them), ``state_dict`` and ``save_pretrained`` write the same keys, and the model's outputs are
    those of ``experts_implementation="piper"``, bit for bit. The blocks then take ``mask=``,
    ``routing=`` and ``return_stats=`` as every PiperMoE does.

    Args:
        model: a model whose MoE blocks are in the table of ``piper_kernels.huggingface.families``:
            Mixtral, Qwen2-MoE, Qwen3-MoE (also VL), Qwen3-Next, Qwen3.5-MoE, OLMoE, FlexOlmo,
            DeepSeek-V3, GLM-4-MoE, gpt-oss; also one that PEFT has wrapped.

    Returns:
        Names of the modules that were replaced; empty if all of them were already.

    Raises:
        ConfigError: the model has no such block, or one that is not in the table; it is then
            unchanged.

    Example:
        A Qwen3-MoE ``model`` with two layers::

            replace_moe_blocks(model)  # ['model.layers.0.mlp', 'model.layers.1.mlp']
            y, stats = model.model.layers[0].mlp(x, return_stats=True)
            restore_moe_blocks(model)  # the same two names
    """
    families = {m: family for m in model.modules() if (family := find_family(m)) is not None}
    _check_blocks(model, list(families))
    replacements: dict[nn.Module, nn.Module] = {
        block: HuggingFaceMoE(block, family) for block, family in families.items()
    }
    places = _exchange(model, replacements)
    logger.info("replaced %d MoE blocks of %s", len(places), type(model).__name__)
    return places


def restore_moe_blocks(model: nn.Module) -> list[str]:
    """Undo :func:`replace_moe_blocks`: the model's own blocks come back, trained weights and all.

    Args:
        model: the model, or a copy of it.

    Returns:
        Names of the modules that were restored; empty if there were none.
    """
    replacements: dict[nn.Module, nn.Module] = {
        module: module.restore() for module in model.modules() if isinstance(module, HuggingFaceMoE)
    }
    return _exchange(model, replacements)
