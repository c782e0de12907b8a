"""Simulate the dispatch of a Mixture-of-Experts layer on a network: flat, HALO, HALO + de-dup.

Everything it says is modelled. The network comes from a file that `piper probe` wrote, or from a
preset; up to 4,096 ranks.

For example:
  piper simulate --preset frontier --nodes 128
  piper simulate --preset frontier --nodes 64 --nodes-per-group 16 --skew 0.6 --background 0.3
  piper simulate --topology machine.json --tokens 8192 --hidden 4096 --out run.json
"""

import argparse
import dataclasses
import importlib.util
import json
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from piper_kernels.dist.whole_file import write_whole
from piper_kernels.errors import require

if TYPE_CHECKING:
    from piper_kernels.dist.simulate import SimulationResult
    from piper_kernels.dist.simulate_problem import Problem
    from piper_kernels.dist.topology import Topology

_ALGORITHMS = ("flat", "halo", "halo_dedup")


def configure(parser: argparse.ArgumentParser) -> None:
    """Add the flags of ``piper simulate``."""
    network = parser.add_argument_group("network")
    source = network.add_mutually_exclusive_group()
    source.add_argument("--topology", type=Path, metavar="FILE", help="written by piper probe")
    source.add_argument("--preset", metavar="NAME", help="default: frontier")
    network.add_argument("--nodes", type=int, default=16, help="of a preset (default: 16)")
    network.add_argument(
        "--nodes-per-group", type=int, metavar="N", help="scatter the job over switch groups"
    )
    network.add_argument(
        "--background",
        type=float,
        default=0.0,
        metavar="SHARE",
        help="of the links between switch groups that other jobs use",
    )
    network.add_argument(
        "--flat-far-efficiency",
        type=float,
        default=1.0,
        metavar="SHARE",
        help="of a NIC that a flat exchange gets between groups: a calibration, 1 is physics",
    )
    layer = parser.add_argument_group("layer")
    layer.add_argument("--experts", type=int, metavar="E", help="default: one a rank, 64 at least")
    layer.add_argument("--tokens", type=int, default=4096, help="on each rank (default: 4096)")
    layer.add_argument("--top-k", type=int, default=8, help="experts per token (default: 8)")
    layer.add_argument("--hidden", type=int, default=4096, help="row width (default: 4096)")
    layer.add_argument("--bytes", type=int, default=2, help="of one element (default: 2, bf16)")
    layer.add_argument(
        "--skew", type=float, default=0.0, help="Zipf exponent of the experts (default: 0)"
    )
    layer.add_argument("--seed", type=int, default=0, help="which experts are popular")
    parser.add_argument(
        "--algorithms", default=",".join(_ALGORITHMS), metavar="A,B", help="which to simulate"
    )
    parser.add_argument(
        "--out", type=Path, metavar="FILE.json", help="also write results and a picture"
    )


def run(arguments: argparse.Namespace) -> int:
    """Simulate, print a table, and write what was asked for.

    Raises:
        PiperError: if anything that the user can change is in the way.
    """
    from rich.console import Console

    out: Path | None = arguments.out
    fits = out is None or (out.suffix == ".json" and out.parent.is_dir())
    require(fits, "simulate", "--out", "end in .json and lie in a folder that exists", out)
    problem = _problem(arguments)
    results = problem.run(_algorithms(arguments.algorithms))
    console = Console(width=100, highlight=False)
    console.print(describe(problem, results), soft_wrap=True, markup=False)
    if out is not None:
        written = _write(out, problem, results)
        console.print(f"written: {', '.join(map(str, written))}", soft_wrap=True, markup=False)
    return 0


def _algorithms(text: str) -> tuple[Any, ...]:
    chosen = tuple(text.split(","))
    requirement = f"be some of {', '.join(_ALGORITHMS)}"
    fits = set(chosen) <= set(_ALGORITHMS) and len(set(chosen)) == len(chosen)
    require(fits, "simulate", "--algorithms", requirement, text)
    return chosen


def _problem(arguments: argparse.Namespace) -> "Problem":
    from piper_kernels.dist.simulate_problem import Problem

    for flag in ("hidden", "bytes"):
        value = getattr(arguments, flag)
        require(value >= 1, "simulate", f"--{flag}", "be at least 1", value)
    topology = _topology(arguments)
    num_experts = arguments.experts
    if num_experts is None:
        num_experts = max(64, topology.num_ranks)
    return Problem(
        topology=topology,
        num_experts=num_experts,
        num_tokens=arguments.tokens,
        top_k=arguments.top_k,
        row_bytes=float(arguments.hidden * arguments.bytes),
        skew=arguments.skew,
        seed=arguments.seed,
        background_share=arguments.background,
        flat_far_efficiency=arguments.flat_far_efficiency,
    )


def _topology(arguments: argparse.Namespace) -> "Topology":
    """From a file or a preset; scattered over groups if asked for."""
    from piper_kernels.dist.topology import Topology
    from piper_kernels.dist.topology_presets import preset

    if arguments.topology is not None:
        topology = Topology.load(arguments.topology)
    else:
        topology = preset(arguments.preset or "frontier", arguments.nodes)
    per_group = arguments.nodes_per_group
    if per_group is None:
        return topology
    require(per_group >= 1, "simulate", "--nodes-per-group", "be at least 1", per_group)
    names = [f"group{number // per_group}" for number in range(topology.num_nodes)]
    nodes = zip(topology.nodes, names, strict=True)
    return topology.replace(nodes=tuple(node.replace(group=name) for node, name in nodes))


def describe(problem: "Problem", results: Sequence["SimulationResult"]) -> str:
    """A table of at most 100 columns."""
    topology = problem.topology
    sizes = (
        f"{topology.name}, {topology.num_ranks} ranks, {topology.num_nodes} nodes, "
        f"{topology.num_groups} groups"
    )
    layer = (
        f"{problem.num_experts} experts, {problem.num_tokens} tokens a rank, top-{problem.top_k}, "
        f"rows of {problem.row_bytes:.0f} bytes, skew {problem.skew:g}"
    )
    shares = (
        f"background {problem.background_share:g} of far links, "
        f"flat far efficiency {problem.flat_far_efficiency:g}"
    )
    head = f"{'modelled':<12}{'ms':>10}{'of flat':>9}{'node GB':>10}{'group GB':>10}{'far GB':>10}"
    lines = [sizes[:100], layer[:100], shares, f"{head}  busiest link"]
    flat = next((result.seconds for result in results if result.algorithm == "flat"), None)
    for result in results:
        gigabytes = [result.level_bytes[level] / 1e9 for level in ("node", "group", "far")]
        ratio = f"{flat / result.seconds:.2f}x" if flat and result.seconds else "-"
        numbers = f"{result.seconds * 1e3:>10.3f}{ratio:>9}" + "".join(
            f"{size:>10.3f}" for size in gigabytes
        )
        busiest = f"{result.links[0].share:.0%} {result.links[0].name}" if result.links else "none"
        lines.append(f"{result.algorithm:<12}{numbers}  {busiest}"[:100])
    for result in results:
        phases = [
            f"{phase.name} {phase.start_s * 1e3:.3f} .. {phase.end_s * 1e3:.3f}"
            for phase in result.phases
        ]
        lines.append(f"{result.algorithm} phases, ms: {', '.join(phases)}"[:100])
    return "\n".join(lines)


def report_of(problem: "Problem", results: Sequence["SimulationResult"]) -> dict[str, Any]:
    """What the JSON file holds: the problem, and each result with its label."""
    fields = [field.name for field in dataclasses.fields(problem) if field.name != "topology"]
    told = {name: getattr(problem, name) for name in fields}
    topology = json.loads(problem.topology.to_json())
    return {
        "label": "modelled",
        "problem": told,
        "results": [dataclasses.asdict(result) for result in results],
        "topology": topology,
    }


def _write(out: Path, problem: "Problem", results: Sequence["SimulationResult"]) -> list[Path]:
    text = json.dumps(report_of(problem, results), indent=1) + "\n"
    write_whole("simulate", "--out", out, lambda path: path.write_text(text, encoding="utf-8"))
    written = [out]
    if importlib.util.find_spec("matplotlib") is not None:
        from piper_kernels.dist.simulate_picture import draw_simulation

        topology = problem.topology
        title = f"{topology.name}, {topology.num_ranks} ranks on {topology.num_nodes} nodes"
        picture = out.with_suffix(".png")
        write_whole(
            "simulate", "--out", picture, lambda path: draw_simulation(path, results, title)
        )
        written.append(picture)
    return written
