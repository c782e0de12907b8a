"""The modelled roofline as a Markdown table and as a picture."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from rich.console import Console
from rich.table import Table

from bench.machines import Machine

if TYPE_CHECKING:
    from bench.roofline import ModelledPass

GB = 1e9


def _groups(passes: Sequence[ModelledPass]) -> dict[tuple[str, str, str], list[ModelledPass]]:
    """Passes of one line of the table: they differ in the machine alone."""
    groups: dict[tuple[str, str, str], list[ModelledPass]] = {}
    for entry in passes:
        groups.setdefault((entry.shape, entry.layer, entry.direction), []).append(entry)
    return groups


def markdown_table(passes: Sequence[ModelledPass]) -> str:
    """One line for each layer and direction; DRAM and time bounds for each machine."""
    machines = list(dict.fromkeys(entry.machine for entry in passes))
    headers = ["layer, bf16", "", "TFLOP", "issued GB", "compulsory GB", "kept GB"]
    headers += [f"DRAM GB {machine}" for machine in machines]
    headers += ["FLOP/B"] + [f">= ms {machine}" for machine in machines]
    lines = ["| " + " | ".join(headers) + " |", "|---|---|" + "---:|" * (len(headers) - 2)]
    for (shape, layer, direction), group in _groups(passes).items():
        first = group[0]
        cells = [
            f"`{shape}` T={first.T}",
            f"{layer} {direction}",
            f"{first.flops / 1e12:.2f}",
            f"{first.issued_bytes / GB:.1f}",
            f"{first.compulsory_bytes / GB:.2f}",
            f"{first.kept_bytes / GB:.2f}" if direction == "forward" else "",
            *(f"{entry.dram_bytes / GB:.2f}" for entry in group),
            f"{first.intensity:.0f}",
            *(f"{entry.bound_s * 1e3:.2f}" for entry in group),
        ]
        lines.append("| " + " | ".join(cells) + " |")
    return "\n".join(lines) + "\n"


def print_launches(passes: Sequence[ModelledPass], console: Console) -> None:
    """Every launch of every pass."""
    for entry in passes:
        title = f"{entry.shape} T={entry.T} {entry.layer} {entry.direction}, {entry.machine}"
        table = Table(title=f"{title} (modelled)", title_justify="left")
        table.add_column("launch")
        for header in ("TFLOP", "issued MB", "compulsory MB", "DRAM MB", ">= us"):
            table.add_column(header, justify="right")
        for name, (flops, issued, compulsory, dram, bound_s) in entry.launches.items():
            numbers = [f"{amount / 1e6:.1f}" for amount in (issued, compulsory, dram)]
            table.add_row(name, f"{flops / 1e12:.3f}", *numbers, f"{bound_s * 1e6:.1f}")
        console.print(table)


def plot_roofline(path: Path, passes: Sequence[ModelledPass], machines: Sequence[Machine]) -> None:
    """Draw each pass at its arithmetic intensity, under the roofs of one machine a panel.

    A pass lies below its roof where some of its launches are bound by memory and others by
    arithmetic, one after another.

    Args:
        path: a PNG, written anew.
        passes: what was modelled.
        machines: a panel each.
    """
    from matplotlib.figure import Figure

    figure = Figure(figsize=(5 * len(machines), 5), layout="constrained")
    panels = figure.subplots(1, len(machines), squeeze=False)[0]
    styles = {
        ("piper", "forward"): ("o", "tab:blue"),
        ("piper", "backward"): ("s", "tab:cyan"),
        ("unfused", "forward"): ("o", "tab:red"),
        ("unfused", "backward"): ("s", "tab:orange"),
    }
    for panel, machine in zip(panels, machines, strict=True):
        roof = [20.0, machine.ridge, 4000.0]
        heights = [min(x * machine.bytes_per_s, machine.flops_per_s) / 1e12 for x in roof]
        panel.plot(roof, heights, color="black", linewidth=0.8)
        for (layer, direction), (marker, color) in styles.items():
            mine = [
                entry
                for entry in passes
                if (entry.layer, entry.direction, entry.machine) == (layer, direction, machine.name)
            ]
            panel.scatter(
                [entry.intensity for entry in mine],
                [entry.flops / entry.bound_s / 1e12 for entry in mine],
                marker=marker,
                color=color,
                label=f"{layer} {direction}",
            )
        panel.set_xscale("log")
        panel.set_yscale("log")
        panel.set_xlabel("FLOPs per modelled DRAM byte")
        panel.set_title(f"{machine.name}, modelled on peak numbers")
    panels[0].set_ylabel("TFLOP/s at most")
    panels[0].legend(loc="lower right", fontsize="small")
    figure.savefig(path, dpi=110)
