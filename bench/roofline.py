"""What an experts layer has to move and compute, modelled: Piper's and an unfused one.

    python -m bench.roofline
    python -m bench.roofline --shape qwen3_30b_a3b --tokens 32768 --out bench/results

For each named shape, forward and backward: FLOPs; issued, compulsory and modelled DRAM bytes (what
they mean: piper_kernels/cost/traffic.py); bytes kept for the backward; and, on stated peak numbers,
the seconds that the launches together cannot go below. Nothing here is measured. bf16, uniform
routing, the tiles that Piper ships; the unfused layer is transformers' grouped_mm, launch by launch
(piper_kernels/cost/unfused.py). Biases, router and shared experts are left out of both.
"""

import argparse
import json
import sys
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from functools import lru_cache
from pathlib import Path
from typing import Literal

from bench.machines import H100, MACHINES, MI300X, Machine
from bench.moe_problem import FAMILIES
from bench.report import make_console
from bench.roofline_report import markdown_table, plot_roofline, print_launches
from bench.roofline_targets import list_targets
from bench.shapes import MODELS, SHAPES, Shape, find_shape
from bench.targets import exit_status, print_targets
from piper_kernels.cost import ExpertsSizes, experts_backward_cost, experts_forward_cost
from piper_kernels.cost.layer import (
    experts_backward_ledger,
    experts_forward_ledger,
    kept_bytes,
    total,
)
from piper_kernels.cost.ragged import RaggedRows
from piper_kernels.cost.traffic import Memory, Traffic
from piper_kernels.cost.unfused import (
    unfused_backward_ledger,
    unfused_forward_ledger,
    unfused_kept_bytes,
)
from piper_kernels.errors import PiperError
from piper_kernels.testing import make_routing
from piper_kernels.triton.tiles import default_experts_tiles

Layer = Literal["piper", "unfused"]
Pass = Literal["forward", "backward"]
# bf16
ELEMENT_BYTES = 2


@dataclass(frozen=True, kw_only=True, slots=True)
class ModelledPass:
    """One direction of one layer on one machine. All modelled, nothing measured.

    Attributes:
        shape, T, H, I, E, K: sizes.
        layer: ``piper`` or ``unfused``.
        direction: ``forward`` or ``backward``.
        machine: whose cache and peak numbers are used.
        flops: of matrix products and weighted sums.
        issued_bytes, compulsory_bytes, dram_bytes: the three kinds.
        plan_bytes: what the plan needs at least (``piper_kernels.cost.plan``).
        kept_bytes: kept between forward and backward.
        largest_kept_bytes: the largest tensor among it.
        bound_s: the launches' roofline times, one after another.
        launches: name -> (flops, issued, compulsory, dram, bound_s).
        kind: ``modelled``.
    """

    shape: str
    T: int
    H: int
    I: int
    E: int
    K: int
    layer: Layer
    direction: Pass
    machine: str
    flops: int
    issued_bytes: int
    compulsory_bytes: int
    dram_bytes: int
    plan_bytes: int
    kept_bytes: int
    largest_kept_bytes: int
    bound_s: float
    launches: dict[str, tuple[int, int, int, int, float]]
    kind: str = "modelled"

    @property
    def intensity(self) -> float:
        """FLOPs per modelled DRAM byte."""
        return self.flops / self.dram_bytes


Ledgers = dict[tuple[Layer, Pass], dict[str, Traffic]]


# H100 and H200 differ in bandwidth alone, which a ledger does not know
@lru_cache(maxsize=2)
def ledgers(shape: Shape, num_tokens: int, memory: Memory, is_hip: bool) -> Ledgers:
    """Both layers' ledgers, forward and backward."""
    sizes = experts_sizes(shape, num_tokens)
    expert_ids, _ = make_routing("uniform", num_tokens, shape.E, shape.K)
    rows = RaggedRows.from_expert_ids(expert_ids.numpy(), shape.E)
    tiles = default_experts_tiles(
        num_rows=sizes.num_rows,
        num_experts=shape.E,
        sizes=(shape.H, shape.I, sizes.preact_size),
        element_bytes=ELEMENT_BYTES,
        is_hip=is_hip,
    )
    args = sizes, rows, tiles
    return {
        ("piper", "forward"): experts_forward_ledger(*args, keeps_preact=True, memory=memory),
        ("piper", "backward"): experts_backward_ledger(*args, memory=memory),
        ("unfused", "forward"): unfused_forward_ledger(*args, memory=memory),
        ("unfused", "backward"): unfused_backward_ledger(*args, memory=memory),
    }


def experts_sizes(shape: Shape, num_tokens: int) -> ExpertsSizes:
    """The sizes of a named layer in bf16."""
    return ExpertsSizes(
        num_tokens=num_tokens,
        hidden_size=shape.H,
        intermediate_size=shape.I,
        num_experts=shape.E,
        top_k=shape.K,
        element_bytes=ELEMENT_BYTES,
        layout=FAMILIES[shape.family].layout,
    )


def model_passes(shape: Shape, num_tokens: int, machine: Machine) -> list[ModelledPass]:
    """Both layers, forward and backward, on one machine."""
    sizes = experts_sizes(shape, num_tokens)
    plan = {
        "forward": experts_forward_cost(sizes, keeps_preact=True).bytes,
        "backward": experts_backward_cost(sizes).bytes,
    }
    kept = {"piper": kept_bytes(sizes), "unfused": unfused_kept_bytes(sizes)}
    found = ledgers(shape, num_tokens, machine.memory, machine.is_hip)
    passes = []
    for (layer, direction), ledger in found.items():
        launches = {
            name: (t.flops, t.issued, t.compulsory, t.dram, _bound_s(t, machine))
            for name, t in ledger.items()
        }
        traffic = total(ledger)
        passes.append(
            ModelledPass(
                shape=shape.name,
                T=num_tokens,
                H=shape.H,
                I=shape.I,
                E=shape.E,
                K=shape.K,
                layer=layer,
                direction=direction,
                machine=machine.name,
                flops=traffic.flops,
                issued_bytes=traffic.issued,
                compulsory_bytes=traffic.compulsory,
                dram_bytes=traffic.dram,
                plan_bytes=plan[direction],
                kept_bytes=sum(kept[layer].values()),
                largest_kept_bytes=max(kept[layer].values()),
                bound_s=sum(launch[-1] for launch in launches.values()),
                launches=launches,
            )
        )
    return passes


def _bound_s(traffic: Traffic, machine: Machine) -> float:
    return traffic.bound_s(machine.flops_per_s, machine.bytes_per_s)


def make_parser() -> argparse.ArgumentParser:
    """The command line."""
    parser = argparse.ArgumentParser(
        prog="python -m bench.roofline",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    names = [shape.name for shape in MODELS]
    parser.add_argument("--shape", default=",".join(names), help=", ".join(SHAPES))
    parser.add_argument("--tokens", type=int, default=32768, help="T")
    parser.add_argument("--out", type=Path, help="folder for roofline.json, .md and .png")
    parser.add_argument("--launches", action="store_true", help="also print every launch")
    parser.add_argument("--strict", action="store_true", help="a missed target is exit status 1")
    return parser


def write_results(folder: Path, passes: Sequence[ModelledPass]) -> None:
    """Write roofline.json, roofline.md and roofline.png anew."""
    folder.mkdir(parents=True, exist_ok=True)
    lines = ",\n".join(json.dumps(asdict(found)) for found in passes)
    (folder / "roofline.json").write_text(f"[\n{lines}\n]\n", encoding="utf-8")
    (folder / "roofline.md").write_text(markdown_table(passes), encoding="utf-8")
    plot_roofline(folder / "roofline.png", passes, MACHINES)


def main(words: Sequence[str] | None = None) -> int:
    """Run the model and return the exit status."""
    arguments = make_parser().parse_args(words)
    console = make_console()
    try:
        shapes = [find_shape(name) for name in arguments.shape.split(",")]
        passes = [
            found
            for shape in shapes
            for machine in MACHINES
            for found in model_passes(shape, arguments.tokens, machine)
        ]
    except PiperError as error:
        print(f"roofline: {error}", file=sys.stderr)
        return 2
    console.print(markdown_table(passes), markup=False, soft_wrap=True)
    if arguments.launches:
        print_launches(passes, console)
    if arguments.out:
        write_results(arguments.out, passes)
        console.print(f"written: {arguments.out}/roofline.json, roofline.md and roofline.png")
    targets = list_targets(passes, (H100, MI300X))
    print_targets(targets, console, found="modelled")
    return exit_status(targets, is_strict=arguments.strict)


if __name__ == "__main__":
    sys.exit(main())
