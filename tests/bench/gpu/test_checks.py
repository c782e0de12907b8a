"""The checks find a fault: an op that is wrong by little fails, the right one passes."""

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from bench.gpu import checks, device_checks
from bench.gpu.device import find_device
from bench.gpu.part_log import NotMeasured
from piper_kernels import functional
from piper_kernels.functional.experts import experts

DRY = find_device(is_dry=True)


def wrong(op: Callable[..., Tensor]) -> Callable[..., Tensor]:
    """Wrong by 20 % where triton is asked for."""

    def changed(*args: object, backend: str, **options: object) -> Tensor:
        return op(*args, backend=backend, **options) * (1.2 if backend == "triton" else 1.0)

    return changed


def test_checks_pass_and_find_a_wrong_op(monkeypatch: pytest.MonkeyPatch) -> None:
    case = checks.ExpertsCase("swiglu halves", checks.DRY_SIZES[0], torch.float32)
    checks.check_experts(DRY, case)
    monkeypatch.setattr(functional, "experts", wrong(experts))
    with pytest.raises(AssertionError, match="too far"):
        checks.check_experts(DRY, case)
    with pytest.raises(AssertionError, match="too far"):
        device_checks.check_far_offsets(DRY)
    for op, check in checks.OPS.items():
        monkeypatch.setattr(functional, op, wrong(getattr(functional, op)))
        with pytest.raises(AssertionError, match="too far"):
            check(DRY, torch.float32)


def test_check_equal_bits_finds_noise(monkeypatch: pytest.MonkeyPatch) -> None:
    def noisy(*args: object, **options: object) -> Tensor:
        return experts(*args, **options) + torch.rand(()) * 1e-3

    monkeypatch.setattr(functional, "experts", noisy)
    with pytest.raises(AssertionError, match="y differs in run 2"):
        device_checks.check_equal_bits(DRY)


def test_device_checks_say_that_they_need_a_gpu() -> None:
    for name in ("side stream", "captured graph", "second device"):
        with pytest.raises(NotMeasured, match="needs a GPU"):
            device_checks.CHECKS[name](DRY)
