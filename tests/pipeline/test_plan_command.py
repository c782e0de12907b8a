"""``piper plan`` from the command line: table, files, explanation, and what it refuses."""

import json
from pathlib import Path

import pytest

from piper_kernels.cli import main
from piper_kernels.pipeline.model_config import load_model
from piper_kernels.pipeline.plan import Plan

SMALL = ["plan", "--model", "olmoe-1b-7b", "--platform", "h100", "--gpus", "8"]


def test_plan_prints_a_table_of_at_most_100_columns(capsys: pytest.CaptureFixture[str]) -> None:
    assert main([*SMALL, "--global-batch", "16", "--top", "3"]) == 0
    out = capsys.readouterr().out
    assert "olmoe-1b-7b on 8 GPUs of h100, 16 sequences of 4096 tokens a step" in out
    assert "All numbers are modelled" in out
    assert "less memory for more time" in out
    assert max(map(len, out.splitlines())) <= 100


def test_plan_writes_a_plan_and_a_trace(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    files = ["--out", str(tmp_path / "plan.json"), "--trace", str(tmp_path / "trace.json")]
    assert main([*SMALL, "--global-batch", "8", "--top", "1", *files]) == 0
    plan = Plan.load(tmp_path / "plan.json")
    model = load_model("olmoe-1b-7b")
    plan.check_model(model.digest(), model.num_layers, model.num_experts)
    assert (plan.world_size, plan.global_batch) == (8, 8)
    assert json.loads((tmp_path / "trace.json").read_text())["traceEvents"]
    assert "plan written to" in capsys.readouterr().out


def test_plan_explains_every_term(capsys: pytest.CaptureFixture[str]) -> None:
    assert main([*SMALL, "--global-batch", "16", "--explain", "2,4"]) == 0
    out = capsys.readouterr().out
    for term in ("experts gate_up", "exchange", "optimizer", "workspace", "peak", "bubble", "MFU"):
        assert f"  {term} " in out
    assert "strategy: pp 2, dp 1, ep 4" in out
    assert max(map(len, out.splitlines())) <= 100


def test_plan_draws_pictures(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    files = ["--html", str(tmp_path / "r.html"), "--pictures", str(tmp_path / "p")]
    fixed = ["--explain", "2,4"]
    assert main([*SMALL, "--global-batch", "16", "--top", "1", *fixed, *files]) == 0
    names = {path.name for path in (tmp_path / "p").iterdir()}
    assert names == {"memory.png", "timeline.png", "exchange.png", "gpus.png"}
    page = (tmp_path / "r.html").read_text()
    assert page.count("data:image/png;base64,") == 4
    assert "modelled, not measured" in page
    assert "http" not in page.split("<pre>")[0]


def test_plan_takes_a_recorded_load(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "load.json"
    path.write_text(json.dumps([1] * 63 + [64]))
    rest = ["--global-batch", "16", "--explain", "1,8"]
    assert main([*SMALL, *rest]) == 0
    even = capsys.readouterr().out
    assert main([*SMALL, *rest, "--load", str(path)]) == 0
    assert even != capsys.readouterr().out
    path.write_text('{"a": 1}')
    assert main([*SMALL, *rest, "--load", str(path)]) == 2
    assert "load must hold a list of numbers" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("changes", "match"),
    [
        (["--gpus", "0"], "num_gpus must be an integer >= 1, got 0"),
        (["--seq", "-1"], "seq_len must be an integer >= 1, got -1"),
        (["--platform", "h10"], "Did you mean 'h100'?"),
        (["--model", "mixtral"], "mixtral-8x7b"),
        (["--explain", "2x4"], "explain must be PP,EP"),
        (["--explain", "3,1"], "pp must be at least 1 and divide the 8 GPUs, got 3"),
        (["--explain", "1,3"], "ep must be at least 1 and divide the 8 GPUs, got 3"),
        (["--top", "0"], "top must be at least 1, got 0"),
    ],
)
def test_plan_refuses_bad_input(
    changes: list[str], match: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main([*SMALL, "--global-batch", "8", *changes]) == 2
    assert match in capsys.readouterr().err


def test_plan_says_what_would_fit(capsys: pytest.CaptureFixture[str]) -> None:
    # 47 billion parameters at 16 bytes are 751 GB, eight H100s have 640
    command = ["plan", "--model", "mixtral-8x7b", "--platform", "h100", "--gpus", "8"]
    assert main([*command, "--global-batch", "8"]) == 2
    error = capsys.readouterr().err
    assert "needed" in error
    assert "available" in error
    assert "The nearest change that fits: with 8-bit AdamW." in error
