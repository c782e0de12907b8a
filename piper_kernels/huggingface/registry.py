"""Make ``"piper"`` selectable: write the experts function into transformers' registry."""

import inspect
import logging
import sys
from typing import Any

from piper_kernels.huggingface.experts_function import experts_function
from piper_kernels.huggingface.integration import integrations, modeling_utils, moe

EXPERTS_IMPLEMENTATION = "piper"

logger = logging.getLogger(__name__)


def _registries() -> list[Any]:
    """Every copy of the registry that model code holds or will get.

    A lazy import can execute ``integrations/moe.py`` twice. Model classes then look their function
    up in the copy that is the default argument of the decorator they imported.
    """
    decorators = [moe.use_experts_implementation, integrations.use_experts_implementation]
    for name, module in list(sys.modules.items()):
        if name.startswith("transformers"):
            decorators.append(getattr(module, "__dict__", {}).get("use_experts_implementation"))
    defaults = [
        inspect.signature(decorator).parameters["experts_interface"].default
        for decorator in {id(d): d for d in decorators if d is not None}.values()
    ]
    found = [moe.ALL_EXPERTS_FUNCTIONS, modeling_utils.ALL_EXPERTS_FUNCTIONS, *defaults]
    return list({id(registry): registry for registry in found}.values())


def register_experts_function() -> None:
    """Register ``"piper"`` on every copy of transformers' experts registry. Safe to repeat.

    ``import piper_kernels.huggingface`` calls this. transformers (5.24) has no entry points for
    plug-ins, so one import in the user's program is needed before a model selects ``"piper"``.

    Source: transformers 5.24, ``integrations/moe.py``: ``ExpertsInterface.register`` writes a
    class-wide mapping, so models that exist already see it too.
    """
    registries = _registries()
    for registry in registries:
        registry.register(EXPERTS_IMPLEMENTATION, experts_function)
    logger.debug("registered %r on %d registries", EXPERTS_IMPLEMENTATION, len(registries))
