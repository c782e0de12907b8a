"""Checkpoints of several ranks: written beside the training, whole or absent, read by any mesh.

Each rank copies what it writes, and goes on training while a thread brings the copy to the disk.
Threads make no collective calls: a rank that is done leaves a small file that says so, and rank 0,
when all have, names the checkpoint. The format is that of a run in one process.
"""

import shutil
import time
import warnings
from collections.abc import Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path

import torch
from torch import Tensor
from torch.distributed.checkpoint.hf_storage import HuggingFaceStorageReader
from torch.distributed.checkpoint.state_dict_loader import load

from piper_kernels.errors import CheckpointError, PiperError, require
from piper_kernels.strict_model import StrictModel
from piper_kernels.train.checkpoint import (
    WRITING,
    check_same,
    check_tensors,
    explained,
    ignore_single_process,
    list_checkpoints,
    package_versions,
    remedy_for,
    remove_checkpoint,
    remove_leftovers,
    require_space,
    write_tensors,
)
from piper_kernels.train.manifest import (
    MANIFEST,
    FileRecord,
    Manifest,
    check_files,
    checkpoint_name,
    describe_files,
    read_manifest,
    sync_path,
)
from piper_kernels.train.parallel_trainer import ParallelTrainer
from piper_kernels.train.rank_tensors import (
    make_room_for_moments,
    rank_tensors,
    rng_key,
    written_tensors,
)
from piper_kernels.train.ranks import together


class Done(StrictModel):
    """What a rank leaves when its files are on the disk; an error's words if they are not."""

    files: dict[str, FileRecord]
    error: str = ""


class CheckpointWriter:
    """Saves the state of a run while it goes on.

    Args:
        folder: holds the checkpoints of one run; shared by all ranks.
        rank: of this process.
        num_ranks: of the job.
        text_sha256: of the text that is trained on.
        model_digest: of the model's configuration.
        keep: how many checkpoints stay, at least 1.
        timeout_s: how long rank 0 waits for the others' files.
    """

    def __init__(
        self,
        folder: Path,
        *,
        rank: int,
        num_ranks: int,
        text_sha256: str,
        model_digest: str,
        keep: int,
        timeout_s: float,
    ) -> None:
        self.folder, self.rank, self.num_ranks = folder, rank, num_ranks
        self._identity = {"text_sha256": text_sha256, "model_digest": model_digest}
        self._keep, self._timeout_s = keep, timeout_s
        self._pool = ThreadPoolExecutor(1, thread_name_prefix="piper-checkpoint")
        self._pending: Future[None] | None = None
        self._last_step = -1
        folder.mkdir(parents=True, exist_ok=True)
        if rank == 0:
            remove_leftovers(folder)

    def save(self, trainer: ParallelTrainer) -> None:
        """Copy the state and begin to write it; waits for the checkpoint before.

        Raises:
            CheckpointError: the one before could not be written; those before that are whole.
        """
        self.wait()
        final = self.folder / checkpoint_name(trainer.step)
        # a run that is resumed has the checkpoint it came from; one that this run is writing gets
        # its name from rank 0, at a time that differs from rank to rank
        if trainer.step == self._last_step or final.exists():
            return
        self._last_step = trainer.step
        tensors = written_tensors(trainer)
        settings = trainer.settings.model_dump(mode="json")
        manifest = Manifest(
            step=trainer.step,
            settings=settings,
            versions=package_versions(),
            files={},
            **self._identity,
        )
        self._pending = self._pool.submit(self._write, final, tensors, manifest)

    def wait(self) -> None:
        """Until this rank's part of the last checkpoint, and on rank 0 all of it, is on the disk.

        Raises:
            CheckpointError: it could not be written.
        """
        if self._pending is not None:
            pending, self._pending = self._pending, None
            pending.result()

    def close(self) -> None:
        """End the thread; what it is writing is finished first."""
        self._pool.shutdown()

    def _write(self, final: Path, tensors: dict[str, Tensor], manifest: Manifest) -> None:
        aside = self.folder / f"{WRITING}{final.name}"
        aside.mkdir(exist_ok=True)
        error = None
        files: dict[str, FileRecord] = {}
        try:
            files = self._write_own(aside, tensors)
        except PiperError as found:
            error = found
        done = Done(files=files, error="" if error is None else str(error))
        _write_whole(aside / _done_name(self.rank), done.to_json())
        if error is not None:
            raise error
        if self.rank == 0:
            self._finish(aside, final, manifest)

    def _write_own(self, aside: Path, tensors: dict[str, Tensor]) -> dict[str, FileRecord]:
        own = aside / f"rank-{self.rank:05d}"
        require_space(self.folder, tensors)
        with explained(own):
            write_tensors(own, tensors)
            files = {}
            for name, record in describe_files(own).items():
                if name.endswith(".safetensors"):
                    moved = f"{own.name}-{name}"
                    (own / name).rename(aside / moved)
                    files[moved] = record
            shutil.rmtree(own)
        return files

    def _finish(self, aside: Path, final: Path, manifest: Manifest) -> None:
        """On rank 0: when all ranks are done, name the checkpoint and drop the oldest."""
        files: dict[str, FileRecord] = {}
        deadline = time.monotonic() + self._timeout_s
        for rank in range(self.num_ranks):
            path = aside / _done_name(rank)
            while not path.exists():
                requirement = f"be written by rank {rank} within {self._timeout_s:g} s"
                is_in_time = time.monotonic() < deadline
                where = f"rank 0: {final}"
                value = "nothing from it"
                remedy = "Is the folder shared by all nodes?"
                name = "save_checkpoint"
                require(is_in_time, name, where, requirement, value, remedy, error=CheckpointError)
                time.sleep(0.01)
            done = Done.load(path)
            if done.error:
                raise CheckpointError(f"rank {rank}: {done.error}")
            files |= done.files
            path.unlink()
        with explained(aside):
            text = manifest.replace(files=files).model_dump_json(indent=1)
            (aside / MANIFEST).write_text(text, encoding="utf-8")
            sync_path(aside / MANIFEST)
            sync_path(aside)
            aside.rename(final)
            sync_path(self.folder)
        for old in list_checkpoints(self.folder)[: -self._keep]:
            remove_checkpoint(old)


def load_parallel_checkpoint(
    checkpoint: Path, trainer: ParallelTrainer, *, text_sha256: str, model_digest: str
) -> None:
    """Bring a newly built trainer to a checkpoint's state, whatever mesh wrote it.

    Every rank calls it. Rank 0 checks lengths and hashes of all files, each rank reads its own
    layers and experts. A rank whose generator was not saved keeps its own.

    Raises:
        CheckpointError: files are missing or damaged, or text, model or tensors are not this run's.
        TrainingError: another rank found so.
    """
    remedy = remedy_for(checkpoint)
    rank = trainer.runtime.mesh.rank

    def check() -> Manifest:
        manifest = read_manifest(checkpoint, remedy)
        if rank == 0:
            check_files(checkpoint, manifest, remedy)
        same_text = "Give the same --data in the same order."
        check_same("text", manifest.text_sha256, text_sha256, same_text)
        check_same("model", manifest.model_digest, model_digest, "Give the same configuration.")
        return manifest

    def read() -> None:
        with explained(None, remedy), warnings.catch_warnings():
            ignore_single_process()
            reader = HuggingFaceStorageReader(str(checkpoint))
            saved = reader.read_metadata().state_dict_metadata
            make_room_for_moments(trainer, set(saved))
            tensors = rank_tensors(trainer)
            if rng_key(rank) in saved:
                tensors[rng_key(rank)] = torch.get_rng_state()
            _check_own(checkpoint, saved, tensors, remedy)
            load(dict(tensors), storage_reader=reader, no_dist=True)
            if rng_key(rank) in tensors:
                torch.set_rng_state(tensors[rng_key(rank)])

    manifest = together("use the checkpoint", check)
    together("read the checkpoint", read)
    trainer.step = manifest.step


def _check_own(
    checkpoint: Path, saved: Mapping[str, object], tensors: dict[str, Tensor], remedy: str
) -> None:
    """This rank's tensors are there, in their shapes; others' are not looked at."""
    own = {key: record for key, record in saved.items() if key in tensors}
    check_tensors(checkpoint, own, tensors, remedy)


def _done_name(rank: int) -> str:
    return f".done-{rank:05d}.json"


def _write_whole(path: Path, text: str) -> None:
    """Under its name when it is complete: another rank looks for it."""
    part = path.with_suffix(".part")
    part.write_text(text, encoding="utf-8")
    part.rename(path)
