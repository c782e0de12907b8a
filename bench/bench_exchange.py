"""Exchanges between emulated nodes: line rate, two NICs, and how right the simulator is.

Nodes are network namespaces on this machine, links are shaped by the kernel; every number is
measured, but for the simulator's, which is labelled.

    make bench-dist
    python -m bench.bench_exchange --out bench/results
"""

import argparse
import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

import numpy as np
from numpy.typing import NDArray
from rich.console import Console
from rich.table import Table

from bench.exchange_plans import PlanTask, time_plans
from bench.record import describe_environment
from bench.report import make_console, print_environment
from bench.stats import median
from bench.targets import Target, exit_status, print_targets
from piper_kernels.dist.exchange_counts import plain_counts
from piper_kernels.dist.halo_phases import Algorithm
from piper_kernels.dist.halo_plan import make_plan
from piper_kernels.dist.probe import ProbeReport, probe
from piper_kernels.dist.probe_picture import draw_probe
from piper_kernels.dist.simulate import simulate
from piper_kernels.dist.whole_file import write_whole
from piper_kernels.testing.cluster import (
    ClusterShape,
    Counters,
    LinkShape,
    emulated_cluster,
    why_no_cluster,
)

ROW_BYTES = 4096
RATE = 12.5e6
NUM_ROUNDS = 7
PROBE_SIZES = (1024, 16_384, 262_144, 524_288)
ALGORITHMS: tuple[Algorithm, ...] = ("flat", "halo")


@dataclass(frozen=True, kw_only=True, slots=True)
class Comparison:
    """One plan, measured and simulated.

    Attributes:
        nodes: ranks on each node, e.g. ``2x2``.
        nics: per node.
        counts: kind of counts matrix.
        algorithm: of the plan.
        measured_s: median over the rounds.
        modelled_s: what the simulator says from the probed links.
    """

    nodes: str
    nics: int
    counts: str
    algorithm: str
    measured_s: float
    modelled_s: float

    @property
    def error(self) -> float:
        """Modelled over measured, less 1."""
        return self.modelled_s / self.measured_s - 1


def make_rows(kind: str, num_ranks: int, num_rows: int) -> NDArray[np.int64]:
    """A counts matrix: ``uniform``, or ``skewed`` (rank j receives more, the larger j is)."""
    weights = np.arange(1, num_ranks + 1) if kind == "skewed" else np.ones(num_ranks)
    share = weights / weights.mean()
    return np.tile(np.round(num_rows * share).astype(np.int64), (num_ranks, 1))


def make_tasks(shape: ClusterShape, num_rows: int) -> list[PlanTask]:
    """Both algorithms on both kinds of counts; over several NICs HALO alone.

    A message of HALO goes from one NIC to the NIC of the same number. A flat one need not, and
    there the emulation does not do what the plan says: the dialled rank's NIC serves both ends.
    """
    return [
        PlanTask(
            name=f"{kind} {algorithm}",
            algorithm=algorithm,
            rows=make_rows(kind, shape.num_ranks, num_rows),
            row_bytes=ROW_BYTES,
        )
        for kind in ("uniform", "skewed")
        for algorithm in ALGORITHMS
        if algorithm == "halo" or shape.nics_per_node == 1
    ]


def probe_here() -> ProbeReport:
    """The probe's report, on every rank."""
    return probe(name="emulated cluster", sizes_bytes=PROBE_SIZES)


def compare(
    shape: ClusterShape, num_rows: int, num_rounds: int
) -> tuple[ProbeReport, list[Comparison]]:
    """Probe a cluster, then measure plans on it and simulate them."""
    tasks = make_tasks(shape, num_rows)
    with emulated_cluster(shape) as cluster:
        report: ProbeReport = cluster.run_ranks(probe_here, timeout_s=120.0)[0]
        topology = report.topology
        seconds = cluster.run_ranks(time_plans, topology, tasks, num_rounds, timeout_s=120.0)[0]
    found = []
    for task, times in zip(tasks, seconds, strict=True):
        counts = plain_counts(topology, task.rows)
        plan = make_plan(topology, counts, ROW_BYTES, task.algorithm, has_blocks=False)
        comparison = Comparison(
            nodes=f"{shape.num_nodes}x{shape.ranks_per_node[0]}",
            nics=shape.nics_per_node,
            counts=task.name.split()[0],
            algorithm=task.algorithm,
            measured_s=median(times),
            modelled_s=simulate(plan).seconds,
        )
        found.append(comparison)
    return report, found


def measure_nics(num_rows: int, num_rounds: int) -> tuple[float, float, float]:
    """Two NICs: speed-up over one, its limit of 2, and larger over smaller counter."""
    times, counters = {}, {}
    for name, local_rank_to_nic in (("affinity", (0, 1)), ("one NIC", (0, 0))):
        shape = ClusterShape(
            ranks_per_node=(2, 2),
            nics_per_node=2,
            local_rank_to_nic=local_rank_to_nic,
            nic=LinkShape(rate_bytes_per_s=RATE),
        )
        rows = make_rows("uniform", 4, num_rows)
        task = PlanTask(name=name, algorithm="halo", rows=rows, row_bytes=ROW_BYTES)
        with emulated_cluster(shape) as cluster:
            arguments = (cluster.topology(), [task], num_rounds)
            times[name] = median(cluster.run_ranks(time_plans, *arguments)[0][0])
            counters[name] = cluster.counters()
    return times["one NIC"] / times["affinity"], 2.0, _imbalance(counters["affinity"])


def _imbalance(counters: Counters) -> float:
    """The busiest NIC of a node over its least busy one, on the worst node."""
    sent = counters.nic_out_bytes
    return float((sent.max(axis=1) / sent.min(axis=1)).max())


def measure_line_rate(num_rows: int, num_rounds: int) -> float:
    """Share of the shaped rate that large messages get, both ways at once."""
    shape = ClusterShape(ranks_per_node=(1, 1), nic=LinkShape(rate_bytes_per_s=RATE))
    rows = np.array([[0, num_rows], [num_rows, 0]])
    task = PlanTask(name="pair", algorithm="flat", rows=rows, row_bytes=ROW_BYTES)
    with emulated_cluster(shape) as cluster:
        times = cluster.run_ranks(time_plans, cluster.topology(), [task], num_rounds)[0][0]
    return num_rows * ROW_BYTES / median(times) / RATE


def print_comparisons(found: Sequence[Comparison], console: Console) -> None:
    """A line for each plan."""
    table = Table(title="plans: measured, and modelled by the simulator", title_justify="left")
    for name in ("nodes", "NICs", "counts", "plan"):
        table.add_column(name)
    for name in ("measured ms", "modelled ms", "error"):
        table.add_column(name, justify="right")
    for each in found:
        table.add_row(
            each.nodes,
            str(each.nics),
            each.counts,
            each.algorithm,
            f"{each.measured_s * 1e3:.1f}",
            f"{each.modelled_s * 1e3:.1f}",
            f"{each.error:+.0%}",
        )
    console.print(table)


def main(arguments: Sequence[str] | None = None) -> int:
    """Measure, print, and end with the targets met and missed."""
    parser = argparse.ArgumentParser(prog="python -m bench.bench_exchange", description=__doc__)
    parser.add_argument("--out", type=Path, help="folder for exchange.json, probe.png")
    parser.add_argument("--rounds", type=int, default=NUM_ROUNDS)
    parser.add_argument("--rows", type=int, default=64, help="of 4 KiB, from rank to rank")
    parser.add_argument("--strict", action="store_true", help="exit status 1 for a miss")
    options = parser.parse_args(arguments)
    console = make_console()
    reason = why_no_cluster()
    if reason:
        console.print(f"nothing was measured: {reason}")
        return 1
    environment = describe_environment()
    print_environment(environment, console)
    share = measure_line_rate(16 * options.rows, options.rounds)
    speedup, limit, imbalance = measure_nics(options.rows, options.rounds)
    nic = LinkShape(rate_bytes_per_s=RATE)
    shapes = [
        ClusterShape(ranks_per_node=(2, 2), nic=nic),
        ClusterShape(ranks_per_node=(2, 2), nic=nic, nics_per_node=2),
        ClusterShape(ranks_per_node=(2, 2, 2, 2), nic=nic),
    ]
    compared = [compare(shape, options.rows, options.rounds) for shape in shapes]
    found = [each for _, comparisons in compared for each in comparisons]
    print_comparisons(found, console)
    worst = max(abs(each.error) for each in found)
    targets = [
        Target("large messages, share of the shaped rate", 0.80, share, 1.0),
        Target("two NICs with affinity over one", 1.7, speedup, limit),
        Target("two NICs, larger counter over smaller", 1.1, imbalance, 1.0, "at_most"),
        Target("simulator, largest error of a plan", 0.15, worst, 0.0, "at_most"),
    ]
    if options.out is not None:
        told = {
            "kind": "measured",
            "environment": asdict(environment),
            "plans": [asdict(each) for each in found],
            "targets": [asdict(target) for target in targets],
        }
        options.out.mkdir(parents=True, exist_ok=True)
        text, path = json.dumps(told, indent=1) + "\n", options.out / "exchange.json"
        write_whole("bench_exchange", "--out", path, lambda aside: aside.write_text(text))
        picture, report = path.with_name("probe.png"), compared[-1][0]
        write_whole("bench_exchange", "--out", picture, lambda aside: draw_probe(aside, report))
    print_targets(targets, console)
    return exit_status(targets, is_strict=options.strict)


if __name__ == "__main__":
    raise SystemExit(main())
