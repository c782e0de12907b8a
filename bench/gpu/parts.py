"""The process of one part."""

import importlib
import sys
from pathlib import Path

from bench.gpu.budget import TimeBudget
from bench.gpu.part_log import PartLog


def run_part(name: str, rows: Path, seconds: float, *, is_dry: bool) -> int:
    """Run ``bench.gpu.<name>`` on the device and return the exit status.

    Args:
        name: of the part's module.
        rows: where its rows go.
        seconds: that it may take.
        is_dry: on the CPU, tiny shapes.
    """
    log = PartLog(rows, TimeBudget(seconds))
    import torch

    from bench.gpu.device import find_device

    if not is_dry and not torch.cuda.is_available():
        remedy = "Run it on a CUDA or ROCm machine, or give --dry-run."
        print(f"bench.gpu: torch {torch.__version__} sees no GPU. {remedy}", file=sys.stderr)
        return 2
    module = importlib.import_module(f"bench.gpu.{name}")
    module.run(log, find_device(is_dry=is_dry))
    return 0
