"""A simulated exchange as one PNG: when each phase runs, what is sent, which links are busy."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from piper_kernels.dist.links import Level
from piper_kernels.dist.simulate import SimulationResult

_PHASES = {"flat": "#8a8f98", "I": "#9db7d8", "II": "#1b4f8f", "III": "#d9a441"}
_LEVELS: dict[Level, str] = {"node": "#9db7d8", "group": "#4a7fb5", "far": "#b5553b"}
_INK = "#1f2430"


def draw_simulation(path: Path, results: Sequence[SimulationResult], title: str) -> None:
    """Draw the results side by side.

    Args:
        path: the PNG to write.
        results: one for each algorithm.
        title: one line; ``modelled`` is put in front.
    """
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    # a figure of its own, without pyplot: no window, no global state
    figure = Figure(figsize=(13.5, 3.6), dpi=110, layout="constrained")
    FigureCanvasAgg(figure)
    figure.suptitle(f"{results[0].label}: {title}", fontsize=10, color=_INK)
    times, sizes, links = figure.subplots(1, 3, width_ratios=(1.3, 1.0, 1.2))
    _draw_phases(times, results)
    _draw_levels(sizes, results)
    _draw_links(links, results)
    figure.savefig(path, metadata={"Software": "piper simulate"})


def _draw_phases(axes: Any, results: Sequence[SimulationResult]) -> None:
    """A row for each phase of each algorithm."""
    names: list[str] = []
    places: list[int] = []
    for result in results:
        for phase in result.phases:
            place = -len(places)
            takes = (phase.end_s - phase.start_s) * 1e3
            axes.barh(place, takes, left=phase.start_s * 1e3, color=_PHASES[phase.name])
            axes.text(
                phase.end_s * 1e3, place, f" {phase.end_s * 1e3:.3g}", va="center", fontsize=7
            )
            same = phase.name == result.algorithm
            names.append(phase.name if same else f"{result.algorithm} {phase.name}")
            places.append(place)
    axes.set_yticks(places, names, fontsize=7)
    axes.set_xlim(0, 1.12 * max(result.seconds for result in results) * 1e3)
    axes.set_xlabel("ms", fontsize=8)
    axes.set_title("when each phase runs", fontsize=9)


def _draw_levels(axes: Any, results: Sequence[SimulationResult]) -> None:
    """Bytes of each level, stacked."""
    names = [result.algorithm for result in results]
    below = [0.0] * len(results)
    for level, color in _LEVELS.items():
        sent = [result.level_bytes.get(level, 0.0) / 1e9 for result in results]
        axes.bar(names, sent, bottom=below, color=color, label=level)
        below = [a + b for a, b in zip(below, sent, strict=True)]
    axes.set_ylabel("GB sent", fontsize=8)
    axes.tick_params(labelsize=7)
    axes.legend(fontsize=7)
    axes.set_title("bytes per level", fontsize=9)


def _draw_links(axes: Any, results: Sequence[SimulationResult]) -> None:
    """The three busiest links of each."""
    names: list[str] = []
    places: list[int] = []
    for result in results:
        for link in result.links[:3]:
            places.append(-len(places))
            names.append(f"{result.algorithm}: {link.name}"[:44])
            axes.barh(places[-1], link.busy_s * 1e3, color="#4a7fb5")
            label = f" {link.share:.0%}"
            axes.text(link.busy_s * 1e3, places[-1], label, va="center", fontsize=7)
    axes.set_yticks(places, names, fontsize=6)
    axes.margins(x=0.15)
    axes.set_xlabel("ms busy, and share of the whole time", fontsize=8)
    axes.set_title("busiest links", fontsize=9)
