"""What a checkpoint says about itself, and whether its files are what it says."""

import hashlib
import os
from pathlib import Path
from typing import Any, Literal

from piper_kernels.errors import CheckpointError, ConfigError, instruction, require
from piper_kernels.strict_model import NonNegativeInt, StrictModel

MANIFEST = "checkpoint.json"
_NAME = "load_checkpoint"


class FileRecord(StrictModel):
    """Length and hash of one file."""

    num_bytes: int
    sha256: str


class Manifest(StrictModel):
    """The file ``checkpoint.json``: all that is not a tensor.

    Attributes:
        format: says what kind of folder this is.
        version: of the format.
        step: optimizer steps done; with the settings it fixes the schedule and the data's position.
        settings: of the run, as JSON values.
        text_sha256: hash of the whole text.
        model_digest: hash of configuration, names and shapes.
        versions: of the packages that wrote it.
        files: every other file of the folder.
    """

    format: Literal["piper-train-checkpoint"] = "piper-train-checkpoint"
    version: Literal[1] = 1
    step: NonNegativeInt
    settings: dict[str, Any]
    text_sha256: str
    model_digest: str
    versions: dict[str, str]
    files: dict[str, FileRecord]


def checkpoint_name(step: int) -> str:
    """The folder of the checkpoint after ``step`` steps; in order of steps when sorted."""
    return f"step-{step:08d}"


def read_manifest(checkpoint: Path, remedy: str) -> Manifest:
    """Read ``checkpoint.json``; ``remedy`` ends an error.

    Raises:
        CheckpointError: if the folder is no checkpoint of piper train, or the file is damaged.
    """
    path = checkpoint / MANIFEST
    requirement = "be a checkpoint of piper train"
    try:
        manifest = Manifest.from_json(path.read_text(encoding="utf-8"), source=MANIFEST)
        if checkpoint.name == checkpoint_name(manifest.step):
            return manifest
        value = f"{checkpoint}, whose {MANIFEST} is of step {manifest.step}"
    except OSError as error:
        value = f"{checkpoint} without a readable {MANIFEST} ({error.strerror})"
    except (UnicodeDecodeError, ConfigError) as error:
        value = f"{checkpoint} ({str(error).splitlines()[0]})"
    raise CheckpointError(instruction(_NAME, "checkpoint", requirement, value, remedy))


def describe_files(folder: Path) -> dict[str, FileRecord]:
    """Length and hash of every file in the folder, after it has safely reached the disk."""
    records = {}
    for path in sorted(folder.iterdir()):
        sync_path(path)
        records[path.name] = FileRecord(num_bytes=path.stat().st_size, sha256=_sha256(path))
    return records


def check_files(checkpoint: Path, manifest: Manifest, remedy: str) -> None:
    """Raise ``CheckpointError`` unless the folder holds exactly the files that were written."""
    present = {path.name for path in checkpoint.iterdir()} - {MANIFEST}
    missing = sorted(manifest.files.keys() - present)
    foreign = sorted(present - manifest.files.keys())
    where = str(checkpoint)
    problem = f"no {missing[0]}" if missing else f"also {foreign[0]}" if foreign else ""
    requirement = "hold the files it was written with"
    require(not problem, _NAME, where, requirement, problem, remedy, error=CheckpointError)
    for name, record in manifest.files.items():
        path = checkpoint / name
        size = path.stat().st_size
        requirement = f"have {record.num_bytes} bytes"
        is_whole = size == record.num_bytes
        require(is_whole, _NAME, str(path), requirement, size, remedy, error=CheckpointError)
        requirement = f"have the sha256 {record.sha256[:12]}..."
        digest = _sha256(path)
        is_same = digest == record.sha256
        value = f"{digest[:12]}..., so it was damaged"
        require(is_same, _NAME, str(path), requirement, value, remedy, error=CheckpointError)


def sync_path(path: Path) -> None:
    """Wait until a file, or the entries of a folder, are on the disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _sha256(path: Path) -> str:
    with path.open("rb") as stream:
        return hashlib.file_digest(stream, "sha256").hexdigest()
