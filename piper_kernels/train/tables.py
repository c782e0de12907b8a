"""The tables at the end of a run, at most 100 columns wide."""

import math
from collections.abc import Sequence

import numpy as np
from rich.table import Table

from piper_kernels.train.compare import Timing
from piper_kernels.train.entropy import NgramEntropies


def loss_table(entropies: NgramEntropies, held_out_loss: float, held_out_bytes: int) -> Table:
    """The model's held-out loss among the entropies of the same text, worst first."""
    table = Table(
        title=f"Held-out text, {held_out_bytes:,} bytes",
        caption="n-grams: bytes counted in the training text, interpolated Witten-Bell smoothing",
        title_justify="left",
        caption_justify="left",
    )
    table.add_column("what predicts the next byte")
    for unit in ("nats per byte", "bits per byte"):
        table.add_column(unit, justify="right")
    rows = {
        "uniform": entropies.uniform,
        "unigram": entropies.unigram,
        "bigram": entropies.bigram,
        "trigram": entropies.trigram,
        "this model": held_out_loss,
    }
    for name, nats in sorted(rows.items(), key=lambda row: -row[1]):
        style = "bold green" if name == "this model" else None
        table.add_row(name, f"{nats:.3f}", f"{nats / math.log(2):.3f}", style=style)
    return table


def timing_table(timings: Sequence[Timing]) -> Table:
    """Each experts implementation's step time, side by side; the first is the baseline."""
    baseline, rounds = timings[0], len(timings[0].step_s)
    table = Table(
        title=f"One training step, {baseline.tokens:,} tokens, the same model and batch",
        caption=f"{rounds} interleaved rounds in this run; medians, 20th and 80th percentile. "
        "Difference: relative L2 norm, the largest over outputs and gradients of all layers",
        title_justify="left",
        caption_justify="left",
    )
    table.add_column("experts")
    table.add_column("ms per step", justify="right")
    table.add_column("p20 - p80", justify="right")
    table.add_column("tokens/s", justify="right")
    table.add_column(f"vs {baseline.experts}", justify="right")
    table.add_column("p20 - p80", justify="right")
    table.add_column(f"differs from {baseline.experts}", justify="right")
    for timing in timings:
        is_baseline = timing is baseline
        table.add_row(
            timing.experts,
            f"{1e3 * timing.median_s:.1f}",
            _spread([1e3 * seconds for seconds in timing.step_s], ".1f"),
            f"{timing.tokens / timing.median_s:,.0f}",
            "1.00x" if is_baseline else f"{float(np.median(timing.speedups)):.2f}x",
            "" if is_baseline else _spread(timing.speedups, ".2f"),
            "" if is_baseline else f"{timing.difference:.1e}",
        )
    return table


def _spread(values: Sequence[float], form: str) -> str:
    low, high = np.percentile(values, (20, 80))
    return f"{low:{form}} - {high:{form}}"
