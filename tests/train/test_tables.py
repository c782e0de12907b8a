import io
from typing import Any

from rich.console import Console

from piper_kernels.train.compare import Timing
from piper_kernels.train.entropy import NgramEntropies
from piper_kernels.train.progress import MAX_COLUMNS
from piper_kernels.train.tables import loss_table, timing_table


def render(table: Any) -> list[str]:
    stream = io.StringIO()
    Console(file=stream, width=MAX_COLUMNS).print(table)
    lines = stream.getvalue().splitlines()
    assert max(map(len, lines)) <= MAX_COLUMNS
    # no cell was cut short
    assert "\u2026" not in stream.getvalue()
    return lines


def test_loss_table_ranks_the_model_among_the_ngrams() -> None:
    entropies = NgramEntropies(uniform=5.545, unigram=3.25, bigram=2.5, trigram=1.8)
    lines = render(loss_table(entropies, 1.5, 37_000))
    assert "37,000 bytes" in lines[0]
    rows = [line.split("\u2502")[1:4] for line in lines if line.startswith("\u2502")]
    assert [[cell.strip() for cell in row] for row in rows] == [
        ["uniform", "5.545", "8.000"],
        ["unigram", "3.250", "4.689"],
        ["bigram", "2.500", "3.607"],
        ["trigram", "1.800", "2.597"],
        ["this model", "1.500", "2.164"],
    ]


def test_timing_table_shows_medians_and_spreads() -> None:
    eager = Timing(
        experts="eager",
        difference=0.0,
        step_s=(0.1, 0.2, 0.3),
        tokens=2048,
        speedups=(1.0, 1.0, 1.0),
    )
    piper = Timing(
        experts="piper",
        difference=2.5e-7,
        step_s=(0.05, 0.1, 0.1),
        tokens=2048,
        speedups=(2.0, 2.0, 3.0),
    )
    rows = [line for line in render(timing_table([eager, piper])) if line.startswith("\u2502")]
    cells = [[cell.strip() for cell in row.split("\u2502")[1:-1]] for row in rows]
    assert cells == [
        ["eager", "200.0", "140.0 - 260.0", "10,240", "1.00x", "", ""],
        ["piper", "100.0", "70.0 - 100.0", "20,480", "2.00x", "2.00 - 2.60", "2.5e-07"],
    ]
