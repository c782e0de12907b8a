"""One JSON line per step and rank: what this rank did, beside rank 0's ``metrics.jsonl``."""

import json
import os
from dataclasses import asdict, dataclass
from pathlib import Path


@dataclass(frozen=True, kw_only=True, slots=True)
class RankRecord:
    """A step as one rank saw it.

    Attributes:
        step: 1 for the first.
        rank: which.
        stages: that it runs.
        step_s: seconds from the batch to the updated weights.
        peak_bytes: most memory so far: of the CUDA allocator, or of the whole process on a CPU.
    """

    step: int
    rank: int
    stages: tuple[int, ...]
    step_s: float
    peak_bytes: int


class RankMetricsFile:
    """Appended line by line; a resumed run first drops what it will redo.

    Args:
        path: the file; it and its folder are made if they are missing.
        last_step: later steps, and half-written lines, are dropped.

    Example:
        ``RankMetricsFile(out / "ranks" / "rank-00003.jsonl", last_step=0).append(record)``
    """

    def __init__(self, path: Path, last_step: int) -> None:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.touch()
        kept = [
            line
            for line in path.read_bytes().splitlines(keepends=True)
            if _is_kept(line, last_step)
        ]
        os.truncate(path, 0)
        self._stream = path.open("a", encoding="utf-8")
        self._stream.write(b"".join(kept).decode("utf-8"))
        self._stream.flush()

    def append(self, record: RankRecord) -> None:
        """Write one line and hand it to the operating system."""
        self._stream.write(json.dumps(asdict(record)) + "\n")
        self._stream.flush()

    def close(self) -> None:
        """Close the file."""
        self._stream.close()


def _is_kept(line: bytes, last_step: int) -> bool:
    try:
        return line.endswith(b"\n") and int(json.loads(line)["step"]) <= last_step
    except (ValueError, KeyError, TypeError):
        return False
