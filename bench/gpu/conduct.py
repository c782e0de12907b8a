"""Run the parts one after another, each in a process of its own, and keep what they find."""

import json
import os
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from bench.gpu.budget import TimeBudget, part_limit_s
from bench.gpu.part_log import write_json
from bench.record import ROOT

Say = Callable[[str], None]
# what a process needs to begin, and what it gets to end by itself before it is stopped
START_S = 5.0
GRACE_S = 5.0


@dataclass(frozen=True, slots=True)
class Part:
    """One part: a module of ``bench.gpu`` with ``run(log, device)``.

    Attributes:
        name: of the module.
        title: as it is printed.
        share: of the whole time that it may take at most.
    """

    name: str
    title: str
    share: float


PARTS = (
    Part("environment", "device and versions", 0.1),
    Part("compiling", "kernels compiled in parallel", 0.2),
    Part("roofs", "roofs of this machine", 0.08),
    Part("checks", "every op against the oracle", 0.25),
    Part("sweep", "layers against their rivals", 0.35),
    Part("models", "the eight models of the paper", 0.3),
)


@dataclass(frozen=True, kw_only=True, slots=True)
class Conductor:
    """What all parts share.

    Attributes:
        out: folder of the results.
        seconds: of all parts together.
        is_dry: on the CPU, tiny shapes.
        say: prints a line.
    """

    out: Path
    seconds: float
    is_dry: bool
    say: Say = print

    def run(self, parts: Sequence[Part], write: Callable[[dict[str, Any]], None]) -> dict[str, Any]:
        """Run the parts within the seconds; ``write`` is called with the results after each.

        Returns:
            The results: ``{"parts": {name: {status, seconds, detail, rows}}, ...}``.
        """
        budget = TimeBudget(self.seconds)
        results: dict[str, Any] = {"seconds": self.seconds, "is_dry_run": self.is_dry, "parts": {}}
        for part in parts:
            limit_s = part_limit_s(budget.left_s, part.share, self.seconds, START_S)
            self.say(f"{part.title}: {budget.left_s:.0f} s left, {limit_s:.0f} s for this part")
            if limit_s:
                found = self.run_part(part, limit_s)
            else:
                found = {"status": "not started", "seconds": 0.0, "detail": "no time", "rows": []}
            results["parts"][part.name] = found
            write(results)
            if part.name == "environment" and found["status"] != "ok":
                break
        self.say(f"{budget.left_s:.0f} s left")
        return results

    def run_part(self, part: Part, limit_s: float) -> dict[str, Any]:
        """One process; what it had found when it ended, or was ended, is its result."""
        rows_path = self.out / f"part_{part.name}.json"
        rows_path.unlink(missing_ok=True)
        command = [sys.executable, "-m", "bench.gpu", "--part", part.name]
        command += ["--rows", str(rows_path.resolve()), "--seconds", str(max(1.0, limit_s - 2.0))]
        environment = {**os.environ, "PYTHONUNBUFFERED": "1"}
        if self.is_dry:
            command.append("--dry-run")
            environment["TRITON_INTERPRET"] = "1"
        else:
            environment.pop("TRITON_INTERPRET", None)
        begin = time.monotonic()
        status, detail = "ok", ""
        try:
            done = subprocess.run(
                command, cwd=ROOT, env=environment, timeout=limit_s + GRACE_S, check=False
            )
            if done.returncode != 0:
                status, detail = "failed", f"its process ended with {done.returncode}"
        except subprocess.TimeoutExpired:
            status, detail = "stopped", f"it ran past its {limit_s:.0f} s"
        rows = json.loads(rows_path.read_text()) if rows_path.exists() else []
        rows_path.unlink(missing_ok=True)
        seconds = round(time.monotonic() - begin, 1)
        return {"status": status, "seconds": seconds, "detail": detail, "rows": rows}


def save_results(path: Path, results: dict[str, Any]) -> None:
    """Write the results as JSON."""
    write_json(path, results)
