"""Rows are on disk as they are found, and an item that raises is a row."""

import json
from pathlib import Path

from bench.gpu.budget import TimeBudget
from bench.gpu.part_log import NotMeasured, PartLog


def raise_error(error: Exception) -> None:
    raise error


def test_part_log_keeps_every_kind_of_end(tmp_path: Path) -> None:
    said: list[str] = []
    path = tmp_path / "rows.json"
    log = PartLog(path, TimeBudget(60.0), said.append)
    assert log.attempt("good", lambda: {"value": 3})
    assert json.loads(path.read_text())[0]["value"] == 3
    assert not log.attempt("bad", lambda: raise_error(ValueError("no such thing")))
    assert not log.attempt("absent", lambda: raise_error(NotMeasured("nobody has one")))
    rows = json.loads(path.read_text())
    assert [row["status"] for row in rows] == ["ok", "failed", "not measured"]
    assert "ValueError at test_part_log.py" in rows[1]["detail"]
    assert "no such thing" in said[1]
    assert rows[2]["detail"] == "nobody has one"


def test_part_log_starts_nothing_without_time(tmp_path: Path) -> None:
    log = PartLog(tmp_path / "rows.json", TimeBudget(5.0), lambda line: None)
    assert not log.attempt("long", lambda: raise_error(AssertionError("ran")), fewest_s=6.0)
    assert log.rows[0]["status"] == "not started"
