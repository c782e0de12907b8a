"""What a part finds, written to disk as it is found."""

import json
import os
import time
import traceback
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from bench.gpu.budget import TimeBudget

Row = dict[str, Any]


@dataclass(slots=True)
class PartLog:
    """Rows of one part.

    Attributes:
        path: of its JSON file, rewritten as a whole after each row.
        budget: of the part; nothing new starts once it is spent.
        say: prints a line of progress.
        rows: found so far.
    """

    path: Path
    budget: TimeBudget
    say: Callable[[str], None] = print
    rows: list[Row] = field(default_factory=list)

    def add(self, **row: Any) -> None:
        """Keep a row, on disk at once."""
        self.rows.append(row)
        write_json(self.path, self.rows)

    def attempt(self, name: str, run: Callable[[], Row | None], *, fewest_s: float = 1.0) -> bool:
        """Run one item; what it raises is a row, not the end.

        Args:
            name: of the item.
            run: does it and returns more cells of its row.
            fewest_s: with fewer seconds left it is not started.

        Returns:
            Whether it was started and did not raise.
        """
        if not self.budget.has(fewest_s):
            self.add(
                item=name, status="not started", detail=f"{self.budget.left_s:.0f} s were left"
            )
            return False
        begin = time.perf_counter()
        cells: Row = {}
        status, detail = "ok", ""
        try:
            cells = run() or {}
        except NotMeasured as reason:
            status, detail = "not measured", str(reason)
        except Exception as error:
            last = traceback.extract_tb(error.__traceback__)[-1]
            where = f"{Path(last.filename).name}:{last.lineno}"
            status, detail = "failed", f"{type(error).__name__} at {where}: {error}"[:600]
        seconds = time.perf_counter() - begin
        self.add(item=name, status=status, detail=detail, seconds=round(seconds, 3), **cells)
        self.say(f"  {status}: {name} ({seconds:.1f} s, {self.budget.left_s:.0f} s left) {detail}")
        return status == "ok"


class NotMeasured(Exception):
    """Raised by an item that cannot be had here; its message says why."""


def write_json(path: Path, value: Any) -> None:
    """Write a file as a whole: a killed process leaves the old one or the new one."""
    path.parent.mkdir(parents=True, exist_ok=True)
    new = path.with_suffix(".tmp")
    new.write_text(json.dumps(value, indent=1) + "\n", encoding="utf-8")
    os.replace(new, path)
