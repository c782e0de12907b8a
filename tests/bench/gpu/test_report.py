"""The page, the targets and the exit status, from results that the test makes up."""

from pathlib import Path
from typing import Any

import pytest

from bench.gpu.report import list_targets, markdown_page, print_summary, write_report


def sweep_row(variant: str, **cells: Any) -> dict[str, Any]:
    case = {"shape": "qwen3_30b_a3b", "T": 32768, "mode": "forward", "status": "ok"}
    return {**case, "variant": variant, **cells}


def made_up(*, is_dry: bool = False, checks: str = "ok") -> dict[str, Any]:
    parts = {
        "environment": [{"item": "environment", "status": "ok", "gpu": "made up"}],
        "roofs": [{"item": "a", "status": "ok", "tflops": 500.0}, {"tflops": 800.0}],
        "sweep": [
            sweep_row("piper", tflops=520.0, piper_speedup=1.0),
            sweep_row("hf_grouped_mm", tflops=260.0, piper_speedup=2.0),
            sweep_row("liger", status="not measured", detail="absent"),
        ],
        "checks": [{"item": "experts", "status": checks, "detail": "x | y", "seconds": 1.0}],
    }
    return {
        "is_dry_run": is_dry,
        "parts": {
            name: {"status": "ok", "seconds": 1.0, "detail": "", "rows": rows}
            for name, rows in parts.items()
        },
    }


def test_list_targets_uses_the_best_dense_rate_and_misses_what_is_absent() -> None:
    targets = {target.name: target for target in list_targets(made_up())}
    dense = targets["forward over the dense bf16 GEMM rate"]
    assert (dense.measured, dense.is_met) == (0.65, True)
    assert targets["forward: speed-up over grouped_mm"].measured == 2.0
    liger = targets["forward: speed-up over Liger"]
    assert (liger.measured, liger.is_met) == (None, False)
    assert not targets["forward+backward over the dense GEMM rate"].is_met


def test_markdown_page_lists_rivals_that_were_not_measured() -> None:
    page = markdown_page(made_up())
    assert "| qwen3_30b_a3b | 32768 | forward | liger | not measured |" in page
    assert "x / y" in page, "a bar would break the table"
    assert "means anything" not in page
    assert "no number in it means anything" in markdown_page(made_up(is_dry=True))


def test_write_report_writes_all_files(tmp_path: Path) -> None:
    write_report(tmp_path, made_up())
    assert {path.name for path in tmp_path.iterdir()} == {"gpu.json", "gpu.md", "gpu_layers.png"}


def test_print_summary_counts_and_ends_with_the_targets(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert print_summary(made_up(), tmp_path, is_strict=False) == 0
    printed = capsys.readouterr().out.splitlines()
    assert printed[-1] == "targets: 2 met, 4 missed"
    assert print_summary(made_up(), tmp_path, is_strict=True) == 1
    assert print_summary(made_up(checks="failed"), tmp_path, is_strict=False) == 1
    assert "FAILED checks: experts" in capsys.readouterr().out
    results = made_up()
    results["parts"]["environment"]["status"] = "failed"
    assert print_summary(results, tmp_path, is_strict=False) == 2


def test_print_summary_fails_for_piper_and_not_for_a_broken_rival(tmp_path: Path) -> None:
    results = made_up()
    row = results["parts"]["sweep"]["rows"][2]
    row["status"] = "wrong"
    assert print_summary(results, tmp_path, is_strict=False) == 0
    row["variant"] = "piper"
    assert print_summary(results, tmp_path, is_strict=False) == 1
