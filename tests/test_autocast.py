"""Code that autocast must not touch, and where it is on."""

import torch

from piper_kernels.autocast import is_autocast_active, without_autocast

CPU, META = torch.device("cpu"), torch.device("meta")


def test_is_autocast_active_is_told_by_device() -> None:
    assert not is_autocast_active(CPU)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert is_autocast_active(CPU)
        assert not is_autocast_active(META), "a device that has no autocast"
        with torch.autocast("cpu", enabled=False):
            assert not is_autocast_active(CPU)


def test_without_autocast_keeps_dtypes_and_restores_the_context() -> None:
    a = torch.ones(2, 2)
    with without_autocast(META):
        assert (a @ a).dtype == torch.float32
    with torch.autocast("cpu", dtype=torch.bfloat16):
        with without_autocast(CPU):
            assert (a @ a).dtype == torch.float32
        assert (a @ a).dtype == torch.bfloat16
