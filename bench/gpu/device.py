"""Where a part runs: a GPU, or in a dry run the CPU; what differs between the two is here."""

import importlib.metadata
import platform
import sys
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

from bench.machines import MACHINES, Machine
from bench.record import current_commit
from bench.timing import Stopwatch, wall_clock

# larger than any last-level cache: written between timed runs
FLUSH_BYTES = 512 * 2**20
PACKAGES = ("torch", "triton", "transformers", "liger_kernel", "scattermoe", "numpy")


@dataclass(frozen=True, kw_only=True, slots=True)
class Device:
    """One device.

    Attributes:
        torch_device: ``cuda:0``, or ``cpu`` in a dry run.
        is_dry: tiny shapes, interpreted kernels; times mean nothing.
    """

    torch_device: torch.device
    is_dry: bool

    @property
    def is_gpu(self) -> bool:
        """CUDA or ROCm."""
        return self.torch_device.type == "cuda"

    @property
    def machine(self) -> Machine | None:
        """Stated peak numbers, if this device is known by name."""
        name = describe_gpu(self).get("gpu", "")
        words = {machine: machine.name.split()[0] for machine in MACHINES}
        return next((machine for machine, word in words.items() if word in name), None)

    def synchronize(self) -> None:
        """Wait for all work."""
        if self.is_gpu:
            torch.cuda.synchronize(self.torch_device)

    def free_bytes(self) -> int:
        """Memory that can be taken now."""
        if not self.is_gpu:
            return 2**30
        torch.cuda.empty_cache()
        return torch.cuda.mem_get_info(self.torch_device)[0]

    def stopwatch(self) -> Stopwatch:
        """Seconds of the device's own clock: events around the work, on its stream."""
        return cuda_clock if self.is_gpu else wall_clock

    def flusher(self) -> Callable[[], None]:
        """Pushes everything out of the caches."""
        if not self.is_gpu:
            return _nothing
        buffer = torch.empty(FLUSH_BYTES, dtype=torch.int8, device=self.torch_device)

        def flush() -> None:
            buffer.zero_()

        return flush


def _nothing() -> None:
    """Caches of a CPU are left alone."""


def cuda_clock(run: Callable[[], object]) -> float:
    """Seconds between two events around ``run`` on the current stream."""
    begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    begin.record()
    run()
    end.record()
    end.synchronize()
    return begin.elapsed_time(end) / 1e3


def find_device(*, is_dry: bool) -> Device:
    """The first GPU, or the CPU in a dry run."""
    return Device(torch_device=torch.device("cpu" if is_dry else "cuda:0"), is_dry=is_dry)


def describe_gpu(device: Device) -> dict[str, Any]:
    """Name, memory and processors of the GPU; nothing in a dry run."""
    if not device.is_gpu:
        return {}
    properties = torch.cuda.get_device_properties(device.torch_device)
    return {
        "gpu": properties.name,
        "gpu_memory_bytes": properties.total_memory,
        "num_processors": properties.multi_processor_count,
        "num_gpus": torch.cuda.device_count(),
        "cuda": torch.version.cuda,
        "hip": torch.version.hip,
    }


def describe(device: Device) -> dict[str, Any]:
    """Machine and versions, for the head of the results."""
    versions: dict[str, str | None] = {}
    for package in PACKAGES:
        try:
            versions[package] = importlib.metadata.version(package)
        except importlib.metadata.PackageNotFoundError:
            versions[package] = None
    return {
        "is_dry_run": device.is_dry,
        "python": platform.python_version(),
        "system": f"{sys.platform} {platform.machine()}",
        "commit": current_commit(),
        **describe_gpu(device),
        **versions,
    }
