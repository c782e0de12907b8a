"""Whole files or none, whatever the disk does."""

import os
from pathlib import Path
from typing import Any

import pytest

from piper_kernels.dist.whole_file import write_whole


def test_write_whole_replaces_the_file(tmp_path: Path) -> None:
    path = tmp_path / "box.json"
    path.write_text("older")
    seen: list[Path] = []

    def write(aside: Path) -> None:
        seen.append(aside)
        aside.write_text("newer")
        assert path.read_text() == "older"

    write_whole("probe", "--out", path, write)
    assert path.read_text() == "newer"
    assert seen[0].suffix == ".json"
    assert list(tmp_path.iterdir()) == [path]


@pytest.mark.parametrize("when", ["write", "rename"])
def test_write_whole_keeps_the_older_file(
    when: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A disk that is full early or at the last moment."""
    path = tmp_path / "box.json"
    path.write_text("older")

    def fail(*_: Any) -> None:
        raise OSError(28, "No space left on device")

    def write(aside: Path) -> None:
        aside.write_text("half")
        if when == "write":
            fail()

    if when == "rename":
        monkeypatch.setattr(os, "replace", fail)
    message = r"probe: --out must be writable, got .*box.json. No space left on device."
    with pytest.raises(ValueError, match=message):
        write_whole("probe", "--out", path, write)
    assert path.read_text() == "older"
    assert list(tmp_path.iterdir()) == [path]
