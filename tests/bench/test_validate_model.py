"""The command: it prints rows and targets, and says with its status whether all were met."""

import io

import pytest
from rich.console import Console

from bench import validate_model
from bench.validate_memory import Row
from bench.validate_model import main, print_rows

GROUPS = (
    "states, real step",
    "activations, real forward",
    "activations, full size",
    "published dense states",
    "published dense activations",
)


def test_print_rows_shows_errors_with_sign() -> None:
    console = Console(file=io.StringIO(), width=100)
    print_rows([Row(group="g", name="a", predicted=90.0, measured=100.0)], console)
    text = console.file.getvalue()  # type: ignore[attr-defined]
    assert "-10.00%" in text
    assert "100" in text


@pytest.mark.parametrize(("predicted", "status"), [(1.0, 0), (2.0, 1)])
def test_main_counts_targets(
    predicted: float,
    status: int,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    rows = [Row(group=group, name="a", predicted=predicted, measured=1.0) for group in GROUPS]
    monkeypatch.setattr(validate_model, "memory_rows", lambda: rows)
    # tests/bench/test_validate_time.py is about these
    monkeypatch.setattr(validate_model, "time_rows", list)
    monkeypatch.setattr(validate_model, "time_targets", lambda rows: rows)
    assert main(["--strict"]) == status
    assert main([]) == 0
    last = capsys.readouterr().out.strip().splitlines()[-1]
    met = 0 if status else len(GROUPS)
    assert last == f"targets: {met} met, {len(GROUPS) - met} missed"
