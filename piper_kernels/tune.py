"""Measure which tiles the Triton kernels should use for a layer here, and keep the winners.

Needs a GPU; ``--dry-run`` lists what would be measured and needs none.
"""

import argparse
from typing import TYPE_CHECKING

import torch
from rich.console import Console
from rich.progress import Progress
from rich.table import Table

from piper_kernels.config import Activation, WeightLayout
from piper_kernels.contracts import ExpertsWeights
from piper_kernels.errors import BackendError, ConfigError, instruction

if TYPE_CHECKING:
    from piper_kernels.triton.tuner import Outcome

DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32}
# H, I, E, K of published models' config.json; tests hold them to bench/shapes.py
MODELS = {
    "mixtral_8x7b": (4096, 14336, 8, 2),
    "olmoe_1b_7b": (2048, 1024, 64, 8),
    "qwen3_30b_a3b": (2048, 768, 128, 8),
    "qwen3_235b_a22b": (4096, 1536, 128, 8),
    "deepseek_v3": (7168, 2048, 256, 8),
    "gpt_oss_20b": (2880, 2880, 32, 4),
    "gpt_oss_120b": (2880, 2880, 128, 4),
}


def read_sizes(text: str) -> tuple[int, int, int, int]:
    """``(H, I, E, K)`` of a named model, or of four numbers.

    Raises:
        ConfigError: neither.

    Example:
        >>> read_sizes("olmoe_1b_7b"), read_sizes("64,32,8,2")
        ((2048, 1024, 64, 8), (64, 32, 8, 2))
    """
    if text in MODELS:
        return MODELS[text]
    parts = text.split(",")
    if len(parts) == 4 and all(part.isdecimal() and int(part) for part in parts):
        hidden, intermediate, experts, top_k = map(int, parts)
        return hidden, intermediate, experts, top_k
    remedy = f"Known models: {', '.join(MODELS)}."
    requirement = "be a known model or H,I,E,K, e.g. 2048,768,128,8"
    raise ConfigError(instruction("piper tune", "--model", requirement, repr(text), remedy))


def configure(parser: argparse.ArgumentParser) -> None:
    """Add the command's arguments."""
    parser.add_argument("--model", default="qwen3_30b_a3b", help="a name, or H,I,E,K")
    parser.add_argument("--dtype", choices=DTYPES, default="bf16", help="of x and the weights")
    parser.add_argument(
        "--tokens", type=int, nargs="+", default=[4096], help="tokens of a microbatch"
    )
    parser.add_argument("--transposed", action="store_true", help="weights are [E, in, out]")
    parser.add_argument("--interleaved", action="store_true", help="gate and up alternate")
    parser.add_argument("--ungated", action="store_true", help="no gate")
    parser.add_argument("--activation", default="silu", help="the activation's function")
    parser.add_argument("--dry-run", action="store_true", help="list what would be measured")


def run(arguments: argparse.Namespace) -> int:
    """List or measure; returns the exit status."""
    console = Console()
    sizes = read_sizes(arguments.model)
    if any(tokens < 1 for tokens in arguments.tokens):
        value = arguments.tokens
        raise ConfigError(instruction("piper tune", "--tokens", "be at least 1", value))
    if arguments.dry_run:
        console.print(list_candidates(sizes, DTYPES[arguments.dtype], arguments.tokens))
        return 0
    if not torch.cuda.is_available():
        remedy = "Run it where torch.cuda.is_available(), or use --dry-run."
        requirement = "have a GPU and its driver to measure on"
        raise BackendError(instruction("piper tune", "this machine", requirement, "none", remedy))
    console.print(measure(arguments, sizes, console))
    return 0


def list_candidates(
    sizes: tuple[int, int, int, int], dtype: torch.dtype, tokens: list[int]
) -> Table:
    """What would be measured, for the smallest target of this torch's vendor."""
    from piper_kernels.triton.candidates import candidate_tiles
    from piper_kernels.triton.tile_key import GEMMS, op_of, rows_bucket

    *_, num_experts, top_k = sizes
    table = Table("GEMM", "rows an expert", "candidate", title="would be measured")
    for num_tokens in tokens:
        num_rows = num_tokens * top_k
        for gemm in GEMMS:
            found = candidate_tiles(
                op_of(gemm),
                num_rows=num_rows,
                num_experts=num_experts,
                element_bytes=dtype.itemsize,
                is_hip=torch.version.hip is not None,
            )
            bucket = str(rows_bucket(num_rows, num_experts))
            for tiles in found:
                note = " (default)" if tiles == found[0] else ""
                table.add_row(gemm, bucket, tiles.summary() + note)
    return table


def measure(
    arguments: argparse.Namespace, sizes: tuple[int, int, int, int], console: Console
) -> Table:
    """Tune every number of tokens on random tensors; the table of what was found."""
    from piper_kernels.permutation import Permutation
    from piper_kernels.triton.launch_tiles import open_store, tune_into
    from piper_kernels.triton.tile_key import GEMMS, Gemm, rows_bucket
    from piper_kernels.triton.tiles import TileConfig

    device = torch.device("cuda", torch.cuda.current_device())
    store = open_store(device, is_tuning=True)
    weights = random_weights(arguments, sizes, device)
    hidden, _, num_experts, top_k = sizes
    table = new_table()
    with Progress(console=console) as progress:
        for num_tokens in arguments.tokens:
            task = progress.add_task(f"{num_tokens} tokens", total=None)

            def step(gemm: Gemm, tiles: TileConfig, task: object = task) -> None:
                text = f"{gemm} {tiles.summary()}"
                progress.update(task, advance=1, description=text)  # type: ignore[arg-type]

            x = torch.randn(num_tokens, hidden, device=device, dtype=DTYPES[arguments.dtype])
            scores = torch.rand(num_tokens, num_experts, device=device)
            gates, ids = scores.topk(top_k)
            permutation = Permutation.from_expert_ids(ids, num_experts)
            outcomes = tune_into(store, x, gates, permutation, weights, GEMMS, step)
            bucket = rows_bucket(num_tokens * top_k, num_experts)
            for gemm, outcome in outcomes.items():
                add_outcome(table, gemm, bucket, outcome)
    return table


def new_table() -> Table:
    """The closing table, empty."""
    columns = ("GEMM", "rows an expert", "default", "us", "winner", "us", "ratio", "skipped")
    return Table(*columns, title="tuned")


def add_outcome(table: Table, gemm: str, bucket: int, outcome: "Outcome") -> None:
    """One row of the closing table."""
    table.add_row(
        gemm,
        str(bucket),
        outcome.default.summary(),
        f"{outcome.default_s * 1e6:.1f}",
        outcome.winner.summary(),
        f"{outcome.winner_s * 1e6:.1f}",
        f"{outcome.speedup:.2f}",
        "; ".join(sorted({skipped.reason for skipped in outcome.skipped})) or "-",
    )


def random_weights(
    arguments: argparse.Namespace, sizes: tuple[int, int, int, int], device: torch.device
) -> ExpertsWeights:
    """Weights of order 1 / sqrt(in), in the layout asked for."""
    hidden, intermediate, num_experts, _ = sizes
    layout = WeightLayout(
        is_transposed=arguments.transposed,
        is_interleaved=arguments.interleaved,
        is_gated=not arguments.ungated,
    )
    gate_up, down = layout.weight_shapes(num_experts, hidden, intermediate)
    dtype = DTYPES[arguments.dtype]
    return ExpertsWeights(
        gate_up_proj=torch.randn(gate_up, device=device, dtype=dtype) * hidden**-0.5,
        down_proj=torch.randn(down, device=device, dtype=dtype) * intermediate**-0.5,
        gate_up_bias=None,
        down_bias=None,
        layout=layout,
        activation=Activation(function=arguments.activation),
    )
