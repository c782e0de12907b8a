"""One JSON line per step, on disk as soon as the step is done."""

import json
import os
from collections.abc import Sequence
from dataclasses import asdict, dataclass, fields
from pathlib import Path

from pydantic import TypeAdapter, ValidationError

from piper_kernels.errors import DataError, instruction, require

_REMEDY = "Restore the file, or start anew with --overwrite."


@dataclass(frozen=True, kw_only=True, slots=True)
class StepRecord:
    """What one optimizer step did.

    Attributes:
        step: 1 for the first.
        loss: cross-entropy of the batch before the step, nats per byte of text.
        balance_loss: the load-balancing loss before its weight (top_k when balanced), a mean over
            layers and microbatches; ``None`` if the model balances without a loss.
        learning_rate: of this step.
        grad_norm: L2 norm of all gradients before clipping.
        tokens: tokens trained on since the first step, this one included.
        step_s: seconds that the step took, without evaluation and checkpoint.
        expert_counts: ``[num_layers][E]`` rows routed to each expert in this step.
        held_out_loss: nats per byte on the held-out text after this step, if it was evaluated.
    """

    step: int
    loss: float
    balance_loss: float | None
    learning_rate: float
    grad_norm: float
    tokens: int
    step_s: float
    expert_counts: list[list[int]]
    held_out_loss: float | None = None

    @property
    def imbalance(self) -> list[float]:
        """Per layer, rows of the busiest expert over the mean; 1.0 is perfect balance.

        Example:
            >>> record = StepRecord(step=1, loss=1.0, balance_loss=None, learning_rate=0.1,
            ...     grad_norm=1.0, tokens=8, step_s=0.1, expert_counts=[[6, 2], [4, 4]])
            >>> record.imbalance
            [1.5, 1.0]
        """
        return [
            max(row) * len(row) / total if (total := sum(row)) else 1.0
            for row in self.expert_counts
        ]


_RECORD = TypeAdapter(StepRecord)


class MetricsFile:
    """``metrics.jsonl``: appended line by line; a resumed run first drops what it will redo.

    Args:
        path: the file; made if it is missing.
        last_step: keep the records up to this step and drop the rest, half-written lines included.

    Raises:
        DataError: if a kept line is not a record, or step ``last_step`` is missing.
    """

    def __init__(self, path: Path, last_step: int) -> None:
        path.touch()
        kept = [record for record in read_metrics(path) if record.step <= last_step]
        steps = [record.step for record in kept]
        requirement = f"hold the steps 1 to {last_step}"
        value = f"{len(steps)} of them"
        is_whole = steps == list(range(1, last_step + 1))
        require(is_whole, "MetricsFile", str(path), requirement, value, _REMEDY, error=DataError)
        lines = path.read_bytes().splitlines(keepends=True)
        os.truncate(path, sum(map(len, lines[: len(kept)])))
        self._stream = path.open("a", encoding="utf-8")

    def append(self, record: StepRecord) -> None:
        """Write one line and hand it to the operating system: a kill -9 does not lose it."""
        self._stream.write(json.dumps(asdict(record)) + "\n")
        self._stream.flush()

    def sync(self) -> None:
        """Wait until all lines are on the disk: a power cut does not lose them."""
        os.fsync(self._stream.fileno())

    def close(self) -> None:
        """Close the file."""
        self._stream.close()


def read_metrics(path: Path) -> list[StepRecord]:
    """Read all records; an unfinished last line, of a step in progress, is left out.

    Raises:
        DataError: naming a line that is not a record.
    """
    lines = path.read_bytes().splitlines(keepends=True)
    return [_parse(path, line) for line in lines if line.endswith(b"\n")]


def smoothed(values: Sequence[float], window: int) -> list[float]:
    """Mean of the last ``window`` values (fewer at the start) at each place.

    Example:
        >>> smoothed([1.0, 3.0, 5.0], 2)
        [1.0, 2.0, 4.0]
    """
    means = []
    for end in range(1, len(values) + 1):
        recent = values[max(0, end - window) : end]
        means.append(sum(recent) / len(recent))
    return means


def _parse(path: Path, line: bytes) -> StepRecord:
    try:
        record = json.loads(line)
        unknown = sorted(record.keys() - {field.name for field in fields(StepRecord)})
        if not unknown:
            return _RECORD.validate_json(line, strict=True)
        reason = f"unknown: {unknown[0]}"
    except ValidationError as error:
        first = error.errors(include_url=False)[0]
        reason = f"{'.'.join(map(str, first['loc']))}: {first['msg']}"
    except (ValueError, AttributeError, RecursionError) as error:
        reason = str(error)
    value = f"{line[:80]!r} ({reason})"
    requirement = "hold one record per line"
    raise DataError(instruction("read_metrics", str(path), requirement, value, _REMEDY))
