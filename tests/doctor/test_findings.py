"""A finding that complains says what to do; a check that dies is a finding."""

import pytest

from piper_kernels.doctor.findings import Finding, count, run_check
from piper_kernels.errors import ConfigError

FINE = Finding(area="a", name="n", value="v")


@pytest.mark.parametrize("status", ["warning", "broken"])
def test_finding_wants_advice_with_every_complaint(status: str) -> None:
    with pytest.raises(ConfigError, match="Finding: advice must say what to do about n, got"):
        Finding(area="a", name="n", value="v", status=status)  # type: ignore[arg-type]


def test_count_counts_one_status() -> None:
    warning = Finding(area="a", name="n", value="v", status="warning", advice="do it")
    assert count([FINE, warning, warning], "warning") == 2
    assert count([FINE, warning], "broken") == 0


def test_run_check_turns_an_exception_into_a_finding() -> None:
    def check() -> list[Finding]:
        raise RuntimeError("driver [0] fell over")

    (finding,) = run_check("devices", check)
    assert finding.status == "broken"
    assert finding.value == "RuntimeError: driver [0] fell over"
    assert finding.area == "devices"
    assert run_check("devices", lambda: [FINE]) == [FINE]
