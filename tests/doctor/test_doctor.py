"""The command: table, JSON, exit status."""

import argparse
import io
import json

import pytest
from rich.console import Console

from piper_kernels import doctor
from piper_kernels.cli import main
from piper_kernels.doctor import as_json, configure, examine, print_table, run
from piper_kernels.doctor.findings import Finding

FINE = Finding(area="packages", name="torch", value="2.13.0+cpu")
SLOW = Finding(area="processor", name="bf16", value="emulated", status="warning", advice="fp32")
DEAD = Finding(
    area="devices", name="driver", value="[Errno 2] none", status="broken", advice="install it"
)


def arguments(*words: str) -> argparse.Namespace:
    parser = argparse.ArgumentParser()
    configure(parser)
    return parser.parse_args(words)


@pytest.mark.parametrize(
    ("findings", "status"), [([FINE, SLOW], 0), ([FINE, DEAD], 1), ([FINE], 0)]
)
def test_run_fails_only_on_what_is_broken(
    findings: list[Finding],
    status: int,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setattr(doctor, "examine", lambda: findings)
    assert run(arguments()) == status
    assert f"{len(findings)} checks" in capsys.readouterr().out
    assert run(arguments("--json")) == status
    report = json.loads(capsys.readouterr().out)
    assert report["num_broken"] == status
    assert [finding["name"] for finding in report["findings"]] == [f.name for f in findings]


def test_print_table_shows_advice_and_brackets_in_80_columns() -> None:
    text = io.StringIO()
    print_table([FINE, SLOW, DEAD], Console(file=text, width=80))
    lines = text.getvalue().splitlines()
    assert max(map(len, lines)) <= 80
    assert any("[Errno 2] none" in line for line in lines)
    assert any("-> install it" in line for line in lines)
    assert lines[-1] == "3 checks: 1 warnings, 1 broken"


def test_as_json_counts() -> None:
    report = json.loads(as_json([FINE, SLOW, DEAD]))
    assert (report["num_warnings"], report["num_broken"]) == (1, 1)


def test_examine_runs_every_check_even_if_one_dies(monkeypatch: pytest.MonkeyPatch) -> None:
    def dies() -> list[Finding]:
        raise OSError("no such driver")

    monkeypatch.setitem(doctor.CHECKS, "devices", dies)
    findings = examine()
    assert {finding.area for finding in findings} == set(doctor.CHECKS)
    dead = [finding for finding in findings if finding.area == "devices"]
    assert [finding.value for finding in dead] == ["OSError: no such driver"]


def test_piper_doctor_runs_here(capsys: pytest.CaptureFixture[str]) -> None:
    status = main(["doctor", "--json"])
    report = json.loads(capsys.readouterr().out)
    broken = [f for f in report["findings"] if f["status"] == "broken"]
    assert status == int(bool(broken))
    assert all(f["advice"] for f in report["findings"] if f["status"] != "ok")
