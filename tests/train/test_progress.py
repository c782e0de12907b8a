import io
import sys
from dataclasses import replace

import pytest
from rich.console import Console

from piper_kernels.train.metrics import StepRecord
from piper_kernels.train.progress import (
    MAX_COLUMNS,
    LiveProgress,
    Pace,
    PlainProgress,
    expert_balance,
    make_console,
    open_progress,
    step_line,
)

RECORD = StepRecord(
    step=1,
    loss=5.545,
    balance_loss=2.0,
    learning_rate=3e-3,
    grad_norm=1.25,
    tokens=2048,
    step_s=0.5,
    expert_counts=[[40, 24], [32, 32]],
)


def steps(count: int) -> list[StepRecord]:
    return [replace(RECORD, step=step, tokens=2048 * step) for step in range(1, count + 1)]


def make(is_terminal: bool) -> tuple[Console, io.StringIO]:
    stream = io.StringIO()
    return Console(file=stream, width=MAX_COLUMNS, force_terminal=is_terminal), stream


def test_pace_averages_the_last_steps() -> None:
    pace = Pace(num_steps=100)
    for record in steps(30):
        pace.add(replace(record, step_s=4.0 if record.step <= 10 else 0.5))
    assert pace.tokens_per_s == pytest.approx(4096)
    assert pace.remaining_s == pytest.approx(70 * 0.5)


def test_pace_of_a_resumed_run_ignores_what_came_before() -> None:
    pace = Pace(num_steps=100)
    pace.add(replace(RECORD, step=51, tokens=51 * 2048))
    assert pace.tokens_per_s == pytest.approx(4096)


def test_plain_progress_prints_some_lines_without_control_codes() -> None:
    console, stream = make(is_terminal=False)
    with open_progress(console, 40, [0, 1]) as progress:
        assert isinstance(progress, PlainProgress)
        for record in steps(40):
            loss = 1.75 if record.step == 39 else None
            progress.update(replace(record, held_out_loss=loss))
        progress.note("a note")
    lines = stream.getvalue().splitlines()
    # every second step, the evaluated one, and the note
    assert len(lines) == 22
    assert lines[0].split() == [
        *("step", "2/40", "loss", "5.545", "4,096", "tokens/s"),
        *("busiest", "1.25x", "0:00:19", "left"),
    ]
    assert "held out 1.750" in lines[19]
    assert lines[-1] == "a note"
    assert "\x1b" not in stream.getvalue()


def test_live_progress_shows_loss_speed_time_and_balance() -> None:
    console, stream = make(is_terminal=True)
    with open_progress(console, 40, [0, 1]) as progress:
        assert isinstance(progress, LiveProgress)
        for record in steps(5):
            progress.update(record)
        progress.update(replace(RECORD, step=6, tokens=6 * 2048, held_out_loss=1.75))
        progress.note("a note")
    console, stream = make(is_terminal=False)
    console.print(progress._panel(steps(6)[-1]))
    text = stream.getvalue()
    for part in (
        "step 6/40",
        "5.545",
        "1.750",
        "4,096 tokens/s",
        "0:00:17 left",
        "layer 1",
        "1.25",
    ):
        assert part in text
    assert max(map(len, text.splitlines())) <= MAX_COLUMNS


def test_expert_balance_shows_the_least_even_layers_of_a_deep_model() -> None:
    counts = [[8 + layer, 8] for layer in range(48)]
    console, stream = make(is_terminal=False)
    console.print(expert_balance(replace(RECORD, expert_counts=counts), list(range(48))))
    lines = stream.getvalue().splitlines()
    assert "the 12 least even of 48 layers" in lines[0]
    assert [line.split()[1] for line in lines[1:]] == [str(layer) for layer in range(36, 48)]


def test_step_line_fits_100_columns_for_large_numbers() -> None:
    record = replace(RECORD, step=999_999, held_out_loss=1.75, expert_counts=[[640] + [0] * 63])
    pace = Pace(1_000_000)
    pace.add(replace(record, tokens=999_999 * 4_000_000))
    assert len(step_line(record, pace, 1_000_000)) <= MAX_COLUMNS


def test_make_console_is_at_most_100_columns(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "stdout", io.StringIO())
    assert make_console().width == MAX_COLUMNS
    monkeypatch.setenv("COLUMNS", "240")
    monkeypatch.setenv("FORCE_COLOR", "1")
    monkeypatch.setattr(sys, "stdout", io.StringIO())
    assert make_console().width == MAX_COLUMNS
    monkeypatch.setenv("COLUMNS", "80")
    assert make_console().width == 80
