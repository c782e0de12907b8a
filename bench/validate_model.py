"""Holds the planner's model to what was measured and published: ``make validate-model``.

Prints every comparison, then a table of targets; the last line counts them.

    python -m bench.validate_model [--strict]
"""

import argparse
import sys

from rich.console import Console
from rich.table import Table

from bench.targets import exit_status, print_targets
from bench.validate_memory import Row, memory_rows, memory_targets
from bench.validate_time import print_time_rows, time_rows, time_targets


def print_rows(rows: list[Row], console: Console) -> None:
    """One table a group: predicted, measured or published, error."""
    for group in dict.fromkeys(row.group for row in rows):
        table = Table(title=group, title_justify="left")
        table.add_column("what")
        for name in ("predicted", "measured", "error"):
            table.add_column(name, justify="right")
        for row in rows:
            if row.group == group:
                numbers = (f"{row.predicted:,.0f}", f"{row.measured:,.0f}", f"{row.error:+.2%}")
                table.add_row(row.name, *numbers)
        console.print(table)


def main(arguments: list[str] | None = None) -> int:
    """Run all comparisons; with ``--strict`` a miss makes the exit status 1."""
    parser = argparse.ArgumentParser(prog="bench.validate_model", description=__doc__)
    parser.add_argument("--strict", action="store_true", help="fail if a target is missed")
    options = parser.parse_args(arguments)
    console = Console(width=100)
    rows = memory_rows()
    print_rows(rows, console)
    times = time_rows()
    print_time_rows(times, console)
    targets = [*memory_targets(rows), *time_targets(times)]
    print_targets(targets, console)
    return exit_status(targets, is_strict=options.strict)


if __name__ == "__main__":
    sys.exit(main())
