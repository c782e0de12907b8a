"""``piper train --plan``: the same command on one process and under torchrun."""

import argparse
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.table import Table

from piper_kernels.errors import PlanError, require
from piper_kernels.pipeline.plan import Plan
from piper_kernels.pipeline.schedule import make_schedule
from piper_kernels.pipeline.schedule_grid import draw_grid
from piper_kernels.train.checkpoint import latest_checkpoint, list_checkpoints, remedy_for
from piper_kernels.train.export import export_checkpoint
from piper_kernels.train.flags import settings_toml
from piper_kernels.train.manifest import read_manifest
from piper_kernels.train.model import build_config
from piper_kernels.train.parallel_run import ParallelRun, build_parallel_run, train_parallel
from piper_kernels.train.plan_settings import settings_with_plan
from piper_kernels.train.progress import make_console, open_progress
from piper_kernels.train.rank_metrics import RankRecord
from piper_kernels.train.ranks import joined_ranks, local_device, num_ranks_started, together
from piper_kernels.train.run_folder import RunFolder, explained_writing
from piper_kernels.train.settings import TrainSettings, resumed_settings, settings_from
from piper_kernels.train.stopping import StopRequest


def run_plan(arguments: argparse.Namespace, stated: dict[str, Any]) -> int:
    """Train as a plan says; 0 when the run is finished, 130 when it was asked to stop.

    Args:
        arguments: ``plan``, ``resume``, ``overwrite``.
        stated: settings that the user gave.

    Raises:
        PiperError: on every rank, if anything that the user can change is in the way.
    """
    plan = Plan.load(arguments.plan)
    world_size = num_ranks_started()
    requirement = f"be for the {world_size} ranks that were started"
    value = f"one for {plan.world_size}"
    remedy = f"Start it with: torchrun --nproc-per-node {plan.world_size} -m piper_kernels train."
    fits = plan.world_size == world_size
    require(fits, "train", "--plan", requirement, value, remedy, error=PlanError)
    first = settings_from(settings_with_plan(stated, plan), "settings")
    device = torch.device(local_device(first.device) if first.device != "auto" else _auto())
    if device.type == "cuda":
        torch.cuda.set_device(device)
    with joined_ranks(device, first.timeout_s):
        return _run_joined(plan, arguments, stated, first)


def _run_joined(
    plan: Plan, arguments: argparse.Namespace, stated: dict[str, Any], first: TrainSettings
) -> int:
    rank = dist.get_rank()
    # torchrun starts a fallen job again with the same words
    is_restart = int(os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")) > 0
    is_resumed = arguments.resume or (
        is_restart and bool(list_checkpoints(first.out / "checkpoints"))
    )

    def open_folder() -> RunFolder | None:
        if rank != 0:
            return None
        may_overwrite = arguments.overwrite or is_restart
        with explained_writing(first.out):
            return RunFolder(first.out, is_resumed=is_resumed, may_overwrite=may_overwrite)

    folder = together("open the run's folder", open_folder)
    try:
        settings, checkpoint = first, None
        if is_resumed:
            settings, checkpoint = together(
                "read the checkpoint", lambda: _resume(plan, stated, first.out)
            )
        run = build_parallel_run(plan, settings, checkpoint)
        if folder is not None and checkpoint is None:
            with explained_writing(settings.out):
                folder.start(settings_toml(settings))
        dist.barrier()
        return _train(run)
    finally:
        if folder is not None:
            folder.close()


def _resume(plan: Plan, stated: dict[str, Any], out: Path) -> tuple[TrainSettings, Path]:
    """The settings of the checkpoint; the plan may be another one if the batch is the same."""
    checkpoint = latest_checkpoint(out / "checkpoints")
    saved = dict(read_manifest(checkpoint, remedy_for(checkpoint)).settings)
    name, size = "train", saved["batch_size"]
    requirement = f"make the checkpoint's batches of {size} sequences"
    remedy = "Change num_microbatches or microbatch_size of the plan."
    fits = plan.global_batch == size
    require(fits, name, "--plan", requirement, plan.global_batch, remedy, error=PlanError)
    # how a batch is cut and what is recomputed belongs to the plan, not to the run
    follows = {key: saved[key] for key in ("batch_size", "sequence_length")}
    values = settings_with_plan({**stated, **follows}, plan)
    for key in ("accumulate", "checkpoint_activations"):
        saved[key] = values[key]
    return resumed_settings(saved, {**stated, "out": str(out)}), checkpoint


def _train(run: ParallelRun) -> int:
    settings, trainer = run.settings, run.trainer
    console = make_console() if run.rank == 0 else None
    progress = None
    if console is not None:
        _introduce(run, console)
        progress = open_progress(console, settings.steps, run.layers)
    with StopRequest() as stop:
        if progress is None:
            is_finished, records = train_parallel(run, settings.out, None, stop)
        else:
            with progress:
                is_finished, records = train_parallel(run, settings.out, progress, stop)
    tables = gather_records(records)
    trainer.runtime.close()
    if is_finished and run.rank == 0:
        config = build_config(settings, run.corpus.tokens.vocab_size)
        last = latest_checkpoint(settings.out / "checkpoints")
        export_checkpoint(last, config, settings.out / "model", experts=settings.experts)
    if console is not None:
        if tables:
            console.print(rank_table(run.plan, tables))
        if trainer.num_skipped:
            console.print(f"{trainer.num_skipped} steps skipped: their loss was not finite")
        if is_finished:
            console.print(f"model    {settings.out / 'model'}", highlight=False, soft_wrap=True)
        else:
            again = "the same command with --resume"
            console.print(f"stopped at step {trainer.step}; go on with {again}", soft_wrap=True)
    return 0 if is_finished else 130


def gather_records(records: Sequence[RankRecord]) -> list[list[RankRecord]]:
    """Every rank's records, by rank; empty if no step was made."""
    every: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(every, list(records))
    return every if records else []


def rank_table(plan: Plan, records: Sequence[Sequence[RankRecord]]) -> Table:
    """What each rank took, beside what the plan predicted for it.

    The first step is left out of times: it connects ranks and allocates.
    """
    title = "ranks: median step time and peak memory, beside the plan's prediction (modelled)"
    table = Table(title=title, title_justify="left", box=SIMPLE_HEAD)
    for name in ("rank", "pp", "stages", "s/step", "predicted", "peak MiB", "predicted MiB"):
        table.add_column(name, justify="right")
    predicted = plan.predicted
    for rank, own in enumerate(records):
        times = sorted(record.step_s for record in own[1:] or own)
        pipeline_rank = rank // plan.mesh.stage_width
        expected = ("-", "-")
        if predicted is not None:
            peak = predicted.peak_bytes[pipeline_rank]
            expected = (f"{predicted.step_s:.3f}", f"{peak / 2**20:.0f}")
        table.add_row(
            str(rank),
            str(pipeline_rank),
            ", ".join(map(str, own[0].stages)),
            f"{times[len(times) // 2]:.3f}",
            expected[0],
            f"{own[-1].peak_bytes / 2**20:.0f}",
            expected[1],
        )
    return table


def _introduce(run: ParallelRun, console: Console) -> None:
    plan, settings, corpus = run.plan, run.settings, run.corpus
    mesh = plan.mesh
    lines = [
        f"text     {corpus.train_bytes:,} bytes to train on, {corpus.held_out_bytes:,} held out",
        f"plan     pp {mesh.pp}, dp {mesh.dp}, ep {mesh.ep}, {plan.schedule}, layers "
        f"{plan.layers_per_stage}, {plan.num_microbatches} x {plan.microbatch_size} sequences",
        f"run      {settings.out}, step {run.trainer.step} of {settings.steps}",
    ]
    if plan.optimizer.is_sharded and mesh.num_replicas > 1:
        lines.append("note     the optimizer's state is not sharded: same numbers, more memory")
    if plan.exchange.num_chunks > 1:
        lines.append(f"note     exchanges run in one chunk, not in {plan.exchange.num_chunks}")
    for line in lines:
        console.print(line, highlight=False, soft_wrap=True)
    local = len(plan.layers_per_stage) // mesh.pp
    grid = draw_grid(make_schedule(plan.schedule, mesh.pp, plan.num_microbatches, local))
    if max(map(len, grid.splitlines())) <= console.width:
        console.print(grid, highlight=False)


def _auto() -> str:
    return local_device("auto") if torch.cuda.is_available() else "cpu"
