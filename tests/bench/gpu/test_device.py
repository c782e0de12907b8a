"""A GPU is known by its name, and a dry run asks the driver nothing."""

from types import SimpleNamespace

import pytest
import torch

from bench.gpu.device import Device, describe, find_device
from bench.machines import H200, MI300X, Machine

GPU = Device(torch_device=torch.device("cuda:0"), is_dry=False)


@pytest.mark.parametrize(
    ("name", "machine"),
    [("NVIDIA H200", H200), ("AMD Instinct MI300X", MI300X), ("NVIDIA A10", None)],
)
def test_device_machine_is_found_by_name(
    monkeypatch: pytest.MonkeyPatch, name: str, machine: Machine | None
) -> None:
    properties = SimpleNamespace(name=name, total_memory=1, multi_processor_count=2)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: properties)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    assert GPU.machine is machine


def test_describe_in_a_dry_run_touches_no_driver(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*args: object) -> None:
        raise AssertionError("touched the driver")

    monkeypatch.setattr(torch.cuda, "get_device_properties", refuse)
    found = describe(find_device(is_dry=True))
    assert found["torch"] is not None
    assert found["liger_kernel"] is None
    assert "gpu" not in found
    assert find_device(is_dry=True).machine is None
