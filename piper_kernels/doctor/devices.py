"""Which GPUs torch can use, and why not if it cannot."""

import shutil
from dataclasses import dataclass
from pathlib import Path

from piper_kernels.doctor.findings import Finding

# the oldest that the kernels are compiled and checked for
MINIMUM_CAPABILITY = (8, 0)
REINSTALL = "make install TORCH='torch>=2.10', or pip install a torch build for this GPU"


@dataclass(frozen=True, kw_only=True, slots=True)
class Device:
    """One GPU as torch sees it.

    Attributes:
        name: marketing name.
        memory_bytes: total.
        capability: (major, minor) on NVIDIA; ``None`` on AMD.
        architecture: e.g. ``sm_90`` or ``gfx942``.
    """

    name: str
    memory_bytes: int
    capability: tuple[int, int] | None
    architecture: str


@dataclass(frozen=True, kw_only=True, slots=True)
class Accelerators:
    """What torch was built for and what is there.

    Attributes:
        build: ``CPU``, ``CUDA 12.8`` or ``ROCm 6.3``.
        driver: version of the GPU driver of this machine, empty if there is none.
        devices: usable GPUs.
        triton_error: why triton cannot use them, empty if it can or there are none.
    """

    build: str
    driver: str
    devices: tuple[Device, ...]
    triton_error: str = ""


def judge_accelerators(found: Accelerators) -> list[Finding]:
    """Judge builds, drivers and devices. Pure."""
    findings = [_judge_build(found)]
    for number, device in enumerate(found.devices):
        gib = device.memory_bytes / 2**30
        value = f"{device.name}, {device.architecture}, {gib:.0f} GiB"
        is_old = device.capability is not None and device.capability < MINIMUM_CAPABILITY
        oldest = ".".join(map(str, MINIMUM_CAPABILITY))
        findings.append(
            Finding(
                area="devices",
                name=f"GPU {number}",
                value=value,
                status="warning" if is_old else "ok",
                advice=f"Below capability {oldest}: untested; backend='reference' is safe."
                if is_old
                else "",
            )
        )
    if found.triton_error:
        findings.append(
            Finding(
                area="devices",
                name="triton's driver",
                value=found.triton_error,
                status="broken",
                advice="Reinstall triton for this torch: pip install --force-reinstall triton",
            )
        )
    return findings


def _judge_build(found: Accelerators) -> Finding:
    driver = f"driver {found.driver}" if found.driver else "no GPU driver"
    value = f"torch for {found.build}, {driver}, {len(found.devices)} GPUs"
    is_gpu_build = found.build != "CPU"
    if found.devices or (not is_gpu_build and not found.driver):
        return Finding(area="devices", name="torch's build", value=value)
    if not is_gpu_build:
        advice = f"This machine has a GPU driver that this torch cannot use: {REINSTALL}"
    elif found.driver:
        advice = "Is a device visible? See nvidia-smi or rocm-smi, and CUDA_VISIBLE_DEVICES."
    else:
        advice = "No driver: the CPU path runs. Install the driver if there is a GPU."
    return Finding(
        area="devices", name="torch's build", value=value, status="warning", advice=advice
    )


def _driver_version() -> str:
    """Version of the loaded GPU driver, or that its tool is there, or nothing."""
    nvidia = Path("/proc/driver/nvidia/version")
    if nvidia.exists():
        words = nvidia.read_text().splitlines()[0].split()
        return next((word for word in words if word[0].isdigit()), "unknown")
    amd = Path("/sys/module/amdgpu/version")
    if amd.exists():
        return amd.read_text().strip()
    return "unknown" if shutil.which("nvidia-smi") or shutil.which("rocm-smi") else ""


def _triton_error() -> str:
    """Ask triton for its active driver; the error if it has none."""
    try:
        import triton

        triton.runtime.driver.active.get_current_target()
    # a missing package and a broken driver raise whatever they like
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    return ""


def look_at_accelerators() -> Accelerators:
    """Ask torch, the system and, if there is a GPU, triton."""
    import torch

    build = "CPU"
    if torch.version.hip:
        build = f"ROCm {torch.version.hip}"
    elif torch.version.cuda:
        build = f"CUDA {torch.version.cuda}"
    devices = []
    for index in range(torch.cuda.device_count() if torch.cuda.is_available() else 0):
        properties = torch.cuda.get_device_properties(index)
        capability = (properties.major, properties.minor)
        name = getattr(properties, "gcnArchName", "") if torch.version.hip else ""
        gfx = name.partition(":")[0]
        devices.append(
            Device(
                name=properties.name,
                memory_bytes=properties.total_memory,
                capability=None if torch.version.hip else capability,
                architecture=gfx or "sm_" + "".join(map(str, capability)),
            )
        )
    return Accelerators(
        build=build,
        driver=_driver_version(),
        devices=tuple(devices),
        triton_error=_triton_error() if devices else "",
    )


def check_devices() -> list[Finding]:
    """Look at this machine's GPUs; none is fine."""
    return judge_accelerators(look_at_accelerators())
