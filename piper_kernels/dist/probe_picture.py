"""What a probe measured and what was fitted to it, as one PNG."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from piper_kernels.dist.links import Link
from piper_kernels.dist.probe import ProbeReport
from piper_kernels.dist.probe_fit import Point

_COLORS = ("#9db7d8", "#4a7fb5", "#1b4f8f")
_INK, _CHECK = "#1f2430", "#b5553b"


def draw_probe(path: Path, report: ProbeReport) -> None:
    """Draw measured points over fitted curves: a panel for each level, one for the all-to-all.

    Args:
        path: the PNG to write.
        report: of a probe.
    """
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    levels = list(dict.fromkeys(point.level for point in report.points))
    num_panels = len(levels) + bool(report.all_to_all) or 1
    # a figure of its own, without pyplot: no window, no global state
    figure = Figure(figsize=(4.6 * num_panels, 4.2), dpi=110, layout="constrained")
    FigureCanvasAgg(figure)
    figure.suptitle(f"{report.topology.name}: {report.topology.source}", fontsize=10, color=_INK)
    panels = figure.subplots(1, num_panels, squeeze=False)[0]
    for axes, level in zip(panels, levels, strict=False):
        points = [point for point in report.points if point.level == level]
        _draw_level(axes, points, report.topology.link(level))
        axes.set_title(_describe(level, report.topology.link(level)), fontsize=8)
    if report.all_to_all:
        _draw_checks(panels[-1], report)
    figure.savefig(path, metadata={"Software": "piper probe"})


def _describe(level: str, link: Link) -> str:
    gap, latency = link.message_gap_s * 1e6, link.latency_s * 1e6
    rate = link.bandwidth_bytes_per_s / 1e9
    return f"{level}: {latency:.4g} us, {gap:.4g} us per message, {rate:.4g} GB/s"


def _draw_level(axes: Any, points: Sequence[Point], link: Link) -> None:
    """Time against message size, a curve for each number of messages."""
    for color, count in zip(_COLORS, sorted({p.num_messages for p in points}), strict=False):
        mine = [point for point in points if point.num_messages == count]
        sizes = np.geomspace(mine[0].size_bytes, mine[-1].size_bytes, 60)
        fitted = [link.seconds(count * size, count) * 1e3 for size in sizes]
        axes.plot(sizes, fitted, color=color, linewidth=1.3, label=f"{count} messages, fitted")
        measured = [point.seconds * 1e3 for point in mine]
        at = [point.size_bytes for point in mine]
        axes.plot(at, measured, "o", color=color, markersize=4, label="measured")
    _label(axes, "bytes of a message")


def _draw_checks(axes: Any, report: ProbeReport) -> None:
    """The all-to-all that nothing was fitted to."""
    sizes = [check.size_bytes for check in report.all_to_all]
    predicted = [check.predicted_s * 1e3 for check in report.all_to_all]
    measured = [check.seconds * 1e3 for check in report.all_to_all]
    axes.plot(sizes, predicted, color=_CHECK, linewidth=1.3, label="predicted")
    axes.plot(sizes, measured, "o", color=_CHECK, markersize=4, label="measured")
    axes.set_title(f"flat all-to-all, {report.topology.num_ranks} ranks", fontsize=8)
    _label(axes, "bytes from rank to rank")


def _label(axes: Any, what: str) -> None:
    axes.set_xscale("log", base=2)
    axes.set_yscale("log")
    axes.set_xlabel(what, fontsize=8)
    axes.set_ylabel("ms", fontsize=8)
    axes.tick_params(labelsize=7)
    axes.legend(fontsize=6)
