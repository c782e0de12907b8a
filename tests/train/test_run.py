"""A run that is killed at any moment goes on as if nothing had happened."""

import json
import os
import subprocess
import sys
from collections.abc import Callable
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from piper_kernels.errors import CheckpointError, TrainingError
from piper_kernels.train.checkpoint import latest_checkpoint
from piper_kernels.train.metrics import StepRecord, read_metrics
from piper_kernels.train.run import build_run, train
from piper_kernels.train.run_folder import RunFolder
from piper_kernels.train.settings import TrainSettings
from piper_kernels.train.stopping import StopRequest

Make = Callable[..., TrainSettings]
NUM_STEPS = 8
KILLED = -9

# one kind of moment each: before steps, and in the course of writing checkpoints. A checkpoint
# brings 7 things to the disk, in this order: the records, weights (twice), index, manifest, its
# folder, and, once renamed, the folder of checkpoints
CASES = [
    ("kill-step", 5),
    ("kill-fsync", 9),
    ("kill-fsync", 12),
    ("kill-rename", 4),
    ("interrupt-step", 3),
    ("full-disk-step", 5),
]
MORE_CASES = [
    *(("kill-step", number) for number in (1, 2, 3, 4, 6, 7, 8)),
    *(("kill-fsync", number) for number in range(7, 28) if number not in (9, 12)),
    *(("kill-rename", number) for number in (2, 3, 5)),
    *(("kill-unlink", number) for number in (5, 7, 8)),
    *(("interrupt-step", number) for number in (1, 8)),
    ("full-disk-step", 1),
]
# struck before the first checkpoint was whole
LOST_CASES = [("kill-fsync", 4), ("kill-rename", 1)]


def run_cases(
    folder: Path, settings: TrainSettings, cases: list[tuple[str, int]]
) -> list[tuple[int, int]]:
    override = [f"{key}={value}" for key, value in settings.model_override.items()]
    arguments = [
        *("--data", str(settings.data[0]), "--model-override", *override, "--experts", "piper"),
        *("--steps", str(NUM_STEPS), "--warmup-fraction", "0.2", "--batch-size", "4"),
        *("--sequence-length", "16", "--checkpoint-every", "3", "--evaluate-every", "4"),
        *("--sample-tokens", "0", "--compare-rounds", "0", "--threads", "1"),
    ]
    script = Path(__file__).with_name("kill_points.py")
    root = Path(__file__).resolve().parents[2]
    done = subprocess.run(
        [sys.executable, str(script), str(folder), json.dumps(cases), json.dumps(arguments)],
        capture_output=True,
        text=True,
        env=os.environ | {"OMP_NUM_THREADS": "1", "PYTHONPATH": str(root)},
        timeout=600,
    )
    assert done.returncode == 0, done.stderr
    return [tuple(fate) for fate in json.loads(done.stdout.splitlines()[-1])]


def curve(folder: Path) -> list[dict[str, Any]]:
    """All records but for the time they took."""
    return [
        asdict(replace(record, step_s=0.0)) for record in read_metrics(folder / "metrics.jsonl")
    ]


def weights_of(folder: Path) -> dict[str, torch.Tensor]:
    """Parameters, moments and random generator of the last checkpoint."""
    last = folder / "checkpoints" / f"step-{NUM_STEPS:08d}"
    return load_file(last / "model-00001-of-00001.safetensors")


def check_cases(folder: Path, settings: TrainSettings, cases: list[tuple[str, int]]) -> None:
    whole = folder / "whole"
    for (fault, number), fates in zip(cases, run_cases(folder, settings, cases), strict=True):
        struck = {"kill": KILLED, "inte": 130, "full": 2}[fault[:4]]
        assert fates == (struck, 0), f"{fault=} {number=}"
        resumed = folder / f"{fault}-{number}"
        # every loss, gradient norm, routed row and held-out loss, to the bit
        assert curve(resumed) == curve(whole), f"{fault=} {number=}"
        weights, wanted = weights_of(resumed), weights_of(whole)
        assert weights.keys() == wanted.keys()
        assert all(torch.equal(tensor, wanted[key]) for key, tensor in weights.items())
        names = sorted(path.name for path in (resumed / "checkpoints").iterdir())
        assert names == ["step-00000006", "step-00000008"]


def test_a_run_that_is_killed_goes_on_to_the_bit(tiny_settings: Make, tmp_path: Path) -> None:
    check_cases(tmp_path, tiny_settings(), CASES)
    records = read_metrics(tmp_path / "whole" / "metrics.jsonl")
    assert [record.step for record in records] == list(range(1, NUM_STEPS + 1))
    assert records[-1].loss < records[0].loss
    evaluated = [record.step for record in records if record.held_out_loss is not None]
    assert evaluated == [4, 8]


@pytest.mark.slow
def test_a_run_that_is_killed_at_any_moment_goes_on_to_the_bit(
    tiny_settings: Make, tmp_path: Path
) -> None:
    check_cases(tmp_path, tiny_settings(), MORE_CASES)


@pytest.mark.slow
def test_a_run_killed_before_its_first_checkpoint_must_start_anew(
    tiny_settings: Make, tmp_path: Path
) -> None:
    assert run_cases(tmp_path, tiny_settings(), LOST_CASES) == [(KILLED, 2)] * len(LOST_CASES)


class Recorded:
    """A progress that keeps what it is told."""

    def __init__(self, at_step: Callable[[int], None] = lambda step: None) -> None:
        self.records: list[StepRecord] = []
        self._at_step = at_step

    def __enter__(self) -> "Recorded":
        return self

    def __exit__(self, *error: object) -> None:
        return None

    def update(self, record: StepRecord) -> None:
        self.records.append(record)
        self._at_step(record.step)

    def note(self, text: str) -> None:
        raise AssertionError(text)


def run_in_process(
    settings: TrainSettings, *, resume: bool = False, progress: Recorded | None = None
) -> tuple[bool, list[StepRecord]]:
    progress = progress or Recorded()
    folder = RunFolder(settings.out, is_resumed=resume, may_overwrite=False)
    stop = StopRequest()
    try:
        built = build_run(settings, latest_checkpoint(folder.checkpoints) if resume else None)
        if not resume:
            folder.start("")
        return train(built, folder, progress, stop), progress.records
    finally:
        folder.close()


def test_train_evaluates_and_saves_when_it_is_due(tiny_settings: Make) -> None:
    settings = tiny_settings(steps=5, checkpoint_every=2, evaluate_every=3, keep_checkpoints=9)
    is_finished, records = run_in_process(settings)
    assert is_finished
    assert [record.step for record in records if record.held_out_loss is not None] == [3, 5]
    assert read_metrics(settings.out / "metrics.jsonl") == records
    names = sorted(path.name[-2:] for path in (settings.out / "checkpoints").iterdir())
    # before the first step, every second, and the last
    assert names == ["00", "02", "04", "05"]


def test_train_leaves_the_last_checkpoint_when_the_loss_is_lost(tiny_settings: Make) -> None:
    settings = tiny_settings(steps=9, checkpoint_every=2)
    built = build_run(settings, None)
    folder = RunFolder(settings.out, is_resumed=False, may_overwrite=False)
    folder.start("")

    def spoil(step: int) -> None:
        if step == 5:
            built.trainer.model.lm_head.weight.data.fill_(torch.nan)

    with pytest.raises(TrainingError, match=r"loss of step 6 must be a finite number"):
        train(built, folder, Recorded(spoil), StopRequest())
    folder.close()
    assert latest_checkpoint(settings.out / "checkpoints").name == "step-00000004"
    is_finished, records = run_in_process(settings, resume=True)
    assert is_finished
    assert [record.step for record in records] == [5, 6, 7, 8, 9]


def test_build_run_refuses_to_resume_with_another_text(tiny_settings: Make, tmp_path: Path) -> None:
    settings = tiny_settings()
    run_in_process(settings)
    other = tmp_path / "other.txt"
    other.write_text(settings.data[0].read_text() + "one word more\n")
    message = r"load_checkpoint: text must be the one the checkpoint was made with .* Give the same"
    with pytest.raises(CheckpointError, match=message):
        run_in_process(settings.replace(data=(other,)), resume=True)
    # the same text elsewhere is the same
    other.write_text(settings.data[0].read_text())
    is_finished, records = run_in_process(settings.replace(data=(other,)), resume=True)
    assert (is_finished, records) == (True, [])


def test_build_run_refuses_to_resume_another_model(tiny_settings: Make) -> None:
    settings = tiny_settings()
    run_in_process(settings)
    changed = settings.model_override | {"rms_norm_eps": 1e-3}
    message = r"load_checkpoint: model must be the one the checkpoint was made with"
    with pytest.raises(CheckpointError, match=message):
        run_in_process(settings.replace(model_override=changed), resume=True)


def test_build_run_sets_the_threads(tiny_settings: Make) -> None:
    before = torch.get_num_threads()
    try:
        build_run(tiny_settings(threads=before + 1), None)
        assert torch.get_num_threads() == before + 1
    finally:
        torch.set_num_threads(before)
