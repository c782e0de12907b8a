"""One run from its settings to its last checkpoint."""

from dataclasses import dataclass, replace
from pathlib import Path

import torch

from piper_kernels.train.checkpoint import load_checkpoint, save_checkpoint
from piper_kernels.train.corpus import Corpus, load_corpus
from piper_kernels.train.evaluate import HeldOut, held_out_loss, held_out_windows
from piper_kernels.train.loop import Trainer
from piper_kernels.train.metrics import MetricsFile, StepRecord
from piper_kernels.train.model import build_model, choose_device, model_digest
from piper_kernels.train.optimizer import build_optimizer
from piper_kernels.train.progress import Progress
from piper_kernels.train.run_folder import RunFolder
from piper_kernels.train.sampler import WindowSampler
from piper_kernels.train.settings import TrainSettings
from piper_kernels.train.stopping import StopRequest


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class Run:
    """Everything that a run works with.

    Attributes:
        settings: what to do.
        corpus: the text.
        held_out: its held-out part, ready to evaluate.
        trainer: model, optimizer, and where they stand.
        model_digest: hash of the model's configuration.
    """

    settings: TrainSettings
    corpus: Corpus
    held_out: HeldOut
    trainer: Trainer
    model_digest: str


def build_run(settings: TrainSettings, checkpoint: Path | None) -> Run:
    """Read the text, build the model, and go to where ``checkpoint`` stands, if one is given.

    Raises:
        PiperError: if text, model or checkpoint cannot be used.
    """
    if settings.threads > 0:
        torch.set_num_threads(settings.threads)
    corpus = load_corpus(settings)
    model = build_model(settings, corpus.tokens.vocab_size, choose_device(settings.device))
    trainer = Trainer(
        model=model,
        optimizer=build_optimizer(model, settings),
        sampler=WindowSampler(
            corpus.train, sequence_length=settings.sequence_length, seed=settings.seed
        ),
        settings=settings,
        tokens_per_byte=corpus.tokens_per_byte,
    )
    digest = model_digest(model)
    if checkpoint is not None:
        load_checkpoint(checkpoint, trainer, text_sha256=corpus.sha256, model_digest=digest)
    return Run(
        settings=settings,
        corpus=corpus,
        held_out=held_out_windows(corpus, settings.sequence_length),
        trainer=trainer,
        model_digest=digest,
    )


def train(run: Run, folder: RunFolder, progress: Progress, stop: StopRequest) -> bool:
    """Make the steps that are left; a record and, when due, an evaluation and a checkpoint each.

    A checkpoint is also written before the first step, so that a run can be resumed from its very
    beginning, and when ``stop`` asks to end.

    Returns:
        Whether all steps are done and nobody asked to stop.

    Raises:
        TrainingError: if the loss is no finite number; the last checkpoint stays.
        CheckpointError: if a checkpoint cannot be written; the last one stays.
    """
    trainer, settings = run.trainer, run.settings
    metrics = MetricsFile(folder.metrics, last_step=trainer.step)
    try:
        _save(run, folder, metrics)
        while trainer.step < settings.steps and not stop.is_made:
            record = _step(run)
            metrics.append(record)
            progress.update(record)
            if trainer.step % settings.checkpoint_every == 0 or stop.is_made:
                _save(run, folder, metrics)
        _save(run, folder, metrics)
    finally:
        metrics.close()
    return trainer.step == settings.steps and not stop.is_made


def _step(run: Run) -> StepRecord:
    settings, trainer = run.settings, run.trainer
    record = trainer.train_step()
    if record.step % settings.evaluate_every == 0 or record.step == settings.steps:
        loss = held_out_loss(trainer.model, run.held_out, settings)
        record = replace(record, held_out_loss=loss)
    return record


def _save(run: Run, folder: RunFolder, metrics: MetricsFile) -> None:
    """Write a checkpoint of this step, unless there is one; its records reach the disk first."""
    metrics.sync()
    save_checkpoint(
        folder.checkpoints,
        run.trainer,
        text_sha256=run.corpus.sha256,
        model_digest=run.model_digest,
        keep=run.settings.keep_checkpoints,
    )
