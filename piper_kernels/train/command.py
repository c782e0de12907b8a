"""Train a Mixture-of-Experts language model.

Without arguments: a small OLMoE on the documentation topics that every Python carries, about two
minutes on two CPU cores. Settings come from flags or a TOML file (--config; flags win).

For example:
  piper train --out runs/first
  piper train --out runs/first --resume
  piper train --data notes/ --model mixtral --steps 2000 --out runs/notes
  piper train --config runs/first/settings.toml --seed 1 --out runs/second
"""

import argparse
import importlib.util
import os
from pathlib import Path
from typing import TYPE_CHECKING

from piper_kernels.errors import CheckpointError, ConfigError, instruction, require
from piper_kernels.train.flags import add_flags, settings_toml, stated_settings
from piper_kernels.train.settings import resumed_settings, settings_from

if TYPE_CHECKING:
    from rich.console import Console

    from piper_kernels.train.run import Run
    from piper_kernels.train.run_folder import RunFolder

_PACKAGES = ("transformers", "safetensors", "matplotlib")


def configure(parser: argparse.ArgumentParser) -> None:
    """Add the flags of ``piper train``."""
    actions = parser.add_argument_group("what to do")
    actions.add_argument(
        "--resume", action="store_true", help="go on from the last checkpoint in --out"
    )
    actions.add_argument(
        "--overwrite", action="store_true", help="delete the run that --out holds, and start anew"
    )
    actions.add_argument(
        "--plan",
        type=Path,
        metavar="FILE",
        help="train as this plan says, on the ranks that torchrun started",
    )
    actions.add_argument("--config", type=Path, metavar="FILE", help="a TOML file of settings")
    add_flags(parser)


def run(arguments: argparse.Namespace) -> int:
    """Train, or go on with a run; 0 when it is finished, 130 when it was asked to stop.

    Raises:
        PiperError: if anything that the user can change is in the way.
    """
    _check_environment(has_plan=arguments.plan is not None)
    require(
        not (arguments.resume and arguments.overwrite),
        "train",
        "--resume and --overwrite",
        "not be given together",
        "both",
    )
    stated = stated_settings(arguments, arguments.config)
    _set_environment()
    if arguments.plan is not None:
        from piper_kernels.train.parallel_command import run_plan

        return run_plan(arguments, stated)
    # torch and transformers load here, not for --help
    from transformers.utils import logging as transformers_logging

    from piper_kernels.train.checkpoint import latest_checkpoint, remedy_for
    from piper_kernels.train.manifest import read_manifest
    from piper_kernels.train.run import build_run
    from piper_kernels.train.run_folder import RunFolder, explained_writing

    transformers_logging.disable_progress_bar()
    checkpoint: Path | None = None
    # of a run that goes on, the rest only means something beside what the checkpoint holds
    first = {name: stated[name] for name in stated.keys() & {"out"}} if arguments.resume else stated
    settings = settings_from(first, "settings")
    with explained_writing(settings.out):
        folder = RunFolder(
            settings.out, is_resumed=arguments.resume, may_overwrite=arguments.overwrite
        )
    try:
        if arguments.resume:
            checkpoint = latest_checkpoint(folder.checkpoints)
            saved = read_manifest(checkpoint, remedy_for(checkpoint)).settings
            settings = resumed_settings(saved, stated | {"out": str(settings.out)})
        built = build_run(settings, checkpoint)
        if checkpoint is None:
            with explained_writing(settings.out):
                folder.start(settings_toml(settings))
        return _train_and_close(built, folder)
    finally:
        folder.close()


def _train_and_close(built: "Run", folder: "RunFolder") -> int:
    from safetensors import SafetensorError

    from piper_kernels.train.closing import close_run
    from piper_kernels.train.progress import make_console, open_progress
    from piper_kernels.train.run import train
    from piper_kernels.train.stopping import StopRequest

    console = make_console()
    _introduce(built, console)
    progress = open_progress(console, built.settings.steps, built.trainer.counter.layers)
    again = f"piper train --resume --out {folder.path}"
    try:
        with StopRequest() as stop, progress:
            is_finished = train(built, folder, progress, stop)
        if is_finished:
            close_run(built, folder, console)
    except (OSError, SafetensorError) as error:
        remedy = f"Free the disk, then go on with: {again}."
        message = instruction("train", str(folder.path), "take the run's files", error, remedy)
        raise CheckpointError(message) from error
    if not is_finished:
        where = f"stopped at step {built.trainer.step}; go on with: {again}"
        console.print(where, highlight=False, soft_wrap=True)
    return 0 if is_finished else 130


def _introduce(built: "Run", console: "Console") -> None:
    settings, corpus, model = built.settings, built.corpus, built.trainer.model
    device = next(model.parameters()).device
    num_parameters = sum(parameter.numel() for parameter in model.parameters())
    source = ", ".join(map(str, settings.data)) or "documentation topics of this Python"
    name = Path(settings.model).name
    lines = [
        f"text     {source}: {corpus.train_bytes:,} bytes to train on, "
        f"{corpus.held_out_bytes:,} held out",
        f"model    {name}, {num_parameters:,} parameters, {settings.precision}, "
        f"{settings.experts} experts, on {device}",
        f"run      {settings.out}, step {built.trainer.step} of {settings.steps}",
    ]
    for line in lines:
        console.print(line, highlight=False)


def _set_environment() -> None:
    """What torch and transformers read when they load: no network, short spins."""
    os.environ["HF_HUB_OFFLINE"] = "1"
    # beside one other busy process on 2 cores a step took 4 s with OpenMP's 300,000 spins before a
    # thread sleeps, 0.35 s with 1,000; alone, 0.2 s with either
    if "OMP_WAIT_POLICY" not in os.environ:
        os.environ.setdefault("GOMP_SPINCOUNT", "1000")


def _check_environment(*, has_plan: bool) -> None:
    missing = [name for name in _PACKAGES if importlib.util.find_spec(name) is None]
    if missing:
        remedy = "Install them with: pip install 'piper-moe[train]'."
        requirement = f"offer {', '.join(_PACKAGES)}"
        value = f"no {', '.join(missing)}"
        raise ConfigError(instruction("train", "this Python", requirement, value, remedy))
    num_ranks = os.environ.get("WORLD_SIZE", "1")
    remedy = "Give --plan (piper plan --out writes one), or start it without torchrun."
    fits = has_plan or num_ranks == "1"
    require(fits, "train", "WORLD_SIZE", "be 1 without a plan", num_ranks, remedy)
