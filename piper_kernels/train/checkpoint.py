"""Checkpoints that are whole or absent, whatever happens while one is written.

A checkpoint is a folder ``step-<step>``. It is written aside, brought to the disk and renamed, so a
kill or a full disk at any moment leaves the one before. Tensors go through
``torch.distributed.checkpoint`` into safetensors files, one key per logical expert; reading them
unpickles nothing.
"""

import importlib.metadata
import logging
import re
import shutil
import warnings
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

import torch
from safetensors import SafetensorError
from torch import Tensor
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.hf_storage import (
    HuggingFaceStorageReader,
    HuggingFaceStorageWriter,
)
from torch.distributed.checkpoint.metadata import TensorStorageMetadata
from torch.distributed.checkpoint.state_dict_loader import load
from torch.distributed.checkpoint.state_dict_saver import save

from piper_kernels.errors import CheckpointError, did_you_mean, instruction, require
from piper_kernels.train.checkpoint_keys import allocate_moments, model_tensors, moment_tensors
from piper_kernels.train.loop import Trainer
from piper_kernels.train.manifest import (
    MANIFEST,
    Manifest,
    check_files,
    checkpoint_name,
    describe_files,
    read_manifest,
    sync_path,
)

logger = logging.getLogger(__name__)

WRITING, _DELETING = ".writing-", ".deleting-"
# each file is held in memory once more while it is written
_FILE_BYTES = 1 << 30


def save_checkpoint(
    folder: Path, trainer: Trainer, *, text_sha256: str, model_digest: str, keep: int
) -> Path:
    """Write the trainer's whole state, then drop all but the newest ``keep`` checkpoints.

    Args:
        folder: holds the checkpoints of one run.
        trainer: model, moments, step and settings.
        text_sha256: of the text that is trained on.
        model_digest: of the model's configuration.
        keep: how many to keep, at least 1.

    Returns:
        The folder of the new checkpoint.

    Raises:
        CheckpointError: if it cannot be written, e.g. onto a full disk; the others are untouched.
    """
    folder.mkdir(parents=True, exist_ok=True)
    remove_leftovers(folder)
    final = folder / checkpoint_name(trainer.step)
    # a run that is resumed has the checkpoint it came from
    if not final.exists():
        _write(final, trainer, text_sha256, model_digest)
    for old in list_checkpoints(folder)[:-keep]:
        remove_checkpoint(old)
    return final


def latest_checkpoint(folder: Path) -> Path:
    """The newest checkpoint of a run.

    Raises:
        CheckpointError: if there is none.
    """
    found = list_checkpoints(folder)
    remedy = "It was stopped before its first: start it anew with --overwrite."
    require(
        bool(found),
        "latest_checkpoint",
        str(folder),
        "hold a checkpoint",
        "none",
        remedy,
        error=CheckpointError,
    )
    return found[-1]


def load_checkpoint(
    checkpoint: Path, trainer: Trainer, *, text_sha256: str, model_digest: str
) -> None:
    """Bring a newly built trainer to the checkpoint's state, random generators included.

    Raises:
        CheckpointError: if files are damaged, or text, model or tensors are not this run's.
    """
    remedy = remedy_for(checkpoint)
    manifest = read_manifest(checkpoint, remedy)
    check_files(checkpoint, manifest, remedy)
    check_same("text", manifest.text_sha256, text_sha256, "Give the same --data in the same order.")
    check_same("model", manifest.model_digest, model_digest, "Give the same configuration.")
    if manifest.versions != package_versions():
        logger.warning("written by %s, read by %s", manifest.versions, package_versions())
    with explained(None, remedy), warnings.catch_warnings():
        ignore_single_process()
        reader = HuggingFaceStorageReader(str(checkpoint))
        saved = reader.read_metadata().state_dict_metadata
        allocate_moments(trainer.model, trainer.optimizer, set(saved))
        tensors = _tensors(trainer)
        check_tensors(checkpoint, saved, tensors, remedy)
        load(tensors, storage_reader=reader, no_dist=True)
        _set_generators(tensors)
    trainer.step = manifest.step


def _tensors(trainer: Trainer) -> dict[str, Tensor]:
    """Everything that a checkpoint keeps, by key; views of the live tensors where possible."""
    tensors = model_tensors(trainer.model) | moment_tensors(trainer.model, trainer.optimizer)
    tensors["rng.cpu"] = torch.get_rng_state()
    if next(trainer.model.parameters()).is_cuda:
        tensors["rng.cuda"] = torch.cuda.get_rng_state()
    return tensors


def _set_generators(tensors: dict[str, Tensor]) -> None:
    try:
        torch.set_rng_state(tensors["rng.cpu"])
        if "rng.cuda" in tensors:
            torch.cuda.set_rng_state(tensors["rng.cuda"])
    except RuntimeError as error:
        raise ValueError(f"a random generator's state that torch refuses: {error}") from None


def _snapshot(trainer: Trainer) -> dict[str, Tensor]:
    """Tensors as safetensors takes them: contiguous, and none the same memory as another."""
    return {
        key: tensor.clone() if tensor.ndim == 0 else tensor.contiguous()
        for key, tensor in _tensors(trainer).items()
    }


def _write(final: Path, trainer: Trainer, text_sha256: str, model_digest: str) -> None:
    """Write a checkpoint aside, bring it to the disk, and give it its name."""
    folder = final.parent
    aside = folder / f"{WRITING}{final.name}"
    tensors = _snapshot(trainer)
    require_space(folder, tensors)
    with explained(aside):
        write_tensors(aside, tensors)
        manifest = Manifest(
            step=trainer.step,
            settings=trainer.settings.model_dump(mode="json"),
            text_sha256=text_sha256,
            model_digest=model_digest,
            versions=package_versions(),
            files=describe_files(aside),
        )
        path = aside / MANIFEST
        path.write_text(manifest.model_dump_json(indent=1), encoding="utf-8")
        sync_path(path)
        sync_path(aside)
        aside.rename(final)
        sync_path(folder)


def write_tensors(folder: Path, tensors: dict[str, Tensor]) -> None:
    """Into safetensors files of at most a gibibyte or one tensor each."""
    file_of: dict[str, int] = {}
    written = 0
    for key, tensor in tensors.items():
        file_of[key] = written // _FILE_BYTES + 1
        written += tensor.nbytes
    with warnings.catch_warnings():
        ignore_single_process()
        writer = HuggingFaceStorageWriter(str(folder), fqn_to_index_mapping=file_of)
        save(tensors, storage_writer=writer, no_dist=True)


def check_tensors(
    checkpoint: Path, saved: Mapping[str, object], wanted: dict[str, Tensor], remedy: str
) -> None:
    """Raise ``CheckpointError`` unless what is wanted is saved, as it is, and nothing else."""
    where = str(checkpoint)
    # other ranks' generators, of a run on several
    others = {key for key in saved if key.startswith("rng.")} - wanted.keys()
    missing = sorted(wanted.keys() - saved.keys())
    foreign = sorted(saved.keys() - wanted.keys() - others)
    if missing:
        nearest = did_you_mean(missing[0], foreign) if foreign else remedy
        message = instruction(
            "load_checkpoint", where, f"hold {missing[0]}", "nothing by this name", nearest
        )
        raise CheckpointError(message)
    if foreign:
        requirement = "hold this model's tensors only"
        raise CheckpointError(
            instruction("load_checkpoint", where, requirement, foreign[0], remedy)
        )
    for key, tensor in wanted.items():
        record = saved[key]
        assert isinstance(record, TensorStorageMetadata), f"{key=} {record=}"
        have = f"{tuple(record.size)} {record.properties.dtype}"
        want = f"{tuple(tensor.shape)} {tensor.dtype}"
        requirement = f"hold {key} as {want}"
        require(
            have == want, "load_checkpoint", where, requirement, have, remedy, error=CheckpointError
        )


def check_same(what: str, saved: str, current: str, remedy: str) -> None:
    """Raise ``CheckpointError`` unless text or model are the checkpoint's."""
    requirement = f"be the one the checkpoint was made with ({saved[:12]}...)"
    value = f"{current[:12]}..."
    require(
        saved == current, "load_checkpoint", what, requirement, value, remedy, error=CheckpointError
    )


def require_space(folder: Path, tensors: dict[str, Tensor]) -> None:
    """Raise ``CheckpointError`` unless the disk has room for the tensors."""
    # header and manifest: some hundred bytes per tensor
    need = sum(tensor.nbytes + 512 for tensor in tensors.values())
    free = shutil.disk_usage(folder).free
    require(
        free >= need,
        "save_checkpoint",
        f"free space under {folder}",
        f"be at least {need} bytes",
        f"{free}",
        "Free some, then go on with --resume from the last checkpoint.",
        error=CheckpointError,
    )


@contextmanager
def explained(aside: Path | None, remedy: str = "") -> Iterator[None]:
    """Turn a failure to write (aside) or read into an instruction; remove what is half-written."""
    # what a file with the right hash may still do: only somebody who forges both gets there
    forged = (SafetensorError, ValueError, KeyError) if aside is None else ()
    try:
        yield
    except CheckpointError:
        raise
    except (OSError, CheckpointException, *forged) as error:
        cause = _cause(error)
        if aside is None:
            message = instruction("load_checkpoint", "checkpoint", "be readable", cause, remedy)
            raise CheckpointError(message) from error
        shutil.rmtree(aside, ignore_errors=True)
        if isinstance(cause, KeyboardInterrupt):
            raise cause from None
        remedy = "Free the disk, then go on with --resume: the checkpoint before is untouched."
        message = instruction(
            "save_checkpoint", str(aside.parent), "take a checkpoint", cause, remedy
        )
        raise CheckpointError(message) from error


def _cause(error: BaseException) -> BaseException:
    """What went wrong inside torch.distributed.checkpoint's own exception."""
    failures = getattr(error, "failures", {})
    return next((cause for cause, _ in failures.values()), error)


def list_checkpoints(folder: Path) -> list[Path]:
    """Those that ``save_checkpoint`` named, oldest first: copies under other names are not ours."""
    is_ours = re.compile(r"step-[0-9]{8}").fullmatch
    return sorted(path for path in folder.glob("step-*") if is_ours(path.name) and path.is_dir())


def remedy_for(checkpoint: Path) -> str:
    """What to do about a checkpoint that cannot be used."""
    others = [path for path in list_checkpoints(checkpoint.parent) if path < checkpoint]
    if others:
        return f"Delete {checkpoint} to go on from {others[-1].name}."
    return "Start anew with --overwrite."


def remove_checkpoint(checkpoint: Path) -> None:
    """Delete a checkpoint; renamed first, so that half of one is never taken for a whole."""
    doomed = checkpoint.with_name(f"{_DELETING}{checkpoint.name}")
    checkpoint.rename(doomed)
    shutil.rmtree(doomed)


def remove_leftovers(folder: Path) -> None:
    """Delete what a killed run left half-written or half-deleted."""
    for prefix in (WRITING, _DELETING):
        for path in folder.glob(f"{prefix}*"):
            shutil.rmtree(path)


def package_versions() -> dict[str, str]:
    """Of what decides how a run goes on."""
    packages = ("torch", "transformers", "numpy")
    return {package: importlib.metadata.version(package) for package in packages}


def ignore_single_process() -> None:
    """Silence torch's warning that ``no_dist`` saves without other ranks."""
    # one process is what is meant here
    warnings.filterwarnings("ignore", message="torch.distributed is disabled")
