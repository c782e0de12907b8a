"""A resumed run drops what it will redo, and what a kill left half-written."""

import json
from dataclasses import asdict
from pathlib import Path

from piper_kernels.train.rank_metrics import RankMetricsFile, RankRecord


def record(step: int) -> RankRecord:
    return RankRecord(step=step, rank=1, stages=(1, 2), step_s=0.5, peak_bytes=7)


def test_lines_survive_up_to_the_last_step(tmp_path: Path) -> None:
    path = tmp_path / "ranks" / "rank-00001.jsonl"
    file = RankMetricsFile(path, last_step=0)
    for step in (1, 2, 3):
        file.append(record(step))
    file.close()
    whole = path.read_text()
    path.write_text(whole + '{"step": 4, "ra')
    file = RankMetricsFile(path, last_step=2)
    file.append(record(3))
    file.close()
    assert path.read_text() == whole
    assert json.loads(whole.splitlines()[0]) == asdict(record(1)) | {"stages": [1, 2]}
