"""Plan a training run before launching it: what fits, how fast, and why.

Everything printed is modelled, not measured. --explain PP,EP shows every term with its formula.

example: piper plan --model deepseek-v3 --platform h100 --gpus 256 --global-batch 2048
"""

import argparse
import json
import sys
from pathlib import Path
from typing import get_args

from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.table import Table

from piper_kernels.errors import ConfigError, PlanError, require
from piper_kernels.pipeline.exchange_time import ExchangePrices, ExpertLoad
from piper_kernels.pipeline.memory_settings import OptimizerKind
from piper_kernels.pipeline.model_config import load_model
from piper_kernels.pipeline.plan_explain import explain
from piper_kernels.pipeline.plan_pictures import Pictures
from piper_kernels.pipeline.plan_trace import chrome_trace
from piper_kernels.pipeline.planner import Ranked, SearchResult, search, to_plan
from piper_kernels.pipeline.platform_presets import PRESETS, load_platform
from piper_kernels.pipeline.rank_memory import RankMemory
from piper_kernels.pipeline.search_space import SearchSpace
from piper_kernels.pipeline.step_time import StepModel

__all__ = ["configure", "run"]


def configure(parser: argparse.ArgumentParser) -> None:
    """Add the command's arguments."""
    add = parser.add_argument
    add("--model", required=True, help="a known name, a config.json or its folder")
    add("--platform", required=True, help=f"{', '.join(PRESETS)}, or a platform file")
    add("--gpus", type=int, required=True, help="all of them are used")
    add("--global-batch", type=int, default=None, help="sequences a step (default: 4 a GPU)")
    add("--seq", type=int, default=4096, help="tokens in a sequence (default 4096)")
    add("--optimizer", choices=get_args(OptimizerKind), default="adamw")
    add("--no-shard", action="store_true", help="replicas do not share the optimizer's state")
    add("--load", type=Path, help="JSON list of rows per expert, as a run recorded them")
    add("--top", type=int, default=5, help="how many strategies to show (default 5)")
    add("--explain", metavar="PP,EP", help="every term of the best strategy with this PP and EP")
    add("--out", type=Path, help="write the best plan here; piper train takes it")
    add("--html", type=Path, help="write a report with pictures here")
    add("--pictures", type=Path, help="write the pictures as PNGs into this folder")
    add("--trace", type=Path, help="write a Chrome trace of the predicted step here")


def run(arguments: argparse.Namespace) -> int:
    """Plan, print, and write what was asked for."""
    require(arguments.top >= 1, "plan", "top", "be at least 1", arguments.top, error=PlanError)
    model = load_model(arguments.model)
    load = None if arguments.load is None else _read_load(arguments.load)
    prices = ExchangePrices(load_platform(arguments.platform), load=load)
    steps, memory = StepModel(model, prices), RankMemory(model, prices)
    space = SearchSpace(
        num_gpus=arguments.gpus,
        global_batch=arguments.global_batch or 4 * max(arguments.gpus, 1),
        seq_len=arguments.seq,
        optimizer=arguments.optimizer,
        is_optimizer_sharded=not arguments.no_shard,
        fixed={} if arguments.explain is None else _read_pair(arguments.explain),
    )
    result = search(
        steps,
        memory.peak_bytes,
        space,
        least_bytes=memory.least_bytes,
        num_best=arguments.top,
    )
    is_terminal = sys.stdout.isatty()
    console = Console(width=min(Console().width, 100) if is_terminal else 100)
    best = result.best[0]
    if arguments.explain is not None:
        sys.stdout.write(explain(steps, memory, best.strategy) + "\n")
    else:
        print_result(steps, space, result, console)
    _write(arguments, steps, memory, space, best, console)
    return 0


def print_result(
    steps: StepModel, space: SearchSpace, result: SearchResult, console: Console
) -> None:
    """The best strategies, the front, and what was ruled out."""
    head = f"{steps.model.name} on {space.num_gpus} GPUs of {steps.platform.name}"
    batch = f"{space.global_batch} sequences of {space.seq_len} tokens a step"
    console.print(f"{head}, {batch}. All numbers are modelled.", highlight=False)
    console.print(_table("fastest", steps, result.best))
    console.print(_table("less memory for more time", steps, result.front))
    console.print(f"{result.num_seen} strategies looked at, {result.num_simulated} played out.")
    for reason, count in result.reasons[:4]:
        console.print(f"  ruled out {count} times: {reason}", highlight=False)


def _table(title: str, steps: StepModel, ranked: tuple[Ranked, ...]) -> Table:
    table = Table(title=title, title_justify="left", box=SIMPLE_HEAD, padding=(0, 1, 0, 0))
    for name in ("pp", "dp", "ep", "tp"):
        table.add_column(name, justify="right")
    table.add_column("schedule")
    table.add_column("M x mb", justify="right")
    table.add_column("recompute")
    for name in ("GiB", "s/step", "MFU", "bubble"):
        table.add_column(name, justify="right")
    for one in ranked:
        s, step = one.strategy, steps.predict(one.strategy)
        table.add_row(
            *map(str, (s.pp, s.dp, s.ep, s.tp)),
            s.schedule,
            f"{s.num_microbatches} x {s.microbatch_size}",
            s.checkpointing,
            f"{one.most_bytes / 2**30:.1f}",
            f"{one.step_s:.3f}",
            f"{step.mfu:.1%}",
            f"{max(step.timeline.bubble_share, 0.0):.1%}",
        )
    return table


def _write(
    arguments: argparse.Namespace,
    steps: StepModel,
    memory: RankMemory,
    space: SearchSpace,
    best: Ranked,
    console: Console,
) -> None:
    """The files that were asked for."""
    if arguments.out is not None:
        to_plan(steps, best).save(arguments.out)
        _tell(console, "plan", arguments.out)
    if arguments.trace is not None:
        timeline = steps.predict(best.strategy).timeline
        title = f"{steps.model.name}, {best.strategy.name} (modelled)"
        arguments.trace.write_text(chrome_trace(timeline, title), encoding="utf-8")
        _tell(console, "trace", arguments.trace)
    if arguments.pictures is not None or arguments.html is not None:
        pictures = Pictures(steps, memory, space, best)
        if arguments.pictures is not None:
            pictures.save(arguments.pictures)
            _tell(console, "pictures", arguments.pictures)
        if arguments.html is not None:
            text = explain(steps, memory, best.strategy)
            arguments.html.write_text(pictures.html(text), encoding="utf-8")
            _tell(console, "report", arguments.html)


def _tell(console: Console, what: str, path: Path) -> None:
    console.print(f"{what} written to {path}", highlight=False, soft_wrap=True)


def _read_pair(text: str) -> dict[str, int]:
    """``8,32`` as pp and ep."""
    words = text.split(",")
    fits = len(words) == 2 and all(word.strip().isdigit() for word in words)
    requirement = "be PP,EP, two integers, e.g. 8,32"
    require(fits, "plan", "explain", requirement, repr(text), error=PlanError)
    return {"pp": int(words[0]), "ep": int(words[1])}


def _read_load(path: Path) -> ExpertLoad:
    """Rows per expert from a JSON list."""
    try:
        counts = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise ConfigError(
            f"plan: load must be a readable JSON file, got {path}. {error}."
        ) from None
    is_list = isinstance(counts, list) and all(
        isinstance(count, int | float) and not isinstance(count, bool) for count in counts
    )
    require(is_list, "plan", "load", "hold a list of numbers, one for each expert", path)
    return ExpertLoad.from_counts(counts)
