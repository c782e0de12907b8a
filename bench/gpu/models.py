"""One layer's experts of the eight models of the Piper paper: TFLOP/s and MFU, bf16, this GPU.

The paper (figure 11) gives TFLOP/s of one layer on one MI250X node with expert-data parallelism;
its numbers stand beside ours as the published ones, not as a comparison of equals.
"""

import gc
from dataclasses import dataclass
from functools import partial

import torch

from bench.gate import check_outputs
from bench.gpu.contestants import PIPER, layer_variant, piper_layer
from bench.gpu.device import Device
from bench.gpu.part_log import PartLog, Row
from bench.gpu.problem import gemm_flops, make_problem
from bench.gpu.sweep import DENSE, MODES, TINY, dense_variant, shrink_to_fit, timing_budget
from bench.oracle import expected_outputs
from bench.shapes import DEEPSEEK_V2, DEEPSEEK_V3, MIXTRAL_8X7B, MIXTRAL_8X22B, Shape
from bench.stats import median
from bench.timing import interleave

NUM_TOKENS = 8192


@dataclass(frozen=True, slots=True)
class PaperModel:
    """A model and what the paper's figure 11 says of its layer on MI250X."""

    shape: Shape
    published_tflops: float


def _shape(name: str, family: str, model: str, sizes: tuple[int, int, int, int]) -> Shape:
    hidden, inter, experts, top_k = sizes
    return Shape(
        name=name,
        H=hidden,
        I=inter,
        E=experts,
        K=top_k,
        family=family,
        source=f"{model} config.json",
    )


LLAMA4_MAVERICK = _shape(
    "llama4_maverick", "llama4", "meta-llama/Llama-4-Maverick-17B-128E", (5120, 8192, 128, 1)
)
LLAMA4_SCOUT = _shape(
    "llama4_scout", "llama4", "meta-llama/Llama-4-Scout-17B-16E", (5120, 8192, 16, 1)
)
ARCTIC = _shape("arctic", "arctic", "Snowflake/snowflake-arctic-base", (7168, 4864, 128, 2))
KIMI_K2 = _shape("kimi_k2", "kimi_k2", "moonshotai/Kimi-K2-Base", (7168, 2048, 384, 8))
PAPER_MODELS = (
    PaperModel(MIXTRAL_8X7B, 117.5),
    PaperModel(MIXTRAL_8X22B, 129.4),
    PaperModel(LLAMA4_SCOUT, 109.6),
    PaperModel(DEEPSEEK_V2, 78.3),
    PaperModel(DEEPSEEK_V3, 84.3),
    PaperModel(ARCTIC, 104.2),
    PaperModel(LLAMA4_MAVERICK, 112.4),
    PaperModel(KIMI_K2, 81.7),
)


def list_settings(*, is_dry: bool) -> list[tuple[Shape, int]]:
    """Shapes and numbers of tokens."""
    if is_dry:
        return [(TINY, 24)]
    return [(model.shape, NUM_TOKENS) for model in PAPER_MODELS]


def run(log: PartLog, device: Device) -> None:
    """One row for each model and mode."""
    published = {model.shape.name: model.published_tflops for model in PAPER_MODELS}
    for shape, num_tokens in list_settings(is_dry=device.is_dry):
        cells: Row = {"model": shape.name, "published_mi250x_tflops": published.get(shape.name)}
        for mode in MODES:
            run_one = partial(run_model, device, shape, num_tokens, mode, cells)
            log.attempt(f"{shape.name} T={num_tokens} {mode}", run_one, fewest_s=5.0)
            gc.collect()


def run_model(device: Device, shape: Shape, num_tokens: int, mode: str, cells: Row) -> Row:
    """Gate and time one layer; halve its experts until it fits the memory."""
    has_backward = mode == "forward_backward"
    # pre-activation and its gradient, activations, rows and their gradient
    kept = num_tokens * shape.K * (6 * shape.I + 2 * shape.H) * 2
    fitting = shrink_to_fit(shape, device.free_bytes(), kept)
    problem = make_problem(fitting, num_tokens, device)
    flush = device.flusher()
    layer = piper_layer(problem, fitting)
    variant = layer_variant(PIPER, layer, problem, has_backward=has_backward, flush=flush)
    assert variant.outputs is not None
    expected = expected_outputs(problem, has_gradients=has_backward)
    check_outputs(PIPER, variant.outputs(), expected, torch.bfloat16)
    dense, dense_flops = dense_variant(problem, fitting, num_tokens, flush)
    budget = timing_budget(is_dry=device.is_dry)
    samples = interleave([variant, dense], budget, device.stopwatch())
    rate = gemm_flops(fitting, num_tokens, has_backward=has_backward) / median(samples[PIPER])
    machine = device.machine
    return {
        **cells,
        "mode": mode,
        "T": num_tokens,
        **{letter: getattr(fitting, letter) for letter in "HIEK"},
        "num_experts_of_the_model": shape.E,
        "time_us": median(samples[PIPER]) * 1e6,
        "num_rounds": len(samples[PIPER]),
        "tflops": rate / 1e12,
        "of_dense": rate / (dense_flops / median(samples[DENSE])),
        "mfu": None if machine is None else rate / machine.flops_per_s,
        "peak_of": None if machine is None else machine.name,
    }
