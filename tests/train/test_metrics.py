import json
from dataclasses import asdict, replace
from pathlib import Path

import pytest

from piper_kernels.errors import DataError
from piper_kernels.train.metrics import MetricsFile, StepRecord, read_metrics, smoothed

RECORD = StepRecord(
    step=1,
    loss=0.1 + 0.2,
    balance_loss=None,
    learning_rate=1e-3,
    grad_norm=1.0,
    tokens=64,
    step_s=0.25,
    expert_counts=[[6, 2], [4, 4]],
)


def write(path: Path, num_steps: int) -> list[StepRecord]:
    records = [replace(RECORD, step=step) for step in range(1, num_steps + 1)]
    metrics = MetricsFile(path, last_step=0)
    for record in records:
        metrics.append(record)
    metrics.sync()
    metrics.close()
    return records


def test_metrics_file_writes_one_json_object_per_step(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    records = write(path, 3)
    lines = path.read_text().splitlines()
    assert len(lines) == 3
    assert json.loads(lines[0]) == {
        "step": 1,
        "loss": 0.30000000000000004,
        "balance_loss": None,
        "learning_rate": 0.001,
        "grad_norm": 1.0,
        "tokens": 64,
        "step_s": 0.25,
        "expert_counts": [[6, 2], [4, 4]],
        "held_out_loss": None,
    }
    assert read_metrics(path) == records


def test_metrics_file_is_on_disk_before_it_is_closed(tmp_path: Path) -> None:
    metrics = MetricsFile(tmp_path / "metrics.jsonl", last_step=0)
    metrics.append(RECORD)
    assert read_metrics(tmp_path / "metrics.jsonl") == [RECORD]
    metrics.close()


def test_metrics_file_drops_what_a_resumed_run_will_redo(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    records = write(path, 5)
    with path.open("a") as stream:
        stream.write('{"step": 6, "lo')
    assert read_metrics(path) == records
    metrics = MetricsFile(path, last_step=3)
    metrics.append(replace(RECORD, step=4, loss=9.0))
    metrics.close()
    assert read_metrics(path) == [*records[:3], replace(RECORD, step=4, loss=9.0)]


def test_metrics_file_refuses_a_history_with_holes(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    write(path, 3)
    message = r"metrics.jsonl must hold the steps 1 to 5, got 3 of them. Restore the file, or start"
    with pytest.raises(DataError, match=message):
        MetricsFile(path, last_step=5)
    assert len(read_metrics(path)) == 3


BAD_LINES = [
    "{}",
    "nonsense",
    "3",
    "[" * 200_000,
    json.dumps(asdict(RECORD) | {"los": 2}),
    json.dumps(asdict(RECORD) | {"step": "1"}),
    json.dumps(asdict(RECORD) | {"loss": None}),
    json.dumps(asdict(RECORD) | {"expert_counts": [[1, "2"]]}),
]


@pytest.mark.parametrize("line", BAD_LINES, ids=range(len(BAD_LINES)))
def test_read_metrics_names_a_bad_line(tmp_path: Path, line: str) -> None:
    path = tmp_path / "metrics.jsonl"
    path.write_text(line + "\n")
    with pytest.raises(DataError, match=r"metrics.jsonl must hold one record per line, got b'"):
        read_metrics(path)


def test_imbalance_is_one_for_layers_without_tokens() -> None:
    assert replace(RECORD, expert_counts=[[0, 0], [3, 1], [8, 0]]).imbalance == [1.0, 1.5, 2.0]


def test_smoothed_averages_the_last_values() -> None:
    assert smoothed([3.0, 5.0, 1.0, 0.0], 3) == [3.0, 4.0, 3.0, 2.0]
    assert smoothed([3.0, 5.0], 1) == [3.0, 5.0]
