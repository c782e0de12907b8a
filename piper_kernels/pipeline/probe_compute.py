"""Micro-benchmarks of the device at hand, written as a :class:`Device` for the planner.

Measured are: a large matrix product (the peak), the experts' products over rows per expert, fused
attention over sequence length, a large copy, and what a launch costs at least. Shares are what the
whole op reached, so tiles and waves are in the curves already.
"""

import os
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from piper_kernels.errors import require
from piper_kernels.functional import grouped_gemm
from piper_kernels.pipeline.curve import Curve
from piper_kernels.pipeline.platform import Device

# runs a call and says how many seconds it took
Stopwatch = Callable[[Callable[[], object]], float]


@dataclass(frozen=True, kw_only=True, slots=True)
class ProbeSizes:
    """What is measured; the defaults take a few seconds on a small CPU.

    Attributes:
        hidden_size: H of the experts' product.
        intermediate_size: its columns.
        num_experts: products in a launch.
        rows_per_expert: points of the curve, rising.
        seq_lens: points of the attention curve, rising.
        num_heads: of attention.
        head_dim: of one head.
        square_size: rows, columns and depth of the product that stands for the peak.
        copy_bytes: of the buffer that is copied.
        num_repeats: timed runs of each point; the median counts.
    """

    hidden_size: int = 1024
    intermediate_size: int = 1024
    num_experts: int = 4
    rows_per_expert: tuple[int, ...] = (1, 4, 16, 64, 256, 1024)
    seq_lens: tuple[int, ...] = (128, 512, 2048)
    num_heads: int = 8
    head_dim: int = 64
    square_size: int = 2048
    copy_bytes: int = 2**28
    num_repeats: int = 5


def probe_compute(
    device: str = "cpu",
    *,
    dtype: torch.dtype | None = None,
    sizes: ProbeSizes | None = None,
    stopwatch: Stopwatch | None = None,
) -> Device:
    """Measure a device.

    Args:
        device: as torch names it: ``cpu``, ``cuda``, ``cuda:1``.
        dtype: of products and attention; default bf16 on a GPU, fp32 on a CPU.
        sizes: what is measured.
        stopwatch: takes a call and returns its seconds; default the clock, which waits for a GPU.

    Returns:
        A :class:`Device` for the platform file; every share at most 1.

    Raises:
        ConfigError: curves without points.
    """
    sizes = sizes or ProbeSizes()
    for name in ("rows_per_expert", "seq_lens"):
        points = getattr(sizes, name)
        require(bool(points), "probe_compute", name, "have a point at least", points)
    target = torch.device(device)
    watch = stopwatch or _clock(target)
    chosen = dtype or (torch.bfloat16 if target.type == "cuda" else torch.float32)

    def measure(run: Callable[[], object]) -> float:
        run()
        return statistics.median(watch(run) for _ in range(sizes.num_repeats))

    tiny = torch.zeros(1, device=target)
    launch_s = measure(lambda: tiny.add_(1))
    gemm = [_gemm_rate(measure, target, chosen, sizes, rows) for rows in sizes.rows_per_expert]
    attention = [_attention_rate(measure, target, chosen, sizes, s) for s in sizes.seq_lens]
    peak = max(_square_rate(measure, target, chosen, sizes.square_size), *gemm, *attention)
    copied = _copy_rate(measure, target, sizes.copy_bytes)
    return Device(
        name=_name(target),
        memory_bytes=_memory_bytes(target),
        peak_flops_per_s=peak,
        memory_bandwidth_bytes_per_s=copied,
        gemm_efficiency=_curve(sizes.rows_per_expert, gemm, peak),
        attention_efficiency=_curve(sizes.seq_lens, attention, peak),
        launch_overhead_s=launch_s,
    )


def probe_rank() -> Device:
    """Measure what one rank computes with here: a GPU, or one thread and its share of the memory.

    Ranks on a CPU share its memory; each is given an equal part.
    """
    if torch.cuda.is_available():
        return probe_compute(f"cuda:{torch.cuda.current_device()}")
    num_threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        device = probe_compute("cpu")
    finally:
        torch.set_num_threads(num_threads)
    num_cores = len(os.sched_getaffinity(0))
    return device.replace(memory_bytes=device.memory_bytes // num_cores)


def _curve(points: Sequence[int], rates: Sequence[float], peak: float) -> Curve:
    return tuple((float(at), rate / peak) for at, rate in zip(points, rates, strict=True))


Measure = Callable[[Callable[[], object]], float]


def _square_rate(measure: Measure, device: torch.device, dtype: torch.dtype, size: int) -> float:
    """FLOP/s of a large dense product."""
    a, b = (torch.randn(size, size, device=device, dtype=dtype) for _ in range(2))
    return 2 * size**3 / measure(lambda: a @ b)


def _gemm_rate(
    measure: Measure, device: torch.device, dtype: torch.dtype, sizes: ProbeSizes, rows: int
) -> float:
    """FLOP/s of the experts' first product with so many rows for each expert."""
    count, hidden, width = sizes.num_experts, sizes.hidden_size, sizes.intermediate_size
    x = torch.randn(rows * count, hidden, device=device, dtype=dtype)
    weight = torch.randn(count, width, hidden, device=device, dtype=dtype)
    offsets = torch.arange(count + 1, device=device, dtype=torch.int32) * rows

    def run() -> Tensor:
        with torch.no_grad():
            return grouped_gemm(x, weight, offsets)

    return 2 * rows * count * hidden * width / measure(run)


def _attention_rate(
    measure: Measure, device: torch.device, dtype: torch.dtype, sizes: ProbeSizes, seq_len: int
) -> float:
    """FLOP/s of causal attention, counting what the mask leaves."""
    shape = (1, sizes.num_heads, seq_len, sizes.head_dim)
    q, k, v = (torch.randn(shape, device=device, dtype=dtype) for _ in range(3))

    def run() -> Tensor:
        return torch.nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True)

    return 2 * sizes.num_heads * seq_len**2 * sizes.head_dim / measure(run)


def _copy_rate(measure: Measure, device: torch.device, num_bytes: int) -> float:
    """Bytes read plus written each second."""
    source = torch.zeros(num_bytes, dtype=torch.uint8, device=device)
    target = torch.empty_like(source)
    return 2 * num_bytes / measure(lambda: target.copy_(source))


def _clock(device: torch.device) -> Stopwatch:
    """Wall clock until the device is done."""

    def watch(run: Callable[[], object]) -> float:
        start = time.perf_counter()
        run()
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        return time.perf_counter() - start

    return watch


def _name(device: torch.device) -> str:
    if device.type == "cuda":
        return torch.cuda.get_device_name(device)
    return f"{device.type}, {torch.get_num_threads()} threads"


def _memory_bytes(device: torch.device) -> int:
    if device.type == "cuda":
        return int(torch.cuda.get_device_properties(device).total_memory)
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
