"""A measured number and everything needed to believe it, one JSON object a line."""

import json
import os
import platform
import subprocess
from collections.abc import Iterable
from dataclasses import asdict, dataclass
from datetime import UTC, datetime
from pathlib import Path

from piper_kernels.errors import DataError, instruction

ROOT = Path(__file__).resolve().parents[1]


@dataclass(frozen=True, kw_only=True, slots=True)
class Environment:
    """Where and with what a run was made.

    Attributes:
        commit: short hash, with ``-dirty`` if tracked files differ from it.
        machine: processor and number of cores.
        num_threads: threads that one op may use.
        load: the system's load average over the last minute when the run began. Beyond the number
            of cores less the threads of this run, others were busy and the numbers are noisy.
        torch: its version.
        transformers: its version.
        date: UTC, ISO 8601.
    """

    commit: str
    machine: str
    num_threads: int
    load: float
    torch: str
    transformers: str
    date: str

    @property
    def is_noisy(self) -> bool:
        """Whether others were likely to take cores from this run."""
        return self.load + self.num_threads > (os.cpu_count() or 1) + 0.5


@dataclass(frozen=True, kw_only=True, slots=True)
class Record:
    """One variant of one case.

    Attributes:
        op: ``experts`` or ``block``.
        mode: ``forward`` or ``forward_backward``.
        shape: name in ``bench/shapes.py``.
        T, H, I, E, K: sizes.
        dtype: of x and the weights.
        routing: kind of routing.
        variant: who did it.
        num_rounds: how many timed runs the figures rest on.
        time_us, p20_us, p80_us: median and quantiles of one run.
        gflops: the case's FLOPs over the median time, in 1e9 per second.
        gb_per_s: its compulsory bytes over the median time, in 1e9 per second.
        roof_gflops: what a dense GEMM reached in the same rounds, in 1e9 per second.
        roof_fraction: gflops over that.
        read_gb_per_s: how fast the weights could be read in the same rounds; ``None`` if that was
            not measured.
        read_fraction: gb_per_s over that.
        baseline: the variant that ``speedup`` compares with.
        speedup, speedup_low, speedup_high: median of the baseline's time over this one's, paired
            by round, and its 95 % interval.
        commit, machine, num_threads, load, torch, transformers, date: the environment.
        kind: ``measured``; a modelled number would say so.
    """

    op: str
    mode: str
    shape: str
    T: int
    H: int
    I: int
    E: int
    K: int
    dtype: str
    routing: str
    variant: str
    num_rounds: int
    time_us: float
    p20_us: float
    p80_us: float
    gflops: float
    gb_per_s: float
    roof_gflops: float
    roof_fraction: float
    read_gb_per_s: float | None
    read_fraction: float | None
    baseline: str
    speedup: float
    speedup_low: float
    speedup_high: float
    commit: str
    machine: str
    num_threads: int
    load: float
    torch: str
    transformers: str
    date: str
    kind: str = "measured"


def _git(*arguments: str) -> str:
    try:
        done = subprocess.run(
            ["git", *arguments], cwd=ROOT, capture_output=True, text=True, check=False
        )
    except FileNotFoundError:
        return ""
    return done.stdout.strip() if done.returncode == 0 else ""


def _processor() -> str:
    """The processor's name as the system gives it."""
    path = Path("/proc/cpuinfo")
    lines = path.read_text().splitlines() if path.exists() else []
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else platform.processor() or platform.machine()


def current_commit() -> str:
    """Short hash of this checkout, ``-dirty`` if tracked files differ, ``unknown`` without git."""
    commit = _git("rev-parse", "--short", "HEAD") or "unknown"
    is_dirty = bool(_git("status", "--porcelain", "--untracked-files=no"))
    return f"{commit}-dirty" if is_dirty else commit


def describe_environment() -> Environment:
    """Look at this process and machine."""
    import torch
    import transformers

    return Environment(
        commit=current_commit(),
        machine=f"{_processor()}, {os.cpu_count()} cores",
        num_threads=torch.get_num_threads(),
        load=round(os.getloadavg()[0], 2),
        torch=torch.__version__,
        transformers=transformers.__version__,
        date=datetime.now(UTC).isoformat(timespec="seconds"),
    )


def check_writable(path: Path) -> None:
    """Create the folder of a JSONL file, and the file if it is missing.

    Raises:
        DataError: naming what the system says.
    """
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.open("a").close()
    except OSError as error:
        value = f"{path} ({error.strerror or error})"
        remedy = "Choose another --out."
        raise DataError(
            instruction("check_writable", "out", "be writable", value, remedy)
        ) from None


def write_records(path: Path, records: Iterable[Record]) -> None:
    """Append records to a JSONL file, creating its folder."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("a", encoding="utf-8") as file:
        for record in records:
            file.write(json.dumps(asdict(record)) + "\n")


def read_records(path: Path) -> list[Record]:
    """Read a JSONL file back.

    Raises:
        DataError: naming the line that is no record.
    """
    records = []
    for number, line in enumerate(path.read_text(encoding="utf-8").splitlines(), start=1):
        try:
            records.append(Record(**json.loads(line)))
        except (json.JSONDecodeError, TypeError) as error:
            raise DataError(f"read_records: {path}, line {number}, is no record: {error}") from None
    return records
