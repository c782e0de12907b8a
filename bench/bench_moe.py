"""MoE layers on the CPU: Piper against Hugging Face's eager, grouped_mm and batched_mm experts.

    python -m bench.bench_moe --quick
    python -m bench.bench_moe --shape olmoe_1b_7b,granite_moe_3b --tokens 16,256 --dtype bf16

Every variant is the same Hugging Face module with another experts implementation selected. All are
checked against the oracle before anything is timed, then timed in turns in this one process, with
a dense GEMM (and, at small T, a read of the weights) in the same rounds. `speed-up` is the median,
over rounds, of the fastest Hugging Face implementation's time divided by this variant's.
"""

import argparse
import gc
import itertools
import math
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from rich.console import Console

from bench.gate import check_outputs
from bench.harness import Case, Roof, run_case
from bench.moe_problem import BLOCK_ROUTING, DTYPES, Op, Problem, build_problem
from bench.moe_variants import (
    MAX_BATCHED_BYTES,
    MAX_DECODE_TOKENS,
    PIPER,
    Mode,
    batched_mm_bytes,
    dense_gemm_variant,
    implementation_variant,
    read_weights_variant,
    register_implementations,
)
from bench.oracle import expected_outputs
from bench.record import (
    Environment,
    Record,
    check_writable,
    describe_environment,
    write_records,
)
from bench.report import make_console, plot_speedups, print_case, print_environment
from bench.shapes import SHAPES, Shape, find_shape
from bench.stats import geometric_mean
from bench.targets import Target, exit_status, print_targets
from bench.timing import Budget, Stopwatch, Variant, wall_clock
from piper_kernels.cost import (
    Cost,
    ExpertsSizes,
    experts_backward_cost,
    experts_forward_cost,
    route_cost,
)
from piper_kernels.errors import PiperError

DEFAULT_SHAPES = (
    "mixtral_8x7b_i3584",
    "olmoe_1b_7b",
    "qwen3_30b_a3b",
    "deepseek_v3_e32",
    "granite_moe_3b",
)
DEFAULT_TOKENS = (1, 4, 16, 64, 256, 1024, 4096)
RECORDS = "moe_cpu.jsonl"
RIVALS = ("eager", "grouped_mm", "batched_mm")
# eager's backward is quadratic in E, so it takes part once, at the T of the list nearest to this
EAGER_BACKWARD_TOKENS = 64


@dataclass(frozen=True, kw_only=True, slots=True)
class Settings:
    """What one run covers."""

    ops: tuple[Op, ...]
    modes: tuple[Mode, ...]
    shapes: tuple[Shape, ...]
    dtypes: tuple[str, ...]
    tokens: tuple[int, ...]
    routings: tuple[str, ...]
    budget: Budget


def list_cases(settings: Settings) -> list[tuple[Op, Shape, str, int, str]]:
    """Every (op, shape, dtype, T, routing); a block routes by itself, so it has one routing."""
    cases: list[tuple[Op, Shape, str, int, str]] = []
    for op in settings.ops:
        routings = settings.routings if op == "experts" else (BLOCK_ROUTING,)
        axes = itertools.product(settings.shapes, settings.dtypes, settings.tokens, routings)
        cases += [(op, *axis) for axis in axes]
    return cases


def case_cost(problem: Problem, mode: Mode) -> Cost:
    """FLOPs and compulsory bytes of Piper's plan; a block adds its router."""
    module = problem.experts
    num_experts, hidden_size = module.gate_up_proj.shape[0], problem.x.shape[1]
    layout = problem.family.layout
    sizes = ExpertsSizes(
        num_tokens=problem.x.shape[0],
        hidden_size=hidden_size,
        intermediate_size=module.down_proj.shape[1 if layout.is_transposed else 2],
        num_experts=num_experts,
        top_k=problem.expert_ids.shape[1],
        element_bytes=problem.x.element_size(),
        layout=layout,
        num_hit_experts=len(problem.expert_ids.unique()),
    )
    cost = experts_forward_cost(sizes, keeps_preact=mode == "forward_backward")
    if mode == "forward_backward":
        cost = cost + experts_backward_cost(sizes)
    return cost + route_cost(sizes) if problem.op == "block" else cost


def choose_variants(problem: Problem, mode: Mode, *, has_eager_backward: bool) -> list[Variant]:
    """The contestants that make sense here, Piper first."""
    variants = [
        implementation_variant(problem, mode, PIPER),
        implementation_variant(problem, mode, "grouped_mm"),
    ]
    if mode == "forward":
        variants.append(implementation_variant(problem, mode, "eager"))
    elif has_eager_backward:
        variants.append(implementation_variant(problem, mode, "eager", max_rounds=1))
    is_small = problem.x.shape[0] <= MAX_DECODE_TOKENS
    if is_small and batched_mm_bytes(problem) <= MAX_BATCHED_BYTES:
        variants.append(implementation_variant(problem, mode, "batched_mm"))
    return variants


def run_problem(
    problem: Problem,
    case: Case,
    mode: Mode,
    *,
    has_eager_backward: bool,
    environment: Environment,
    budget: Budget,
    stopwatch: Stopwatch = wall_clock,
) -> list[Record]:
    """Gate and time all variants of one problem in one mode."""
    expected = expected_outputs(problem, has_gradients=mode == "forward_backward")
    dtype = problem.x.dtype

    def gate(variant: str, outputs: Mapping[str, torch.Tensor]) -> None:
        check_outputs(variant, outputs, expected, dtype)

    contestants = choose_variants(problem, mode, has_eager_backward=has_eager_backward)
    dense, dense_flops = dense_gemm_variant(problem)
    variants, read_roof = [*contestants, dense], None
    if problem.x.shape[0] <= MAX_DECODE_TOKENS and mode == "forward":
        read, read_bytes = read_weights_variant(problem)
        variants.append(read)
        read_roof = Roof(variant=read.name, amount=read_bytes)
    return run_case(
        case,
        variants,
        gate=gate,
        gemm_roof=Roof(variant=dense.name, amount=dense_flops),
        read_roof=read_roof,
        rivals=RIVALS,
        environment=environment,
        budget=budget,
        stopwatch=stopwatch,
    )


def run(settings: Settings, console: Console, environment: Environment) -> Iterator[list[Record]]:
    """Run the cases of the settings one by one; print and yield the records of each."""
    register_implementations()
    eager_tokens = min(settings.tokens, key=lambda tokens: abs(tokens - EAGER_BACKWARD_TOKENS))
    for op, shape, dtype, num_tokens, routing in list_cases(settings):
        problem = build_problem(op, shape, num_tokens, dtype, routing)
        for mode in settings.modes:
            case = Case(
                op=op,
                mode=mode,
                shape=shape,
                num_tokens=num_tokens,
                dtype=dtype,
                routing=routing,
                cost=case_cost(problem, mode),
            )
            found = run_problem(
                problem,
                case,
                mode,
                has_eager_backward=num_tokens == eager_tokens,
                environment=environment,
                budget=settings.budget,
            )
            print_case(case.title, found, console)
            yield found
        # gigabytes of weights: freed before the next problem is built
        del problem
        gc.collect()


def _speedups(records: Sequence[Record], mode: Mode, *, has_decode: bool) -> list[Record]:
    """Piper's experts records of one mode; T <= 16 in the forward is decode, a case of its own."""
    return [
        record
        for record in records
        if (record.variant, record.op, record.mode) == (PIPER, "experts", mode)
        and (record.T <= MAX_DECODE_TOKENS) == has_decode
    ]


def _at_the_roof(record: Record) -> float:
    """The speed-up that a variant at the roof would have had: reading in decode, else the GEMM."""
    is_decode = record.read_fraction is not None
    fraction = record.read_fraction if is_decode else record.roof_fraction
    return record.speedup / (fraction or 1.0)


def list_targets(records: Sequence[Record]) -> list[Target]:
    """What the CPU path is held to, over the experts cases of this run."""
    train = [
        record
        for has_decode in (False, True)
        for record in _speedups(records, "forward_backward", has_decode=has_decode)
    ]
    forward = _speedups(records, "forward", has_decode=False)
    decode = _speedups(records, "forward", has_decode=True)

    def geometric(name: str, threshold: float, found: Sequence[Record]) -> Target:
        title = f"{name}, geometric mean over the fastest rival"
        if not found:
            return Target(title, threshold, None)
        measured = geometric_mean([record.speedup for record in found])
        return Target(title, threshold, measured, geometric_mean([*map(_at_the_roof, found)]))

    def worst(name: str, found: Sequence[Record]) -> Target:
        lowest = min((record.speedup_low for record in found), default=None)
        return Target(f"{name}, worst case, lower end of 95 %", 0.97, lowest)

    return [
        geometric("forward+backward", 1.5, train),
        worst("forward+backward", train),
        geometric("forward, T > 16", 1.3, forward),
        worst("forward, T > 16", forward),
        geometric("decode, T <= 16", 1.5, decode),
    ]


def _words(text: str) -> tuple[str, ...]:
    return tuple(word.strip() for word in text.split(",") if word.strip())


def make_parser() -> argparse.ArgumentParser:
    """The command line."""
    parser = argparse.ArgumentParser(
        prog="python -m bench.bench_moe",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--device", choices=("cpu",), default="cpu", help="where it runs")
    parser.add_argument("--shape", type=_words, default=DEFAULT_SHAPES, help=", ".join(SHAPES))
    parser.add_argument("--dtype", type=_words, default=tuple(DTYPES), help="fp32,bf16")
    parser.add_argument("--tokens", type=_words, default=DEFAULT_TOKENS, help="T, e.g. 1,16,256")
    parser.add_argument("--routing", type=_words, default=("uniform", "skewed"))
    parser.add_argument("--op", type=_words, default=("experts",), help="experts,block")
    parser.add_argument("--mode", type=_words, default=("forward", "forward_backward"))
    parser.add_argument("--seconds", type=float, default=4.0, help="timed seconds per case, about")
    parser.add_argument("--quick", action="store_true", help="two small shapes, under 3 minutes")
    parser.add_argument("--out", type=Path, help="folder for moe_cpu.jsonl and moe_cpu.png")
    parser.add_argument("--strict", action="store_true", help="a missed target is exit status 1")
    return parser


def read_settings(arguments: argparse.Namespace) -> Settings:
    """Settings from the command line.

    Raises:
        ConfigError: an unknown shape.
        SystemExit: an unknown word on another axis, by argparse.
    """
    parser = make_parser()
    known = {
        "dtype": tuple(DTYPES),
        "op": ("experts", "block"),
        "mode": ("forward", "forward_backward"),
        "routing": ("uniform", "skewed", "one_expert_empty", "all_to_one"),
    }
    for axis, words in known.items():
        unknown = [word for word in getattr(arguments, axis) if word not in words]
        if unknown:
            parser.error(f"--{axis}: {unknown[0]!r} is none of {', '.join(words)}")
    for axis in (*known, "shape", "tokens"):
        if not getattr(arguments, axis):
            parser.error(f"--{axis}: nothing is named")
    if not (0 < arguments.seconds < math.inf):
        parser.error(f"--seconds: {arguments.seconds} is not a number above 0")
    if not all(str(tokens).isdecimal() and int(tokens) > 0 for tokens in arguments.tokens):
        parser.error(f"--tokens: {','.join(map(str, arguments.tokens))} are not integers >= 1")
    shapes = ("granite_moe_3b", "olmoe_1b_7b") if arguments.quick else arguments.shape
    return Settings(
        ops=arguments.op,
        modes=arguments.mode,
        shapes=tuple(map(find_shape, shapes)),
        dtypes=("bf16",) if arguments.quick else arguments.dtype,
        tokens=(4, 256) if arguments.quick else tuple(map(int, arguments.tokens)),
        routings=("uniform",) if arguments.quick else arguments.routing,
        budget=Budget(min_rounds=6, seconds=1.0 if arguments.quick else arguments.seconds),
    )


def main(words: Sequence[str] | None = None) -> int:
    """Run the bench and return the exit status."""
    arguments = make_parser().parse_args(words)
    console = make_console()
    records: list[Record] = []
    try:
        settings = read_settings(arguments)
        # before anything is measured that could not be kept
        if arguments.out:
            check_writable(arguments.out / RECORDS)
        environment = describe_environment()
        print_environment(environment, console)
        for found in run(settings, console, environment):
            records += found
            # at once: a later case may be refused, and a long run may be stopped
            if arguments.out:
                write_records(arguments.out / RECORDS, found)
    except PiperError as error:
        print(f"bench_moe: {error}", file=sys.stderr)
        return 2
    if arguments.out:
        plot_speedups(arguments.out / "moe_cpu.png", records, PIPER)
        console.print(f"written: {arguments.out}/moe_cpu.jsonl and moe_cpu.png")
    targets = list_targets(records)
    print_targets(targets, console)
    return exit_status(targets, is_strict=arguments.strict)


if __name__ == "__main__":
    sys.exit(main())
