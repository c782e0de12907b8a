"""How fast is a layer? Piper and its rivals on named expert shapes, in turns, after the gate."""

import gc
from collections.abc import Callable
from dataclasses import replace
from functools import partial

import torch

from bench.gate import GateError, check_outputs
from bench.gpu.contestants import (
    LAYERS,
    OWN_WEIGHTS,
    PIPER,
    TORCH_GEMMS,
    layer_variant,
    torch_gemms_variant,
)
from bench.gpu.device import Device
from bench.gpu.part_log import NotMeasured, PartLog, Row
from bench.gpu.problem import gemm_flops, make_problem
from bench.moe_problem import Problem
from bench.oracle import expected_outputs
from bench.shapes import (
    DEEPSEEK_V3,
    GRANITE,
    MIXTRAL_8X7B,
    OLMOE,
    QWEN3_30B,
    QWEN3_235B,
    Shape,
)
from bench.stats import median, median_interval, paired_ratios, quantile
from bench.timing import Budget, Variant, interleave

DENSE = "dense_gemm"
MODES = ("forward", "forward_backward")
# the shape of the targets first: the budget may end before the list
SETTINGS = (
    (QWEN3_30B, 32768),
    (QWEN3_30B, 4096),
    (OLMOE, 16384),
    (MIXTRAL_8X7B, 8192),
    (DEEPSEEK_V3.with_experts(32), 8192),
    (GRANITE, 16384),
    (QWEN3_235B, 8192),
    (QWEN3_30B, 16),
)
TINY = Shape(name="tiny", H=32, I=16, E=4, K=2, family="qwen3_moe", source="made up for dry runs")
# more rows than this change the rate of a dense GEMM no further
MAX_DENSE_ROWS = 32768


def list_settings(*, is_dry: bool) -> list[tuple[Shape, int]]:
    """Shapes and numbers of tokens, the most wanted first."""
    return [(TINY, 24)] if is_dry else list(SETTINGS)


def timing_budget(*, is_dry: bool) -> Budget:
    """Rounds and seconds of one case."""
    if is_dry:
        return Budget(warm_up_rounds=0, min_rounds=1, max_rounds=1)
    return Budget(warm_up_rounds=2, min_rounds=6, max_rounds=30, seconds=1.5)


def run(log: PartLog, device: Device) -> None:
    """One row for each contestant of each case."""
    for shape, num_tokens in list_settings(is_dry=device.is_dry):
        for mode in MODES:
            name = f"{shape.name} T={num_tokens} {mode}"
            log.attempt(name, partial(run_case, log, device, shape, num_tokens, mode), fewest_s=5.0)
            gc.collect()


def run_case(log: PartLog, device: Device, shape: Shape, num_tokens: int, mode: str) -> None:
    """Gate and time everyone who takes part; their rows go to the log."""
    has_backward = mode == "forward_backward"
    case: Row = {
        "shape": shape.name,
        "T": num_tokens,
        **{letter: getattr(shape, letter) for letter in "HIEK"},
        "dtype": "bf16",
        "routing": "uniform",
        "mode": mode,
    }
    problem = make_problem(shape, num_tokens, device)
    flush = device.flusher()
    variants = gate_layers(log, case, problem, shape, has_backward=has_backward, flush=flush)
    if not any(variant.name == PIPER for variant in variants):
        raise GateError("gate: Piper itself was refused; nothing was timed.")
    flops = {v.name: gemm_flops(shape, num_tokens, has_backward=has_backward) for v in variants}
    try:
        gemms = torch_gemms_variant(problem, shape, has_backward=has_backward, flush=flush)
        variants.append(gemms)
        flops[gemms.name] = flops[PIPER]
    except NotMeasured as reason:
        log.add(**case, variant=TORCH_GEMMS, status="not measured", detail=str(reason))
    dense, flops[DENSE] = dense_variant(problem, shape, num_tokens, flush)
    samples = interleave(
        [*variants, dense], timing_budget(is_dry=device.is_dry), device.stopwatch()
    )
    for row in rate_rows(samples, flops):
        log.add(**case, **row)


def gate_layers(
    log: PartLog,
    case: Row,
    problem: Problem,
    shape: Shape,
    *,
    has_backward: bool,
    flush: Callable[[], None],
) -> list[Variant]:
    """The layers that can be had here and agree with the oracle; the others are logged."""
    expected = expected_outputs(problem, has_gradients=has_backward)
    variants = []
    for name, make in LAYERS.items():
        status, detail = "failed", ""
        try:
            layer = make(problem, shape)
            variant = layer_variant(name, layer, problem, has_backward=has_backward, flush=flush)
            assert variant.outputs is not None
            wanted = expected
            if name in OWN_WEIGHTS:
                own = ("grad_gate_up_proj", "grad_down_proj")
                wanted = [part for part in expected if part.name not in own]
            check_outputs(name, variant.outputs(), wanted, torch.bfloat16)
            variants.append(variant)
            continue
        except NotMeasured as reason:
            status, detail = "not measured", str(reason)
        except GateError as error:
            status, detail = "wrong", str(error)
        except Exception as error:
            detail = f"{type(error).__name__}: {error}"
        log.add(**case, variant=name, status=status, detail=detail[:400])
    return variants


def dense_variant(
    problem: Problem, shape: Shape, num_tokens: int, flush: Callable[[], None]
) -> tuple[Variant, int]:
    """Both GEMMs of a dense layer as wide as one expert, on as many rows; and its FLOPs."""
    num_rows = min(num_tokens * shape.K, MAX_DENSE_ROWS)
    gate_up, down = problem.module.gate_up_proj.detach()[0], problem.module.down_proj.detach()[0]
    device, dtype = gate_up.device, gate_up.dtype
    x = torch.randn(num_rows, shape.H, device=device).to(dtype)
    act = torch.randn(num_rows, shape.I, device=device).to(dtype)
    preact, y = x.new_empty(num_rows, 2 * shape.I), x.new_empty(num_rows, shape.H)

    def run_gemms() -> None:
        torch.mm(x, gate_up.T, out=preact)
        torch.mm(act, down.T, out=y)

    flops = 2 * num_rows * 3 * shape.H * shape.I
    return Variant(name=DENSE, run=run_gemms, prepare=flush), flops


def rate_rows(samples: dict[str, list[float]], flops: dict[str, int]) -> list[Row]:
    """Times, rates, shares of the dense GEMM, and Piper's speed-up, of every contestant. Pure.

    Example:
        >>> samples = {"piper": [2e-6], "dense_gemm": [1e-6]}
        >>> rows = rate_rows(samples, {"piper": 2_000_000, "dense_gemm": 2_000_000})
        >>> [(row["variant"], row["tflops"], row["of_dense"]) for row in rows]
        [('piper', 1.0, 0.5), ('dense_gemm', 2.0, 1.0)]
    """
    dense = flops[DENSE] / median(samples[DENSE])
    rows = []
    for name, seconds in samples.items():
        rate = flops[name] / median(seconds)
        row: Row = {
            "variant": name,
            "status": "ok",
            "num_rounds": len(seconds),
            "time_us": median(seconds) * 1e6,
            "p20_us": quantile(seconds, 0.2) * 1e6,
            "p80_us": quantile(seconds, 0.8) * 1e6,
            "tflops": rate / 1e12,
            "of_dense": rate / dense,
        }
        if PIPER in samples and name in LAYERS:
            ratios = paired_ratios(seconds, samples[PIPER])
            interval = median_interval(ratios)
            row |= {
                "piper_speedup": median(ratios),
                "piper_speedup_low": interval.low,
                "piper_speedup_high": interval.high,
            }
        rows.append(row)
    return rows


def shrink_to_fit(shape: Shape, free_bytes: int, kept_bytes: int) -> Shape:
    """The same layer with as many experts as memory holds with gradients, halved until they do."""
    while 2 * 2 * shape.num_parameters + kept_bytes > 0.9 * free_bytes:
        if shape.E // 2 < shape.K:
            raise NotMeasured(f"{free_bytes / 1e9:.0f} GB are too few")
        # named after the whole, however often it is halved
        whole, halved = shape.name.partition("_e")[0], shape.with_experts(shape.E // 2)
        shape = replace(halved, name=f"{whole}_e{halved.E}")
    return shape
