"""GPUs judged from data, so that every machine is tested on this one."""

from dataclasses import replace

import pytest
import torch

from piper_kernels.doctor.devices import (
    Accelerators,
    Device,
    check_devices,
    judge_accelerators,
    look_at_accelerators,
)

H100 = Device(name="H100", memory_bytes=80 * 2**30, capability=(9, 0), architecture="sm_90")
GPU_MACHINE = Accelerators(build="CUDA 12.8", driver="570.1", devices=(H100,))
CPU_MACHINE = Accelerators(build="CPU", driver="", devices=())


def test_judge_accelerators_accepts_a_machine_without_gpu() -> None:
    (build,) = judge_accelerators(CPU_MACHINE)
    assert (build.status, build.value) == ("ok", "torch for CPU, no GPU driver, 0 GPUs")


def test_judge_accelerators_lists_devices() -> None:
    build, gpu = judge_accelerators(GPU_MACHINE)
    assert build.value == "torch for CUDA 12.8, driver 570.1, 1 GPUs"
    assert (gpu.status, gpu.name, gpu.value) == ("ok", "GPU 0", "H100, sm_90, 80 GiB")


@pytest.mark.parametrize(
    ("build", "driver", "advice"),
    [
        ("CPU", "570.1", "cannot use: make install TORCH='torch>=2.10'"),
        ("CUDA 12.8", "570.1", "CUDA_VISIBLE_DEVICES"),
        ("ROCm 6.3", "", "No driver"),
    ],
)
def test_judge_accelerators_says_why_no_gpu_is_used(build: str, driver: str, advice: str) -> None:
    (finding,) = judge_accelerators(Accelerators(build=build, driver=driver, devices=()))
    assert finding.status == "warning"
    assert advice in finding.advice


def test_judge_accelerators_warns_of_an_old_gpu() -> None:
    old = replace(H100, capability=(7, 5), architecture="sm_75")
    _, gpu = judge_accelerators(replace(GPU_MACHINE, devices=(old,)))
    assert gpu.status == "warning"
    assert "Below capability 8.0" in gpu.advice


def test_judge_accelerators_asks_no_capability_of_amd() -> None:
    amd = replace(H100, name="MI300X", capability=None, architecture="gfx942")
    _, gpu = judge_accelerators(replace(GPU_MACHINE, devices=(amd,)))
    assert (gpu.status, gpu.value) == ("ok", "MI300X, gfx942, 80 GiB")


def test_judge_accelerators_calls_a_dead_triton_driver_broken() -> None:
    findings = judge_accelerators(replace(GPU_MACHINE, triton_error="RuntimeError: 0 drivers"))
    assert [finding.status for finding in findings] == ["ok", "ok", "broken"]
    assert "force-reinstall triton" in findings[-1].advice


def test_look_at_accelerators_does_not_crash_here() -> None:
    found = look_at_accelerators()
    assert len(found.devices) == torch.cuda.device_count()
    assert (found.build == "CPU") == (torch.version.cuda is None and torch.version.hip is None)
    assert check_devices()[0].name == "torch's build"
