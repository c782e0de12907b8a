"""The compute probe: with a clock of our own its arithmetic is exact; on this machine it runs."""

from collections.abc import Callable

import pytest
import torch

from piper_kernels.errors import ConfigError
from piper_kernels.pipeline.device_time import gemm_time
from piper_kernels.pipeline.platform import Device
from piper_kernels.pipeline.probe_compute import ProbeSizes, probe_compute

SMALL = ProbeSizes(
    hidden_size=16,
    intermediate_size=8,
    num_experts=2,
    rows_per_expert=(1, 4),
    seq_lens=(8, 16),
    num_heads=2,
    head_dim=4,
    square_size=32,
    copy_bytes=1000,
    num_repeats=1,
)


def one_second(run: Callable[[], object]) -> float:
    run()
    return 1.0


def test_probe_compute_counts_work_exactly() -> None:
    found = probe_compute(sizes=SMALL, stopwatch=one_second)
    assert found.peak_flops_per_s == 2 * 32**3
    assert found.memory_bandwidth_bytes_per_s == 2000
    assert found.launch_overhead_s == 1
    shares = [2 * rows * 2 * 16 * 8 / 2**16 for rows in (1, 4)]
    assert found.gemm_efficiency == ((1.0, shares[0]), (4.0, shares[1]))
    assert found.attention_efficiency == ((8.0, 2 * 2 * 64 * 4 / 2**16), (16.0, 2**12 / 2**16))


def test_probe_compute_takes_the_median() -> None:
    times = iter([3.0, 1.0, 2.0] * 100)
    three = ProbeSizes(**{**{f: getattr(SMALL, f) for f in SMALL.__slots__}, "num_repeats": 3})

    def watch(run: Callable[[], object]) -> float:
        run()
        return next(times)

    assert probe_compute(sizes=three, stopwatch=watch).launch_overhead_s == 2.0


def test_probe_compute_measures_this_machine() -> None:
    found = probe_compute(sizes=SMALL, dtype=torch.float32)
    assert found == Device.from_json(found.to_json())
    assert found.memory_bytes > 2**28
    assert 0 < found.launch_overhead_s < 1
    assert all(0 < share <= 1 for _, share in found.gemm_efficiency + found.attention_efficiency)
    # at a measured point the model gives the measured time back, launch aside
    (rows, share), *_ = found.gemm_efficiency
    modelled = gemm_time(found, rows, 8, 16, 2, element_bytes=4).compute_s
    assert modelled == pytest.approx(2 * rows * 2 * 8 * 16 / (share * found.peak_flops_per_s))


def test_probe_compute_wants_points() -> None:
    with pytest.raises(ConfigError, match="seq_lens must have a point at least"):
        probe_compute(sizes=ProbeSizes(seq_lens=()))
