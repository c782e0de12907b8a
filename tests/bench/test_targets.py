"""The target table and its last line."""

import io

import pytest
from rich.console import Console

from bench.targets import Target, exit_status, print_targets, summary_line

MET = Target("geometric mean", 1.5, 1.62, limit=2.0)
MISSED = Target("worst case", 0.97, 0.9)
UNMEASURED = Target("decode", 1.5, None)
CAPPED = Target("bytes", 0.45, 0.4, sense="at_most")


def test_target_is_met_in_its_own_sense() -> None:
    assert MET.is_met
    assert not MISSED.is_met
    assert CAPPED.is_met
    assert not Target("bytes", 0.45, 0.46, sense="at_most").is_met
    assert not UNMEASURED.is_met
    assert not Target("broken", 1.0, float("nan")).is_met


def test_summary_line_counts_what_was_not_measured_as_missed() -> None:
    assert summary_line([MET, MISSED, UNMEASURED]) == "targets: 1 met, 2 missed"


def test_print_targets_ends_with_the_summary() -> None:
    text = io.StringIO()
    print_targets([MET, MISSED, UNMEASURED, CAPPED], Console(file=text, width=100))
    lines = text.getvalue().splitlines()
    assert lines[-1] == "targets: 2 met, 2 missed"
    row = next(line for line in lines if "geometric" in line)
    assert [cell.strip() for cell in row.strip("│").split("│")] == [
        "geometric mean",
        ">= 1.5",
        "1.62",
        "2",
        "met",
    ]
    assert any("<= 0.45" in line for line in lines)
    assert any("not measured" in line for line in lines)


@pytest.mark.parametrize(
    ("targets", "is_strict", "status"),
    [([MET, MISSED], True, 1), ([MET, MISSED], False, 0), ([MET], True, 0), ([], True, 0)],
)
def test_exit_status_counts_a_miss_only_if_strict(
    targets: list[Target], is_strict: bool, status: int
) -> None:
    assert exit_status(targets, is_strict=is_strict) == status
