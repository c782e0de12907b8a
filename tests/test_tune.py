"""piper tune: lists without a GPU, refuses to measure without one, prints what was found."""

import argparse
import io

import pytest
import torch
from rich.console import Console

from bench.shapes import SHAPES
from piper_kernels.cli import main
from piper_kernels.errors import ConfigError
from piper_kernels.triton.tiles import default_tiles
from piper_kernels.triton.tuner import Outcome, Skipped
from piper_kernels.tune import MODELS, add_outcome, new_table, random_weights, read_sizes


def test_read_sizes_of_named_models_are_the_benches() -> None:
    for name, sizes in MODELS.items():
        shape = SHAPES[name]
        assert sizes == (shape.H, shape.I, shape.E, shape.K) == read_sizes(name)


@pytest.mark.parametrize("text", ["qwen3", "1,2,3", "1,2,3,0", "1,2,3,x"])
def test_read_sizes_refuses_what_is_neither(text: str) -> None:
    with pytest.raises(ConfigError, match="--model must be a known model or H,I,E,K"):
        read_sizes(text)


def test_dry_run_lists_candidates_without_a_gpu(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "120")
    assert main(["tune", "--model", "64,32,8,2", "--tokens", "4", "4000", "--dry-run"]) == 0
    out = capsys.readouterr().out
    assert out.count("(default)") == 2 * 6
    assert "16x64x128, 4 warps, 3 stages (default)" in out
    assert "128x128x64, 8 warps, 3 stages (default)" in out


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_tune_without_a_driver_says_so(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["tune"]) == 2
    message = "piper tune: this machine must have a GPU and its driver to measure on, got none."
    assert message in capsys.readouterr().err
    assert main(["tune", "--tokens", "0"]) == 2
    assert "--tokens must be at least 1, got [0]" in capsys.readouterr().err


def test_add_outcome_shows_both_sides() -> None:
    default = default_tiles("down", num_rows=8, num_experts=1, element_bytes=2)
    other = default_tiles("down", num_rows=800, num_experts=1, element_bytes=2)
    outcome = Outcome(
        default=default,
        winner=other,
        default_s=3e-6,
        winner_s=2e-6,
        num_measured=2,
        skipped=(Skipped(other, "no memory"),),
    )
    table = new_table()
    add_outcome(table, "down", 16, outcome)
    console = Console(file=io.StringIO(), width=200)
    console.print(table)
    text = console.file.getvalue()
    for part in (default.summary(), other.summary(), "3.0", "2.0", "1.50", "no memory"):
        assert part in text


def test_random_weights_follow_the_layout() -> None:
    arguments = argparse.Namespace(
        transposed=True, interleaved=False, ungated=True, activation="relu2", dtype="bf16"
    )
    weights = random_weights(arguments, (8, 6, 3, 2), torch.device("cpu"))
    assert weights.gate_up_proj.shape == (3, 8, 6)
    assert weights.down_proj.shape == (3, 6, 8)
    assert weights.activation.function == "relu2"
