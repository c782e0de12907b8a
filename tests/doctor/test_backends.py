"""The library's own choice, and the proof that it computes."""

import sys

import pytest
import torch

from piper_kernels.doctor.backends import check_backends, judge_backend, judge_proof, prove
from piper_kernels.functional.experts import experts


def test_judge_backend_warns_of_a_fallback() -> None:
    slow = judge_backend("cuda", "reference", "triton is not installed", is_fallback=True)
    assert (slow.status, slow.value) == ("warning", "reference: triton is not installed")
    assert slow.advice
    assert judge_backend("cpu", "cpu", "it is one", is_fallback=False).status == "ok"


def test_judge_proof_reports_what_was_raised() -> None:
    broken = judge_proof("cuda", RuntimeError("no kernel image"))
    assert (broken.status, broken.value) == ("broken", "RuntimeError: no kernel image")
    assert judge_proof("cpu", None).status == "ok"


def test_check_backends_proves_the_cpu() -> None:
    findings = {finding.name: finding for finding in check_backends()}
    assert findings["cpu"].value.startswith("cpu: ")
    assert findings["cpu, self-test"].status == "ok"


def test_prove_notices_a_wrong_gradient(monkeypatch: pytest.MonkeyPatch) -> None:
    right = experts

    def wrong(x: torch.Tensor, *others: torch.Tensor) -> torch.Tensor:
        y = right(x, *others)
        # the value stays, the gradient of x is off by one
        return y + (x - x.detach())

    prove("cpu")
    # the name in the package is the function, not the module that prove() imports from
    monkeypatch.setattr(sys.modules["piper_kernels.functional.experts"], "experts", wrong)
    with pytest.raises(AssertionError, match="not close"):
        prove("cpu")
