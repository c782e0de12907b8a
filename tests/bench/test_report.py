"""The table fits 100 columns; the picture is drawn from the numbers."""

import io
from dataclasses import replace
from pathlib import Path

from rich.console import Console

from bench.harness import Case, Roof, make_records
from bench.record import Environment, Record
from bench.report import make_console, plot_speedups, print_case, print_environment
from bench.shapes import SHAPES
from piper_kernels.cost import Cost

ENVIRONMENT = Environment(
    commit="abc1234-dirty",
    machine="a processor with a rather long name, 128 cores",
    num_threads=64,
    load=0.0,
    torch="2.13.0+cpu",
    transformers="5.24.0",
    date="2026-01-01T00:00:00+00:00",
)
LONGEST = max(SHAPES.values(), key=lambda shape: len(shape.name))


def records_at(num_tokens: int, *, has_read: bool = True) -> tuple[str, list[Record]]:
    """A slow case of the longest shape, with figures as wide as they get."""
    case = Case(
        op="experts",
        mode="forward_backward",
        shape=LONGEST,
        num_tokens=num_tokens,
        dtype="bf16",
        routing="one_expert_empty",
        cost=Cost(flops=9_999_000_000_000, bytes=200_000_000_000),
    )
    samples = {
        "piper": [16.0, 17.0, 18.0, 16.5, 16.1, 16.2],
        "grouped_mm": [34.0, 35.0, 36.0, 33.0, 33.5, 34.2],
        "dense_gemm": [1.0],
        "read_weights": [4.0],
    }
    records = make_records(
        case,
        samples,
        gemm_roof=Roof(variant="dense_gemm", amount=1_000_000_000_000),
        read_roof=Roof(variant="read_weights", amount=80_000_000_000) if has_read else None,
        baseline="grouped_mm",
        environment=ENVIRONMENT,
    )
    return case.title, records


def test_print_case_fits_100_columns() -> None:
    text = io.StringIO()
    print_case(*records_at(4096), Console(file=text, width=make_console().width))
    lines = text.getvalue().splitlines()
    assert max(map(len, lines)) <= 100
    assert "…" not in text.getvalue()
    assert any("baseline" in line and "grouped_mm" in line for line in lines)
    piper = next(line for line in lines if "piper" in line)
    assert "2.07 [2.00, 2.12]" in piper
    # 9999 GFLOP in 16.35 s beside a roof of 1000 GFLOP/s; 200 GB in it beside 20 GB/s
    assert "611.6" in piper
    assert "61%" in piper
    assert "roofs: dense GEMM 1000.0 GFLOP/s, reading 20.00 GB/s" in lines[-1]


def test_print_case_leaves_out_a_roof_that_was_not_measured() -> None:
    text = io.StringIO()
    print_case(*records_at(64, has_read=False), Console(file=text, width=100))
    assert "reading" not in text.getvalue()


def test_plot_speedups_writes_a_picture(tmp_path: Path) -> None:
    records = records_at(1)[1] + records_at(64)[1] + records_at(4096)[1]
    path = tmp_path / "new" / "moe.png"
    plot_speedups(path, records, "piper")
    assert path.read_bytes().startswith(b"\x89PNG")
    empty = tmp_path / "empty.png"
    plot_speedups(empty, [], "piper")
    assert 0 < empty.stat().st_size < path.stat().st_size


def test_print_environment_says_when_others_were_busy() -> None:
    text = io.StringIO()
    console = Console(file=text, width=100)
    print_environment(replace(ENVIRONMENT, num_threads=0), console)
    assert "noisy" not in text.getvalue()
    assert "commit abc1234-dirty" in text.getvalue()
    print_environment(replace(ENVIRONMENT, load=1e6), console)
    assert "noisy: load average 1000000.0 before the run began" in text.getvalue()
