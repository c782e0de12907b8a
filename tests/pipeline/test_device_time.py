"""Products, attention and traffic on a device whose numbers are easy."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from piper_kernels.errors import ConfigError
from piper_kernels.pipeline.device_time import attention_s, gemm_time, traffic_s
from piper_kernels.pipeline.platform import Device
from piper_kernels.pipeline.platform_presets import load_platform

H100 = load_platform("h100").device


def device(**changes: object) -> Device:
    fields: dict[str, object] = {
        "name": "tiny",
        "memory_bytes": 1,
        "peak_flops_per_s": 1000.0,
        "memory_bandwidth_bytes_per_s": 100.0,
    }
    return Device(**{**fields, **changes})


def test_gemm_time_takes_the_slower_of_compute_and_memory() -> None:
    # 2 * 10 * 20 * 30 FLOP at 1000 FLOP/s; 2 * (300 + 600 + 200) bytes at 100 B/s
    time = gemm_time(device(), 10, 20, 30)
    assert (time.compute_s, time.memory_s, time.seconds) == (12.0, 22.0, 22.0)
    assert time.intensity == pytest.approx(12000 / 2200)
    fast = gemm_time(device(memory_bandwidth_bytes_per_s=1e6), 10, 20, 30)
    assert fast.seconds == 12.0


def test_gemm_time_rounds_up_tiles_and_waves() -> None:
    tiled = device(gemm_tile_rows=8, gemm_tile_columns=8, num_compute_units=3)
    # 2 x 3 tiles are 2 waves of 3; one column more makes 2 x 4 tiles, 3 waves
    assert gemm_time(tiled, 10, 20, 30).fill == pytest.approx(200 / (2 * 3 * 64))
    assert gemm_time(tiled, 10, 25, 30).fill == pytest.approx(250 / (3 * 3 * 64))
    # two experts share the waves: 12 tiles, 4 waves
    assert gemm_time(tiled, 10, 20, 30, 2).compute_s == 2 * gemm_time(tiled, 10, 20, 30).compute_s


def test_gemm_time_reads_the_curve_at_rows() -> None:
    curved = device(gemm_efficiency=((10.0, 0.5), (1000.0, 1.0)), launch_overhead_s=1.0)
    assert gemm_time(curved, 10, 20, 30).compute_s == 24.0
    assert gemm_time(curved, 10, 20, 30).seconds == 25.0
    # the smallest size decides, so a weight gradient of few rows is as hard as their forward
    assert gemm_time(curved, 20, 30, 10).compute_s == 24.0


def test_gemm_time_few_rows_are_bound_by_memory() -> None:
    # papers.md 1.6: intensity is about m for m << n, k; on an H100 the ridge is at 295
    time = gemm_time(H100, 16, 4096, 4096)
    assert time.intensity == pytest.approx(16, rel=0.02)
    assert time.memory_s > 0
    assert gemm_time(H100, 8192, 8192, 8192).intensity > H100.ridge_flops_per_byte


def test_gemm_time_of_nothing_is_nothing() -> None:
    assert gemm_time(H100, 0, 128, 128).seconds == 0
    with pytest.raises(ConfigError, match=r"rows, count must be >= 0, got \(-1, 1\)"):
        gemm_time(H100, -1, 128, 128)


@given(
    rows=st.integers(1, 5000),
    columns=st.integers(1, 5000),
    depth=st.integers(1, 5000),
    count=st.integers(1, 64),
)
def test_gemm_time_is_never_below_the_roof(rows: int, columns: int, depth: int, count: int) -> None:
    time = gemm_time(H100, rows, columns, depth, count)
    assert time.compute_s >= time.flops / H100.peak_flops_per_s
    assert 0 < time.fill <= 1
    assert time.seconds >= max(time.compute_s, time.memory_s)


def attend(target: Device, **changes: object) -> float:
    fields: dict[str, object] = {
        "num_sequences": 2,
        "seq_len": 16,
        "num_heads": 3,
        "qk_dim": 5,
        "v_dim": 7,
    }
    return attention_s(target, **{**fields, **changes})


def test_attention_s_counts_two_products() -> None:
    # 2 * 2 * 3 * 256 * (5 + 7) FLOP at 1000 FLOP/s
    assert attend(device(), is_causal=False) == pytest.approx(36.864)
    assert attend(device()) == pytest.approx(18.432)
    curved = device(attention_efficiency=((16.0, 0.5),), launch_overhead_s=1.0)
    assert attend(curved) == pytest.approx(37.864)


def test_attention_s_unfused_moves_the_scores() -> None:
    # with free products only the square's 9 bytes an element are left
    target = device(peak_flops_per_s=1e15, memory_bandwidth_bytes_per_s=1e3)
    square = 2 * 3 * 256
    products = gemm_time(target, 16, 16, 5, 6).seconds + gemm_time(target, 16, 7, 16, 6).seconds
    assert attend(target, is_fused=False) == pytest.approx(products + 9 * square / 1e3)
    assert attend(H100, seq_len=4096, is_fused=False) > attend(H100, seq_len=4096)


def test_traffic_s_is_bytes_over_copy_bandwidth() -> None:
    slow = device(memory_efficiency=0.5, launch_overhead_s=0.25)
    assert traffic_s(slow, 100.0, num_launches=2) == 2.5
