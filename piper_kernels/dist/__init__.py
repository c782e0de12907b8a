"""Expert parallelism: topology, exchange plans and their execution.

The names below load on first use: plans need no torch.
"""

import importlib
from typing import Any

_HOME_OF = {
    "ExchangeGroup": "piper_kernels.dist.exchange_group",
    "ExpertParallel": "piper_kernels.dist.expert_parallel",
    "all_to_all_rows": "piper_kernels.dist.all_to_all",
    "all_to_all_single": "piper_kernels.dist.all_to_all",
    "checkpoint_contexts": "piper_kernels.dist.recompute",
    "clip_grad_norm_": "piper_kernels.dist.gradients",
    "global_balance_loss": "piper_kernels.dist.global_balance",
    "reduce_gradients": "piper_kernels.dist.gradients",
}

__all__ = sorted(_HOME_OF)


def __getattr__(name: str) -> Any:
    if name not in _HOME_OF:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(_HOME_OF[name]), name)


def __dir__() -> list[str]:
    return __all__
