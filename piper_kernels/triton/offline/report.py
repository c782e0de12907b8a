"""Show outcomes: a table for a terminal, JSON for machines, Markdown for the docs. Pure."""

import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from itertools import groupby
from typing import Any

from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from piper_kernels.triton.candidates import SHARED_MEMORY_BYTES
from piper_kernels.triton.offline.occupancy import resident_programs
from piper_kernels.triton.offline.pool import Outcome

HEADINGS = (
    "op",
    "variant",
    "tile",
    "regs",
    "stack",
    "spills",
    "KiB",
    "fit",
    "matrix",
    "16 B",
    "TMA",
)


@dataclass(frozen=True, kw_only=True, slots=True)
class Row:
    """An outcome and in what it exceeds its budget."""

    outcome: Outcome
    faults: tuple[str, ...]


def _cells(outcome: Outcome) -> list[str]:
    """One cell for each of ``HEADINGS``."""
    case, resources = outcome.case, outcome.resources
    head = [case.op, case.variant, case.tile_text()]
    if resources is None:
        return [*head, *["-"] * (len(HEADINGS) - len(head))]
    return [
        *head,
        str(resources.registers),
        str(resources.stack_bytes),
        str(resources.num_spills),
        f"{resources.shared_bytes / 1024:.0f}",
        str(resident_programs(resources, case.target)),
        resources.matrix_text() or "-",
        str(resources.num_wide_loads),
        str(resources.num_descriptor_loads),
    ]


def _groups(rows: Sequence[Row]) -> list[tuple[str, list[Row]]]:
    """``(title, rows)`` of each run of equal target and dtype."""

    def key(row: Row) -> tuple[str, str]:
        return row.outcome.case.target, row.outcome.case.dtype

    return [
        (f"{target}, {dtype} ({SHARED_MEMORY_BYTES[target] // 1024} KiB shared)", list(group))
        for (target, dtype), group in groupby(rows, key)
    ]


def print_tables(rows: Sequence[Row], console: Console) -> None:
    """One table for each target and dtype; what exceeds its budget is red, its faults below."""
    for title, group in _groups(rows):
        table = Table(title=title, title_justify="left", box=SIMPLE_HEAD, padding=0)
        for heading in HEADINGS:
            is_text = heading in ("op", "variant", "tile", "matrix")
            table.add_column(heading, justify="left" if is_text else "right", no_wrap=True)
        for row in group:
            table.add_row(*_cells(row.outcome), style="bold red" if row.faults else "")
        console.print(table)
        for row in group:
            case = row.outcome.case
            for fault in row.faults:
                name = f"{case.op} {case.variant} {case.tile_text()}".strip()
                console.print(f"[bold red]missed[/] {escape(f'{name}: {fault}')}", highlight=False)


def as_json(rows: Sequence[Row], *, triton_version: str) -> str:
    """The rows for machines."""
    entries: list[dict[str, Any]] = []
    for row in rows:
        resources = row.outcome.resources
        entry = asdict(row.outcome) | {"faults": list(row.faults)}
        if resources is not None:
            entry["resident_programs"] = resident_programs(resources, row.outcome.case.target)
        entries.append(entry)
    return json.dumps({"triton": triton_version, "rows": entries}, indent=1)


def as_markdown(rows: Sequence[Row]) -> str:
    """The same tables for the docs."""
    blocks = []
    for title, group in _groups(rows):
        lines = [
            f"### {title}",
            "",
            "| " + " | ".join(HEADINGS) + " |",
            "|" + "---|" * 3 + "---:|" * 5 + "---|---:|---:|",
        ]
        lines += ["| " + " | ".join(_cells(row.outcome)) + " |" for row in group]
        blocks.append("\n".join(lines))
    return "\n\n".join(blocks)
