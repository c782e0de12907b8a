"""Compile every kernel for GPUs that need not be here, and show what the compiler made of it.

Registers, stack and spills of a thread, shared memory and matrix instructions of a program, how
many programs a multiprocessor can hold, and loads of 16 bytes. The compiler is the only witness:
nothing is run. `--check` compares with the budgets in the repository.

Examples:
  piper inspect --target sm_90 --op gate_up
  piper inspect --matrix full --check --json inspect.json
"""

import argparse
import datetime
import importlib.metadata
import os
import platform
import re
import sys
from collections.abc import Sequence
from pathlib import Path

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

from piper_kernels.errors import BackendError, ConfigError, did_you_mean, instruction
from piper_kernels.triton.offline.budgets import find_faults, load_budgets
from piper_kernels.triton.offline.cases import (
    DTYPES,
    GEMMS,
    OPS,
    PLAIN,
    TARGETS,
    Dtype,
    Matrix,
    find_cases,
)
from piper_kernels.triton.offline.pool import Outcome, compile_cases
from piper_kernels.triton.offline.report import Row, as_json, as_markdown, print_tables

MATRICES: tuple[Matrix, ...] = ("ci", "default", "full")
MOST_COLUMNS = 100
BEGIN, END = "<!-- piper inspect -->", "<!-- end of piper inspect -->"


def configure(parser: argparse.ArgumentParser) -> None:
    """Add the command's arguments."""
    parser.add_argument(
        "--target", action="append", metavar="NAME", help=f"repeatable: {', '.join(TARGETS)}"
    )
    parser.add_argument("--op", action="append", metavar="NAME", help="repeatable: e.g. gate_up")
    parser.add_argument(
        "--dtype", action="append", metavar="NAME", help=f"repeatable: {', '.join(DTYPES)}"
    )
    parser.add_argument(
        "--matrix",
        choices=MATRICES,
        default="default",
        help="ci: plain bf16; default: default tiles, every variant; full: every shipped tile too",
    )
    parser.add_argument("--check", action="store_true", help="exit 1 if a budget is exceeded")
    parser.add_argument(
        "--quiet", action="store_true", help="show only what exceeds its budget, and the last line"
    )
    parser.add_argument("--json", type=Path, metavar="FILE", help="write every row there")
    parser.add_argument(
        "--markdown",
        type=Path,
        metavar="FILE",
        help=f"put the table between `{BEGIN}` and `{END}` of a file",
    )
    parser.add_argument(
        "--jobs", type=int, metavar="N", help="processes (default: one for each processor)"
    )


def _chosen(option: str, names: Sequence[str] | None, known: Sequence[str]) -> list[str]:
    """The names that were asked for, in the order of ``known``; all if none was."""
    for name in names or ():
        if name not in known:
            hint = did_you_mean(name, known)
            requirement = f"be one of {', '.join(known)}"
            raise ConfigError(instruction("inspect", option, requirement, repr(name), hint))
    return [name for name in known if names is None or name in names]


def _triton_version() -> str:
    try:
        return importlib.metadata.version("triton")
    except importlib.metadata.PackageNotFoundError:
        raise BackendError(
            "inspect: Triton's compiler is not installed. Install it: pip install 'triton>=3.6'"
        ) from None


def cache_folder() -> Path:
    """Where compiled kernels are kept: apart from Triton's own cache."""
    root = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    return Path(root) / "piper" / "inspect"


def _write_markdown(path: Path, rows: Sequence[Row], triton_version: str) -> None:
    """Replace what stands between the two marks by the plain GEMMs and whatever missed."""
    text = path.read_text()
    if text.count(BEGIN) != 1 or text.count(END) != 1 or text.index(BEGIN) > text.index(END):
        requirement = f"hold the lines {BEGIN} and {END} once each, in this order"
        raise ConfigError(instruction("inspect", "--markdown", requirement, str(path)))
    words = re.sub(r" --markdown \S+", "", " ".join(sys.argv[1:]))
    date = datetime.datetime.now(datetime.UTC).date().isoformat()
    origin = f"`piper {words}` on {date}: triton {triton_version}, {platform.machine()}."
    shown = [
        row
        for row in rows
        if row.faults or (row.outcome.case.op in GEMMS and row.outcome.case.variant == PLAIN)
    ]
    before, after = text.split(BEGIN)[0], text.split(END)[1]
    path.write_text(f"{before}{BEGIN}\n{origin}\n\n{as_markdown(shown)}\n{END}{after}")


def _compile(arguments: argparse.Namespace) -> list[Outcome]:
    dtypes: list[Dtype] = [
        name for name in DTYPES if name in _chosen("--dtype", arguments.dtype, DTYPES)
    ]
    cases = find_cases(
        arguments.matrix,
        targets=_chosen("--target", arguments.target, TARGETS),
        ops=_chosen("--op", arguments.op, OPS),
        dtypes=dtypes,
    )
    if not cases:
        raise ConfigError(
            f"inspect: nothing to compile: --matrix {arguments.matrix} has no such combination. "
            "Routing ops have dtype int, all others a float dtype; ci has bf16 and int only."
        )
    columns = TextColumn("compiling"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn()
    with Progress(*columns, console=Console(stderr=True), transient=True) as progress:
        task = progress.add_task("", total=len(cases))
        return compile_cases(
            cases,
            jobs=arguments.jobs or os.cpu_count() or 1,
            cache_folder=cache_folder(),
            on_outcome=lambda outcome: progress.advance(task),
        )


def _judge(outcome: Outcome) -> Row:
    if outcome.resources is None:
        return Row(outcome=outcome, faults=(f"does not compile: {outcome.error}",))
    faults = find_faults(outcome.case, outcome.resources, load_budgets())
    return Row(outcome=outcome, faults=tuple(faults))


def run(arguments: argparse.Namespace) -> int:
    """Compile, show, compare. Exit status 1 if ``--check`` found something."""
    if arguments.jobs is not None and arguments.jobs < 1:
        raise ConfigError(instruction("inspect", "--jobs", "be >= 1", str(arguments.jobs)))
    triton_version = _triton_version()
    rows = [_judge(outcome) for outcome in _compile(arguments)]
    missed = [row for row in rows if row.faults]
    console = Console()
    console.width = min(console.width, MOST_COLUMNS) if console.is_terminal else MOST_COLUMNS
    print_tables(missed if arguments.quiet else rows, console)
    if arguments.json:
        arguments.json.write_text(as_json(rows, triton_version=triton_version))
    if arguments.markdown:
        _write_markdown(arguments.markdown, rows, triton_version)
    console.print(f"triton {triton_version}", highlight=False)
    console.print(f"targets: {len(rows) - len(missed)} met, {len(missed)} missed", highlight=False)
    return 1 if arguments.check and missed else 0
