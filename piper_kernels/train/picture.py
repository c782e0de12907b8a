"""One PNG of a run: the loss beside what counting achieves, and where the tokens went."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from piper_kernels.train.entropy import NgramEntropies
from piper_kernels.train.metrics import StepRecord, smoothed

_INK, _MUTED, _TRAIN, _HELD_OUT = "#1f2430", "#8a8f98", "#9db7d8", "#1b4f8f"
_MAX_COLUMNS = 120


def draw_run(
    path: Path,
    records: Sequence[StepRecord],
    entropies: NgramEntropies,
    layers: Sequence[int],
    title: str,
) -> None:
    """Draw the loss curve and the expert-load heat map.

    Args:
        path: the PNG to write.
        records: one per step, at least one.
        entropies: drawn as lines under the curve.
        layers: layer number of each row of ``expert_counts``.
        title: one line.
    """
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    # a figure of its own, without pyplot: no window, no global state
    figure = Figure(figsize=(12.0, 5.0), dpi=120, layout="constrained")
    FigureCanvasAgg(figure)
    figure.suptitle(title, color=_INK, fontsize=11)
    curve, load = figure.subplots(1, 2, width_ratios=(1.25, 1.0))
    _draw_loss(curve, records, entropies)
    _draw_load(figure, load, records, layers)
    figure.savefig(path, metadata={"Software": "piper train"})


def load_over_time(records: Sequence[StepRecord], max_columns: int) -> NDArray[np.float64]:
    """Rows routed to each expert over its fair share, in equal stretches of steps.

    Returns:
        ``[num_layers * E, columns]``; 1.0 is a fair share. At most ``max_columns`` columns.

    Example:
        >>> record = StepRecord(step=1, loss=1.0, balance_loss=None, learning_rate=0.1,
        ...     grad_norm=1.0, tokens=8, step_s=0.1, expert_counts=[[6, 2]])
        >>> load_over_time([record], 10).tolist()
        [[1.5], [0.5]]
    """
    counts = np.array([record.expert_counts for record in records], dtype=np.float64)
    stretches = np.array_split(counts, min(max_columns, len(records)))
    summed = np.stack([stretch.sum(axis=0) for stretch in stretches])
    share = summed / np.maximum(summed.mean(axis=2, keepdims=True), 1.0)
    return share.reshape(len(stretches), -1).T


def _draw_loss(axes: Any, records: Sequence[StepRecord], entropies: NgramEntropies) -> None:
    steps = [record.step for record in records]
    losses = [record.loss for record in records]
    window = max(1, len(records) // 50)
    axes.plot(steps, smoothed(losses, window), color=_TRAIN, linewidth=1.4, label="training")
    evaluated = [(r.step, r.held_out_loss) for r in records if r.held_out_loss is not None]
    if evaluated:
        xs, ys = zip(*evaluated, strict=True)
        label = f"held out, {ys[-1]:.2f} at the end"
        axes.plot(xs, ys, color=_HELD_OUT, linewidth=1.8, marker="o", markersize=4, label=label)
    for name in ("uniform", "unigram", "bigram", "trigram"):
        value = getattr(entropies, name)
        axes.axhline(value, color=_MUTED, linewidth=0.9, linestyle=(0, (4, 3)))
        axes.text(
            0.995,
            value,
            f"{name} {value:.2f}",
            transform=axes.get_yaxis_transform(),
            color=_MUTED,
            ha="right",
            va="bottom",
            fontsize=8,
        )
    axes.set(xlabel="step", ylabel="nats per byte", title="Loss", ylim=(0.0, None))
    axes.set_xlim(0, max(2, steps[-1]))
    axes.legend(frameon=False, loc="upper right", bbox_to_anchor=(1.0, 0.9))
    axes.spines[["top", "right"]].set_visible(False)


def _draw_load(
    figure: Any, axes: Any, records: Sequence[StepRecord], layers: Sequence[int]
) -> None:
    load = load_over_time(records, _MAX_COLUMNS)
    num_experts = len(load) // len(layers)
    extent = (records[0].step - 0.5, records[-1].step + 0.5, len(load) - 0.5, -0.5)
    image = axes.imshow(
        load,
        aspect="auto",
        interpolation="nearest",
        cmap="RdBu_r",
        vmin=0.0,
        vmax=2.0,
        extent=extent,
    )
    for boundary in range(1, len(layers)):
        axes.axhline(boundary * num_experts - 0.5, color=_INK, linewidth=0.8)
    centres = [(index + 0.5) * num_experts - 0.5 for index in range(len(layers))]
    axes.set_yticks(centres, [f"layer {layer}" for layer in layers])
    title = f"Expert load ({num_experts} experts per layer, one row each)"
    axes.set(xlabel="step", title=title)
    figure.colorbar(image, ax=axes, label="rows over a fair share", extend="max")
