"""``piper inspect``: what is shown, exit status, files, errors. The compiler is replaced."""

import importlib.metadata
import json
import re
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest

from piper_kernels.cli import main
from piper_kernels.triton.offline import command
from piper_kernels.triton.offline.assembly import Resources
from piper_kernels.triton.offline.cases import Case
from piper_kernels.triton.offline.command import BEGIN, END, cache_folder
from piper_kernels.triton.offline.pool import Outcome

KIND = {"sm_80": "mma.sync", "sm_90": "wgmma", "sm_100": "tcgen05"}
WORDS = ["inspect", "--matrix", "ci", "--target", "sm_90", "--op", "down"]


def takes(case: Case) -> Resources:
    return Resources(
        registers=96,
        stack_bytes=8 if case.tiles is not None and case.tiles.block_m == 128 else 0,
        num_spills=0,
        shared_bytes=1024,
        num_warps=4,
        waves_per_simd=4,
        matrix={KIND.get(case.target, "mfma"): 4},
        num_wide_loads=8,
        num_descriptor_loads=1,
    )


@pytest.fixture(autouse=True)
def compiler(monkeypatch: pytest.MonkeyPatch) -> list[dict[str, Any]]:
    """Replaces the compiler: tiles of 128 rows take 8 bytes of stack. Returns what it was asked."""
    asked: list[dict[str, Any]] = []

    def compile_cases(
        cases: Sequence[Case], *, on_outcome: Callable[[Outcome], None], **options: Any
    ) -> list[Outcome]:
        asked.append(options)
        return [Outcome(case=case, resources=takes(case)) for case in cases]

    monkeypatch.setattr(command, "compile_cases", compile_cases)
    return asked


def test_run_ends_with_the_count(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(WORDS) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[-1] == "targets: 3 met, 1 missed"
    assert sum("w4 s3" in line for line in lines) == 3
    assert max(map(len, lines)) <= 100


def test_run_check_fails_on_a_fault(capsys: pytest.CaptureFixture[str]) -> None:
    assert main([*WORDS, "--check", "--quiet"]) == 1
    shown = capsys.readouterr().out
    assert "missed down halves 128x128x64 w8 s3: 8 stack bytes, allowed 0" in shown
    assert "w4 s3" not in shown
    assert main([*WORDS[:-1], "count", "--check"]) == 0
    assert capsys.readouterr().out.endswith("targets: 1 met, 0 missed\n")


def test_run_writes_json(tmp_path: Path) -> None:
    path = tmp_path / "report.json"
    assert main([*WORDS, "--json", str(path)]) == 0
    report = json.loads(path.read_text())
    assert report["triton"] == importlib.metadata.version("triton")
    assert [row["case"]["op"] for row in report["rows"]] == 4 * ["down"]


def test_run_writes_markdown_between_its_marks(tmp_path: Path) -> None:
    path = tmp_path / "page.md"
    path.write_text(f"before\n{BEGIN}\nold\n{END}\nafter\n")
    for _ in range(2):
        assert main([*WORDS, "--markdown", str(path)]) == 0
        text = path.read_text()
        assert text.startswith(f"before\n{BEGIN}\n`piper ")
        assert text.endswith(f"|\n{END}\nafter\n")
        assert "old" not in text
        assert text.count("| down | halves |") == 4


def test_run_refuses_a_page_without_marks(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "page.md"
    path.write_text("nothing")
    assert main([*WORDS, "--markdown", str(path)]) == 2
    assert "--markdown must hold the lines" in capsys.readouterr().err
    assert path.read_text() == "nothing"


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--target", "sm_91"], "--target must be one of sm_80, sm_90.*got 'sm_91'.*sm_90"),
        (["--op", "gate_upp"], "--op must be one of .*got 'gate_upp'.*Did you mean 'gate_up'"),
        (["--dtype", "fp8"], "--dtype must be one of bf16, fp16, fp32, int, got 'fp8'"),
        (["--jobs", "0"], "--jobs must be >= 1, got 0"),
        (["--matrix", "ci", "--dtype", "fp32"], "nothing to compile: --matrix ci"),
    ],
)
def test_run_refuses_bad_words(
    words: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["inspect", *words]) == 2
    assert re.search(message, capsys.readouterr().err)


def test_run_without_triton(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def version(name: str) -> str:
        raise importlib.metadata.PackageNotFoundError(name)

    monkeypatch.setattr(importlib.metadata, "version", version)
    assert main(WORDS) == 2
    assert "pip install 'triton>=3.6'" in capsys.readouterr().err


def test_run_passes_jobs_and_cache_on(
    compiler: list[dict[str, Any]], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert main([*WORDS, "--jobs", "3"]) == 0
    assert compiler == [{"jobs": 3, "cache_folder": tmp_path / "piper" / "inspect"}]
    assert cache_folder() == tmp_path / "piper" / "inspect"
