"""What this machine can do at most: copy bandwidth and dense bf16 GEMMs, measured here and now."""

from collections.abc import Callable
from functools import partial

import torch

from bench.gpu.device import Device
from bench.gpu.part_log import PartLog, Row
from bench.stats import median, quantile
from bench.timing import Budget, Variant, interleave

COPY, GEMM = "copy", "dense_gemm"
GEMM_SIZES = ((8192, 8192, 8192), (16384, 8192, 4096), (32768, 2048, 2048))


def run(log: PartLog, device: Device) -> None:
    """One row for each roof."""
    copy_bytes = 2**16 if device.is_dry else 2**31
    log.attempt(COPY, partial(measure_copy, device, copy_bytes))
    for size in ((64, 64, 64),) if device.is_dry else GEMM_SIZES:
        log.attempt(f"{GEMM} {'x'.join(map(str, size))}", partial(measure_gemm, device, size))


def measure_copy(device: Device, num_bytes: int) -> Row:
    """Bytes read plus bytes written per second by one device-to-device copy."""
    source = torch.zeros(num_bytes // 4, dtype=torch.int32, device=device.torch_device)
    target = torch.empty_like(source)
    return {
        "roof": COPY,
        **_rate(device, partial(target.copy_, source), 2 * num_bytes / 1e9, "gb_per_s"),
    }


def measure_gemm(device: Device, size: tuple[int, int, int]) -> Row:
    """FLOPs per second of one ``torch.mm`` in bf16 on random data."""
    m, n, k = size
    where, dtype = device.torch_device, torch.bfloat16
    left, right = (
        torch.randn(m, k, device=where).to(dtype),
        torch.randn(k, n, device=where).to(dtype),
    )
    out = torch.empty(m, n, dtype=dtype, device=where)
    run_gemm = partial(torch.mm, left, right, out=out)
    return {"roof": GEMM, **_rate(device, run_gemm, 2 * m * n * k / 1e12, "tflops")}


def _rate(device: Device, work: Callable[[], object], amount: float, unit: str) -> Row:
    budget = Budget(warm_up_rounds=3, min_rounds=3, max_rounds=20, seconds=1.0)
    samples = interleave([Variant(name="roof", run=work)], budget, device.stopwatch())["roof"]
    return {
        unit: amount / median(samples),
        "time_us": median(samples) * 1e6,
        "p20_us": quantile(samples, 0.2) * 1e6,
        "p80_us": quantile(samples, 0.8) * 1e6,
        "num_rounds": len(samples),
    }
