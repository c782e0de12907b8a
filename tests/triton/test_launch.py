"""Launching: the right device whatever is current, nothing for an empty grid, honest precision."""

from typing import Any

import pytest
import torch

from piper_kernels.errors import DeviceError, DtypeError
from piper_kernels.triton.device_traits import DeviceTraits, assume_traits
from piper_kernels.triton.grouped_gemm import _grouped_gemm_kernel
from piper_kernels.triton.launch import check_operands, dot_arguments, launch
from piper_kernels.triton.tiles import TileConfig

TILES = TileConfig(block_m=16, block_n=32, block_k=64, num_warps=2, num_stages=4)


class Recorder:
    """Stands in for a kernel and for ``torch.cuda.device``: notes what was asked of it."""

    def __init__(self) -> None:
        self.calls: list[Any] = []

    def __getitem__(self, grid: tuple[int, ...]) -> Any:
        return lambda **arguments: self.calls.append((grid, arguments["size"]))

    def device(self, device: torch.device) -> Any:
        self.calls.append(device)
        return torch.no_grad()  # any context manager


# A22: the current device is cuda:0, the tensors lie on cuda:1
def test_launch_enters_the_tensors_device(monkeypatch: pytest.MonkeyPatch) -> None:
    recorder = Recorder()
    monkeypatch.setattr(torch.cuda, "device", recorder.device)
    device = torch.device("cuda:1")
    launch(recorder, (3,), device, size=7)
    assert recorder.calls == [device, ((3,), 7)]


def test_launch_of_an_empty_grid_runs_nothing() -> None:
    recorder = Recorder()
    launch(recorder, (4, 0), torch.device("cpu"), size=7)
    assert recorder.calls == []


def test_dot_arguments_follow_torch_precision() -> None:
    def precision(dtype: torch.dtype) -> str:
        return dot_arguments(_grouped_gemm_kernel, torch.zeros(1, dtype=dtype), TILES)["PRECISION"]

    assert precision(torch.float32) == "ieee"
    torch.set_float32_matmul_precision("high")
    try:
        assert precision(torch.float32) == "tf32"
        assert precision(torch.bfloat16) == "ieee"
        with assume_traits(DeviceTraits(has_descriptors=False, has_tf32=False)):
            assert precision(torch.float32) == "ieee"
    finally:
        torch.set_float32_matmul_precision("highest")


def test_dot_arguments_upcast_only_in_the_interpreter() -> None:
    operand = torch.zeros(1, dtype=torch.bfloat16)
    assert dot_arguments(_grouped_gemm_kernel, operand, TILES)["USE_UPCAST"]
    assert not dot_arguments(object(), operand, TILES)["USE_UPCAST"]


def test_check_operands_names_both_sides() -> None:
    x = torch.zeros(1)
    check_operands("f", x=x, bias=None)
    with pytest.raises(
        DtypeError, match=r"f: w must be one of float32, got bfloat16\. Cast it to x"
    ):
        check_operands("f", x=x, w=x.bfloat16())
    with pytest.raises(DeviceError, match=r"f: w must be on the device of x \(cpu\), got meta"):
        check_operands("f", x=x, w=x.to("meta"))
