"""Gate before timing, records from samples, baseline by speed."""

from collections.abc import Callable, Mapping
from typing import Any

import pytest

from bench.gate import GateError
from bench.harness import Case, Roof, fastest, make_records, run_case
from bench.record import Environment
from bench.shapes import SHAPES
from bench.timing import Budget, Variant
from piper_kernels.cost import Cost
from piper_kernels.errors import ConfigError

ENVIRONMENT = Environment(
    commit="abc1234",
    machine="a test, 1 cores",
    num_threads=1,
    load=0.0,
    torch="0",
    transformers="0",
    date="2026-01-01T00:00:00+00:00",
)
CASE = Case(
    op="experts",
    mode="forward",
    shape=SHAPES["olmoe_1b_7b"],
    num_tokens=16,
    dtype="bf16",
    routing="uniform",
    cost=Cost(flops=8_000_000_000, bytes=1_000_000_000),
)
# seconds by round: dense GEMM 1 s for 4 GFLOP, reading 0.5 s for 1 GB
SAMPLES = {
    "piper": [1.0, 1.0, 2.0, 1.0, 1.0, 1.0],
    "grouped_mm": [3.0, 2.0, 2.0, 2.0, 2.0, 2.0],
    "eager": [8.0],
    "dense_gemm": [1.0] * 6,
    "read_weights": [0.5] * 6,
}
GEMM = Roof(variant="dense_gemm", amount=4_000_000_000)
READ = Roof(variant="read_weights", amount=1_000_000_000)


def test_case_title_names_sizes() -> None:
    assert CASE.title == ("experts forward olmoe_1b_7b T=16 bf16 uniform (H=2048 I=1024 E=64 K=8)")


def test_fastest_goes_by_the_median_of_those_timed() -> None:
    assert fastest(SAMPLES, ("eager", "grouped_mm", "batched_mm")) == "grouped_mm"
    with pytest.raises(ConfigError, match="fastest: names must name a timed variant"):
        fastest(SAMPLES, ("batched_mm",))


def test_make_records_computes_rates_roofs_and_paired_speedups() -> None:
    records = make_records(
        CASE,
        SAMPLES,
        gemm_roof=GEMM,
        read_roof=READ,
        baseline="grouped_mm",
        environment=ENVIRONMENT,
    )
    assert [record.variant for record in records] == ["piper", "grouped_mm", "eager"]
    piper, grouped, eager = records
    assert (piper.time_us, piper.p20_us, piper.p80_us) == (1e6, 1e6, 1e6)
    assert (piper.gflops, piper.roof_gflops, piper.roof_fraction) == (8.0, 4.0, 2.0)
    assert (piper.gb_per_s, piper.read_gb_per_s, piper.read_fraction) == (1.0, 2.0, 0.5)
    # round by round 3, 2, 1, 2, 2, 2: the interval of 6 samples is their range
    assert (piper.speedup, piper.speedup_low, piper.speedup_high) == (2.0, 1.0, 3.0)
    assert grouped.speedup == 1.0
    assert (eager.num_rounds, eager.speedup) == (1, 3.0 / 8.0)
    assert (piper.T, piper.H, piper.I, piper.E, piper.K) == (16, 2048, 1024, 64, 8)
    assert (piper.kind, piper.commit, piper.baseline) == ("measured", "abc1234", "grouped_mm")


def test_make_records_without_a_read_roof_leaves_it_out() -> None:
    samples = {name: SAMPLES[name] for name in ("piper", "grouped_mm", "dense_gemm")}
    record = make_records(
        CASE,
        samples,
        gemm_roof=GEMM,
        read_roof=None,
        baseline="grouped_mm",
        environment=ENVIRONMENT,
    )[0]
    assert record.read_gb_per_s is None
    assert record.read_fraction is None


def run_with(gate: Callable[[str, Mapping[str, Any]], None], timed: list[str]) -> list[Any]:
    variants = [
        Variant(name="piper", run=lambda: timed.append("piper"), outputs=lambda: {"y": 1}),
        Variant(name="eager", run=lambda: timed.append("eager"), outputs=lambda: {"y": 2}),
        Variant(name="dense_gemm", run=lambda: timed.append("dense_gemm")),
    ]
    return run_case(
        CASE,
        variants,
        gate=gate,
        gemm_roof=GEMM,
        read_roof=None,
        rivals=("eager",),
        environment=ENVIRONMENT,
        budget=Budget(min_rounds=1, max_rounds=1),
        stopwatch=lambda run: (run(), 1.0)[1],
    )


def test_run_case_times_nothing_after_a_red_gate() -> None:
    timed: list[str] = []

    def gate(name: str, outputs: Mapping[str, Any]) -> None:
        if outputs["y"] != 1:
            raise GateError(f"gate: {name} is wrong")

    with pytest.raises(GateError, match="gate: eager is wrong"):
        run_with(gate, timed)
    assert timed == []


def test_run_case_gates_contestants_and_not_roofs() -> None:
    gated: list[str] = []
    records = run_with(lambda name, outputs: gated.append(name), [])
    assert gated == ["piper", "eager"]
    assert [record.variant for record in records] == ["piper", "eager"]
    assert records[0].baseline == "eager"
