"""Modelled: flat, HALO and HALO with de-duplication on Frontier, by number of nodes and size.

The paper reports HALO 1.2 to 9 times faster than RCCL's all-to-all on 16 to 512 nodes. Physics
alone does not give that: HALO moves the same bytes between nodes. So each point is modelled twice:

- ``physics``: a flat exchange uses the network as well as its latency, gap and bandwidth allow;
- ``calibrated``: between switch groups a flat exchange gets ``FLAT_FAR_EFFICIENCY`` of a NIC. That
  constant is chosen, not derived: one of four NICs busy, as users of RCCL on Frontier have seen
  (ROCm/rccl#845 found two of four).

    python -m bench.frontier_table --out bench/results
"""

import argparse
import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from piper_kernels.dist.exchange_counts import ExchangeCounts
from piper_kernels.dist.halo_phases import ALGORITHMS, Algorithm
from piper_kernels.dist.placement_map import PlacementMap
from piper_kernels.dist.simulate_problem import expected_counts, zipf_popularity
from piper_kernels.dist.topology_presets import frontier
from piper_kernels.dist.traffic import predict
from piper_kernels.dist.traffic_tasks import Traffic
from piper_kernels.dist.whole_file import write_whole

FLAT_FAR_EFFICIENCY = 0.25
TOP_K = 8
# of a job in one switch group: a job that is scattered over the machine
NODES_PER_GROUP = 8
NODES = (2, 4, 8, 16, 32, 64, 128, 256, 512)
SIZES_MB = (0.1, 1.0, 10.0, 100.0, 1000.0)


@dataclass(frozen=True, kw_only=True, slots=True)
class Point:
    """One exchange, modelled.

    Attributes:
        num_nodes: of 8 ranks.
        size_mb: that each rank sends, 1e6 bytes.
        algorithm: of the exchange.
        is_calibrated: whether the flat exchange was slowed.
        seconds: for dispatch alone.
    """

    num_nodes: int
    size_mb: float
    algorithm: Algorithm
    is_calibrated: bool
    seconds: float


def make_points(nodes: Sequence[int], sizes_mb: Sequence[float]) -> list[Point]:
    """Model every point; only the flat exchange differs between physics and calibration."""
    points = []
    for num_nodes in nodes:
        topology = frontier(num_nodes, nodes_per_group=NODES_PER_GROUP)
        num_ranks = topology.num_ranks
        placement = PlacementMap.contiguous(num_ranks, num_ranks)
        # each rank sends a row of 1 byte per token and expert, so sizes are row bytes
        counts: ExchangeCounts = expected_counts(
            topology, placement, zipf_popularity(num_ranks, 0.0), num_tokens=1000, top_k=TOP_K
        )
        for size_mb in sizes_mb:
            row_bytes = size_mb * 1e6 / (1000 * TOP_K)
            for algorithm in ALGORITHMS:
                for is_calibrated in (False, True) if algorithm == "flat" else (False,):
                    traffic = Traffic(
                        topology=topology,
                        counts=counts,
                        dispatch_row_bytes=row_bytes,
                        combine_row_bytes=row_bytes,
                        top_k=TOP_K,
                        has_combine=False,
                        flat_far_efficiency=FLAT_FAR_EFFICIENCY if is_calibrated else 1.0,
                    )
                    point = Point(
                        num_nodes=num_nodes,
                        size_mb=size_mb,
                        algorithm=algorithm,
                        is_calibrated=is_calibrated,
                        seconds=predict(traffic, algorithm).seconds,
                    )
                    points.append(point)
    return points


def speedups(
    points: Sequence[Point], num_nodes: int, algorithm: Algorithm, *, is_calibrated: bool
) -> dict[float, float]:
    """Size -> how many times faster than flat."""
    of = {
        (p.size_mb, p.algorithm, p.is_calibrated): p.seconds
        for p in points
        if p.num_nodes == num_nodes
    }
    sizes = sorted({size for size, _, _ in of})
    return {size: of[size, "flat", is_calibrated] / of[size, algorithm, False] for size in sizes}


def markdown(points: Sequence[Point]) -> str:
    """The table by node count: each cell from the least to the most over the sizes."""
    sizes = sorted({point.size_mb for point in points})
    share = f"{FLAT_FAR_EFFICIENCY:g}"
    lines = [
        f"Modelled; flat over HALO, least to most over {sizes[0]:g} to {sizes[-1]:g} MB per rank. "
        f"Calibration constant: flat_far_efficiency = {share}; {NODES_PER_GROUP} nodes of the job "
        f"in each switch group, K = {TOP_K}. Paper: 1.2 to 9 times, 16 to 512 nodes.",
        "",
        "| nodes | HALO, physics | HALO, calibrated | HALO + de-dup, physics "
        "| HALO + de-dup, calibrated |",
        "|---|---|---|---|---|",
    ]
    for num_nodes in sorted({point.num_nodes for point in points}):
        cells = []
        for algorithm in ("halo", "halo_dedup"):
            for is_calibrated in (False, True):
                by_size = speedups(points, num_nodes, algorithm, is_calibrated=is_calibrated)
                cells.append(f"{min(by_size.values()):.2f} - {max(by_size.values()):.2f}")
        lines.append(f"| {num_nodes} | {' | '.join(cells)} |")
    return "\n".join(lines) + "\n"


def draw(path: Path, points: Sequence[Point]) -> None:
    """Speed-up over flat against nodes, a line for each size, a panel for each column."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(13.5, 3.8), dpi=110, layout="constrained")
    FigureCanvasAgg(figure)
    figure.suptitle(f"modelled: Frontier, flat over HALO; calibration {FLAT_FAR_EFFICIENCY:g}")
    panels: list[tuple[Algorithm, bool]] = [
        ("halo", False),
        ("halo", True),
        ("halo_dedup", False),
        ("halo_dedup", True),
    ]
    nodes = sorted({point.num_nodes for point in points})
    all_axes: Any = figure.subplots(1, 4, sharey=True)
    for axes, (algorithm, is_calibrated) in zip(all_axes, panels, strict=True):
        by_node = [
            speedups(points, count, algorithm, is_calibrated=is_calibrated) for count in nodes
        ]
        for size in sorted(by_node[0]):
            ratios = [by_size[size] for by_size in by_node]
            axes.plot(nodes, ratios, marker="o", markersize=3, label=f"{size:g} MB")
        axes.axhline(1.0, color="black", linewidth=0.8)
        axes.axhspan(1.2, 9.0, color="#d9a441", alpha=0.12)
        axes.set_xscale("log", base=2)
        axes.set_yscale("log", base=2)
        axes.set_xlabel("nodes")
        kind = "calibrated" if is_calibrated else "physics"
        axes.set_title(f"{algorithm}, {kind}", fontsize=9)
    all_axes[0].set_ylabel("times faster than flat (band: paper)")
    all_axes[0].legend(fontsize=7)
    figure.savefig(path, metadata={"Software": "bench.frontier_table"})


def main(arguments: Sequence[str] | None = None) -> int:
    """Model all points and write Markdown, JSON and a picture."""
    parser = argparse.ArgumentParser(prog="python -m bench.frontier_table", description=__doc__)
    parser.add_argument("--out", type=Path, default=Path("."), help="folder for the three files")
    parser.add_argument("--most-nodes", type=int, default=NODES[-1], help="leave larger ones out")
    options = parser.parse_args(arguments)
    points = make_points([n for n in NODES if n <= options.most_nodes], SIZES_MB)
    table, data = markdown(points), [asdict(point) for point in points]
    options.out.mkdir(parents=True, exist_ok=True)
    name, path = "frontier_table", options.out / "frontier"
    write_whole(name, "--out", path.with_suffix(".md"), lambda p: p.write_text(table))
    told = {"label": "modelled", "flat_far_efficiency": FLAT_FAR_EFFICIENCY, "points": data}
    text = json.dumps(told, indent=0) + "\n"
    write_whole(name, "--out", path.with_suffix(".json"), lambda p: p.write_text(text))
    write_whole(name, "--out", path.with_suffix(".png"), lambda p: draw(p, points))
    print(table)
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
