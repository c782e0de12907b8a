"""Which backend runs, why, and what it says when it cannot."""

import logging

import pytest
import torch

from piper_kernels.errors import BackendError, ConfigError
from piper_kernels.functional import backend
from piper_kernels.functional.backend import Machine, choose_backend, choose_for
from piper_kernels.functional.experts import experts
from piper_kernels.testing.experts import make_experts_inputs, run_experts

GPU = Machine(has_triton=True, is_interpreting=False)
BARE = Machine(has_triton=False, is_interpreting=False)
INTERPRETER = Machine(has_triton=True, is_interpreting=True)


@pytest.mark.parametrize(
    ("requested", "device", "dtype", "machine", "chosen"),
    [
        ("auto", "cpu", torch.float32, GPU, "cpu"),
        ("auto", "cpu", torch.float64, BARE, "cpu"),
        ("auto", "cpu", torch.float32, INTERPRETER, "cpu"),
        ("auto", "cuda", torch.bfloat16, GPU, "triton"),
        ("auto", "meta", torch.bfloat16, GPU, "cpu"),
        ("cpu", "cpu", torch.float16, BARE, "cpu"),
        ("reference", "xpu", torch.float16, BARE, "reference"),
        ("triton", "cuda", torch.float16, GPU, "triton"),
        ("triton", "cpu", torch.float32, INTERPRETER, "triton"),
    ],
)
def test_choose_backend(
    requested: str, device: str, dtype: torch.dtype, machine: Machine, chosen: str
) -> None:
    choice = choose_backend("experts", requested, device, dtype, machine)
    assert choice.backend == chosen
    assert choice.reason
    assert not choice.is_fallback


@pytest.mark.parametrize(
    ("dtype", "machine", "reason"),
    [
        (torch.float64, GPU, "the kernels do not compute in float64"),
        (torch.bfloat16, BARE, "the tensors are on a GPU but triton is not installed"),
    ],
)
def test_choose_backend_falls_back_openly(
    dtype: torch.dtype, machine: Machine, reason: str
) -> None:
    choice = choose_backend("experts", "auto", "cuda", dtype, machine)
    assert (choice.backend, choice.reason, choice.is_fallback) == ("reference", reason, True)


@pytest.mark.parametrize(
    ("requested", "device", "dtype", "machine", "message"),
    [
        ("triton", "cuda", torch.float32, BARE, "no triton package.*pip install triton"),
        ("triton", "cpu", torch.float32, GPU, "got tensors on cpu.*TRITON_INTERPRET=1"),
        ("triton", "cuda", torch.float64, GPU, "got float64.*Use float32, bfloat16 or float16"),
        ("cpu", "cuda", torch.float32, GPU, "'cpu' was asked for, got tensors on cuda"),
        ("auto", "mps", torch.float32, GPU, "got tensors on mps.*backend='reference'"),
    ],
)
def test_choose_backend_refuses(
    requested: str, device: str, dtype: torch.dtype, machine: Machine, message: str
) -> None:
    with pytest.raises(BackendError, match=f"experts: backend must be able to run here.*{message}"):
        choose_backend("experts", requested, device, dtype, machine)


def test_choose_backend_unknown_name() -> None:
    message = r"experts: backend must be one of auto, triton.*got 'tritan'\. Did you mean 'triton'"
    with pytest.raises(ConfigError, match=message):
        choose_backend("experts", "tritan", "cpu", torch.float32, GPU)


def test_choose_for_logs_a_fallback_once(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    fallback = backend.Choice(backend="reference", reason="of a test", is_fallback=True)
    monkeypatch.setattr(backend, "choose_backend", lambda *_: fallback)
    with caplog.at_level(logging.WARNING, logger="piper_kernels"):
        for _ in range(3):
            choose_for("experts", "auto", torch.empty(1), torch.float32)
    assert caplog.messages == ["experts runs on 'reference': of a test."]


def test_experts_asked_for_triton_without_a_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(backend, "THIS_MACHINE", GPU)
    with pytest.raises(BackendError, match="TRITON_INTERPRET=1"):
        run_experts(experts, make_experts_inputs(3, 4, 4, 2, 1), backend="triton")
