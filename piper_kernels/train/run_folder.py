"""The folder of one run: who may write there, and what lies where."""

import fcntl
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TextIO

from piper_kernels.errors import CheckpointError, instruction, require

_NAME = "RunFolder"
_MARK, _LOCK = "settings.toml", ".lock"
# the first line of a run's settings.toml: other programs keep files of that name, too
_HEADER = "# settings of a run of piper train, which owns this folder"


@contextmanager
def explained_writing(path: Path) -> Iterator[None]:
    """Turn a failure to open or start the folder of a run into an instruction.

    Raises:
        CheckpointError: naming the file or folder, and what the system says.
    """
    try:
        yield
    except OSError as error:
        value = f"{error.filename or path} ({error.strerror or error})"
        remedy = "Free the disk or choose another --out."
        message = instruction(_NAME, "out", "be writable", value, remedy)
        raise CheckpointError(message) from error


class RunFolder:
    """Opens a run's folder for one process at a time; nothing in it is touched before ``start``.

    Args:
        path: the folder; made if it is missing.
        is_resumed: the folder must hold a run.
        may_overwrite: the folder may hold a run, which ``start`` deletes.

    Raises:
        CheckpointError: if the folder holds a run and neither is asked for, holds something else,
            or is in use by another process.
    """

    def __init__(self, path: Path, *, is_resumed: bool, may_overwrite: bool) -> None:
        self.path = path
        self.settings = path / _MARK
        self.metrics = path / "metrics.jsonl"
        self.checkpoints = path / "checkpoints"
        self.picture = path / "training.png"
        self.sample = path / "sample.txt"
        self.summary = path / "summary.json"
        self.model = path / "model"
        self._check(is_resumed, may_overwrite)
        path.mkdir(parents=True, exist_ok=True)
        self._lock = self._take_lock()

    def start(self, settings_text: str) -> None:
        """Delete the files of the run before, if any, and mark the folder as a run."""
        for part in (self.checkpoints, self.model):
            if part.is_symlink():
                # somebody keeps it on another disk: the link stays, what a run left there goes
                for entry in part.iterdir():
                    _delete(entry)
            elif part.exists():
                shutil.rmtree(part)
        for file in (self.metrics, self.picture, self.sample, self.summary):
            file.unlink(missing_ok=True)
        self.settings.write_text(f"{_HEADER}\n{settings_text}", encoding="utf-8")

    def close(self) -> None:
        """Let other processes use the folder."""
        self._lock.close()

    def _check(self, is_resumed: bool, may_overwrite: bool) -> None:
        path = self.path
        if path.exists() and not path.is_dir():
            raise CheckpointError(instruction(_NAME, "out", "be a folder", f"the file {path}"))
        holds_run = self._holds_run()
        if is_resumed:
            remedy = "Name the run's folder with --out, or start one without --resume."
            require(holds_run, _NAME, "out", "hold a run", str(path), remedy, error=CheckpointError)
            return
        is_used = path.exists() and any(entry.name != _LOCK for entry in path.iterdir())
        requirement = "be an empty or a new folder"
        if is_used and holds_run and not may_overwrite:
            remedy = "Go on with --resume, delete that run with --overwrite, or choose another."
            value = f"{path}, which holds a run"
            raise CheckpointError(instruction(_NAME, "out", requirement, value, remedy))
        if is_used and not holds_run:
            value = f"{path}, which holds something else"
            raise CheckpointError(
                instruction(_NAME, "out", requirement, value, "Choose another folder.")
            )

    def _holds_run(self) -> bool:
        """Whether the folder is marked as a run, and is not somebody else's."""
        if not self.settings.is_file():
            return False
        with self.settings.open("rb") as stream:
            return stream.readline().rstrip() == _HEADER.encode()

    def _take_lock(self) -> TextIO:
        """Hold the folder until this process ends, however it ends."""
        lock = (self.path / _LOCK).open("w")
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            lock.close()
            value = f"{self.path}, where another process is training"
            remedy = "Wait for it, or choose another folder."
            message = instruction(_NAME, "out", "be free", value, remedy)
            raise CheckpointError(message) from None
        return lock


def _delete(path: Path) -> None:
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path)
    else:
        path.unlink()
