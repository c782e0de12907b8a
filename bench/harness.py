"""The harness: gate, then interleaved timing, then records. Knows nothing of what is timed.

A number is written only for a variant that agrees with the oracle, beside the roof measured in the
same rounds, with its spread, its commit and its machine.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from bench.record import Environment, Record
from bench.shapes import Shape
from bench.stats import median, median_interval, paired_ratios, quantile
from bench.timing import Budget, Stopwatch, Variant, interleave, wall_clock
from piper_kernels.cost import Cost
from piper_kernels.errors import require

# raises if the named variant's outputs are wrong
Gate = Callable[[str, Mapping[str, Any]], None]


@dataclass(frozen=True, kw_only=True, slots=True)
class Case:
    """What is timed.

    Attributes:
        op: name of the op or system.
        mode: ``forward`` or ``forward_backward``.
        shape: sizes and their source.
        num_tokens: T.
        dtype: as it is printed.
        routing: as it is printed.
        cost: FLOPs and compulsory bytes of one run.
    """

    op: str
    mode: str
    shape: Shape
    num_tokens: int
    dtype: str
    routing: str
    cost: Cost

    @property
    def title(self) -> str:
        """One line that names it."""
        sizes = f"H={self.shape.H} I={self.shape.I} E={self.shape.E} K={self.shape.K}"
        what = f"{self.op} {self.mode} {self.shape.name} T={self.num_tokens}"
        return f"{what} {self.dtype} {self.routing} ({sizes})"


@dataclass(frozen=True, kw_only=True, slots=True)
class Roof:
    """A variant whose rate no contestant can beat.

    Attributes:
        variant: its name.
        amount: FLOPs that one run of it computes, or bytes that it reads.
    """

    variant: str
    amount: int

    def per_s(self, samples: Mapping[str, Sequence[float]]) -> float:
        """Its measured rate."""
        return self.amount / median(samples[self.variant])


def run_gate(variants: Sequence[Variant], gate: Gate) -> None:
    """Check every variant that has outputs; stop at the first that is wrong.

    Raises:
        GateError: naming the variant, the tensor and the position.
    """
    for variant in variants:
        if variant.outputs is not None:
            gate(variant.name, variant.outputs())


def fastest(samples: Mapping[str, Sequence[float]], names: Sequence[str]) -> str:
    """The name with the lowest median among those that were timed."""
    timed = [name for name in names if samples.get(name)]
    require(len(timed) > 0, "fastest", "names", f"name a timed variant of {list(samples)}", names)
    return min(timed, key=lambda name: median(samples[name]))


def make_records(
    case: Case,
    samples: Mapping[str, Sequence[float]],
    *,
    gemm_roof: Roof,
    read_roof: Roof | None,
    baseline: str,
    environment: Environment,
) -> list[Record]:
    """Turn samples in seconds into records, in the order of ``samples``. Pure."""
    roof_flops_per_s = gemm_roof.per_s(samples)
    read_bytes_per_s = read_roof.per_s(samples) if read_roof else None
    roofs = {gemm_roof.variant, read_roof.variant if read_roof else None}
    records = []
    for name, seconds in samples.items():
        if name in roofs:
            continue
        middle = median(seconds)
        ratios = paired_ratios(samples[baseline], seconds)
        interval = median_interval(ratios)
        flops_per_s, bytes_per_s = case.cost.flops / middle, case.cost.bytes / middle
        records.append(
            Record(
                op=case.op,
                mode=case.mode,
                shape=case.shape.name,
                T=case.num_tokens,
                H=case.shape.H,
                I=case.shape.I,
                E=case.shape.E,
                K=case.shape.K,
                dtype=case.dtype,
                routing=case.routing,
                variant=name,
                num_rounds=len(seconds),
                time_us=middle * 1e6,
                p20_us=quantile(seconds, 0.2) * 1e6,
                p80_us=quantile(seconds, 0.8) * 1e6,
                gflops=flops_per_s / 1e9,
                gb_per_s=bytes_per_s / 1e9,
                roof_gflops=roof_flops_per_s / 1e9,
                roof_fraction=flops_per_s / roof_flops_per_s,
                read_gb_per_s=read_bytes_per_s / 1e9 if read_bytes_per_s else None,
                read_fraction=bytes_per_s / read_bytes_per_s if read_bytes_per_s else None,
                baseline=baseline,
                speedup=median(ratios),
                speedup_low=interval.low,
                speedup_high=interval.high,
                **asdict(environment),
            )
        )
    return records


def run_case(
    case: Case,
    variants: Sequence[Variant],
    *,
    gate: Gate,
    gemm_roof: Roof,
    read_roof: Roof | None,
    rivals: Sequence[str],
    environment: Environment,
    budget: Budget,
    stopwatch: Stopwatch = wall_clock,
) -> list[Record]:
    """Check and time one case.

    Args:
        case: what it is.
        variants: the contestants and the roofs.
        gate: refuses wrong outputs.
        gemm_roof: the variant whose FLOP rate is the roof.
        read_roof: the variant whose read rate is the roof, where memory sets the limit.
        rivals: names of the variants that may be the baseline; the fastest of them is.
        environment: what the records say about this run.
        budget: rounds and seconds.
        stopwatch: the timer.

    Returns:
        A record for each variant but the roofs.

    Raises:
        GateError: a variant is wrong; nothing was timed.
    """
    run_gate(variants, gate)
    samples = interleave(variants, budget, stopwatch)
    baseline = fastest(samples, rivals)
    return make_records(
        case,
        samples,
        gemm_roof=gemm_roof,
        read_roof=read_roof,
        baseline=baseline,
        environment=environment,
    )
