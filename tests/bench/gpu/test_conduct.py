"""Parts in processes: what one found is kept when it fails, is stopped, or finds no time."""

import json
import subprocess
from pathlib import Path
from typing import Any

import pytest

from bench.gpu.conduct import Conductor, Part

FIRST, SECOND = Part("environment", "first", 0.5), Part("checks", "second", 0.5)


def conduct(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, run: Any, seconds: float = 100.0
) -> tuple[dict[str, Any], list[dict[str, Any]]]:
    """Conduct both parts with a stand-in for their processes; also what was written after each."""
    written: list[dict[str, Any]] = []
    monkeypatch.setattr(subprocess, "run", run)
    conductor = Conductor(out=tmp_path, seconds=seconds, is_dry=True, say=lambda line: None)
    results = conductor.run(
        [FIRST, SECOND], lambda found: written.append(json.loads(json.dumps(found)))
    )
    return results, written


def rows_path(command: list[str]) -> Path:
    return Path(command[command.index("--rows") + 1])


def test_conductor_keeps_what_a_failing_part_found(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def run(command: list[str], **options: Any) -> subprocess.CompletedProcess[str]:
        assert options["env"]["TRITON_INTERPRET"] == "1"
        rows_path(command).write_text('[{"item": "a", "status": "ok"}]')
        return subprocess.CompletedProcess(command, -11 if "checks" in command else 0)

    results, written = conduct(tmp_path, monkeypatch, run)
    assert results["parts"]["environment"]["status"] == "ok"
    failed = results["parts"]["checks"]
    assert (failed["status"], failed["rows"][0]["item"]) == ("failed", "a")
    assert "-11" in failed["detail"]
    assert [list(found["parts"]) for found in written] == [
        ["environment"],
        ["environment", "checks"],
    ]
    assert not list(tmp_path.glob("part_*")), "rows of parts are in the results"


def test_conductor_stops_a_part_that_hangs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def run(command: list[str], **options: Any) -> subprocess.CompletedProcess[str]:
        rows_path(command).write_text('[{"item": "a", "status": "ok"}]')
        if "checks" in command:
            assert options["timeout"] == pytest.approx(50.0 + 5.0)
            raise subprocess.TimeoutExpired(command, options["timeout"])
        return subprocess.CompletedProcess(command, 0)

    results, _ = conduct(tmp_path, monkeypatch, run)
    stopped = results["parts"]["checks"]
    assert (stopped["status"], len(stopped["rows"])) == ("stopped", 1)


def test_conductor_ends_without_a_device_or_without_time(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def run(command: list[str], **options: Any) -> subprocess.CompletedProcess[str]:
        return subprocess.CompletedProcess(command, 2)

    results, _ = conduct(tmp_path, monkeypatch, run)
    assert list(results["parts"]) == ["environment"]
    results, _ = conduct(tmp_path, monkeypatch, run, seconds=1.0)
    assert results["parts"]["environment"]["status"] == "not started"
