"""Targets of a bench: what was asked for, what was measured, what the machine allows at most."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from rich.console import Console
from rich.table import Table


@dataclass(frozen=True, slots=True)
class Target:
    """One line of the target table.

    Attributes:
        name: what is held to the threshold.
        threshold: what was asked for.
        measured: what this run gave; ``None`` if it measured nothing of the kind, which is a miss.
        limit: what the machine or the arithmetic allows at most; ``None`` if unknown.
        sense: whether more or less is better.
    """

    name: str
    threshold: float
    measured: float | None
    limit: float | None = None
    sense: Literal["at_least", "at_most"] = "at_least"

    @property
    def is_met(self) -> bool:
        """Whether it was measured and reaches the threshold (a NaN reaches nothing)."""
        if self.measured is None:
            return False
        if self.sense == "at_least":
            return self.measured >= self.threshold
        return self.measured <= self.threshold


def summary_line(targets: Sequence[Target]) -> str:
    """The last line of a bench.

    Example:
        >>> summary_line([Target("a", 1.0, 2.0), Target("b", 1.0, None)])
        'targets: 1 met, 1 missed'
    """
    num_met = sum(target.is_met for target in targets)
    return f"targets: {num_met} met, {len(targets) - num_met} missed"


def _number(value: float | None, missing: str) -> str:
    return missing if value is None else f"{value:.3g}"


def print_targets(targets: Sequence[Target], console: Console, *, found: str = "measured") -> None:
    """Print the table and, last, the line that counts; ``found`` heads the column of values."""
    table = Table(title="targets", title_justify="left")
    table.add_column("what")
    for name in ("target", found, "limit"):
        table.add_column(name, justify="right")
    table.add_column("")
    for target in targets:
        sign = ">=" if target.sense == "at_least" else "<="
        table.add_row(
            target.name,
            f"{sign} {target.threshold:.3g}",
            _number(target.measured, f"not {found}"),
            _number(target.limit, "-"),
            "met" if target.is_met else "missed",
        )
    console.print(table)
    console.print(summary_line(targets), highlight=False)


def exit_status(targets: Sequence[Target], *, is_strict: bool) -> int:
    """1 if a miss counts and there is one, else 0."""
    return int(is_strict and not all(target.is_met for target in targets))
