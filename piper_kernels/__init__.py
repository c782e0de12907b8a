"""Piper: Mixture-of-Experts models, fast to train and honest to plan.

The public names below load on first use (PEP 562), so ``import piper_kernels`` loads neither torch
nor triton and touches no driver.
"""

import importlib
from typing import Any

__version__ = "0.1.0"

_HOME_OF = {
    "Activation": "piper_kernels.config",
    "MoEConfig": "piper_kernels.config",
    "MoEStats": "piper_kernels.modules.stats",
    "Permutation": "piper_kernels.permutation",
    "PiperMoE": "piper_kernels.moe",
    "RouterConfig": "piper_kernels.config",
    "Routing": "piper_kernels.routing",
    "SharedExpertsConfig": "piper_kernels.config",
    "WeightLayout": "piper_kernels.config",
    "apply_capacity": "piper_kernels.routing",
    "apply_jitter": "piper_kernels.routing",
    "balance_loss": "piper_kernels.balance",
    "count_experts": "piper_kernels.routing",
    "has_constant_gates": "piper_kernels.choice",
    "route": "piper_kernels.routing",
    "updated_correction_bias": "piper_kernels.balance",
    "z_loss": "piper_kernels.balance",
}

__all__ = ["__version__", *sorted(_HOME_OF)]


def __getattr__(name: str) -> Any:
    if name not in _HOME_OF:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(_HOME_OF[name]), name)


def __dir__() -> list[str]:
    return __all__
