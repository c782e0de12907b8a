"""Pictures of a plan: memory of each rank, the pipeline in time, the exchange, other GPU counts.

matplotlib is loaded when a picture is drawn, not before. Pure: no torch, no process group.
"""

import base64
import html
import io
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

from piper_kernels.errors import PlanError
from piper_kernels.pipeline.planner import Ranked, search
from piper_kernels.pipeline.rank_memory import RankMemory
from piper_kernels.pipeline.search_space import SearchSpace
from piper_kernels.pipeline.step_time import StepModel

_COLORS = ("#1b4f8f", "#9db7d8", "#d98c3f", "#c9c2a5", "#7a9e7e", "#b05f6d")
_KINDS = {"F": "#9db7d8", "B": "#1b4f8f", "I": "#1b4f8f", "W": "#7a9e7e"}
_FACTORS = (0.25, 0.5, 1, 2, 4)


class Pictures:
    """The pictures of one strategy.

    Args:
        steps: predicts time.
        memory: predicts memory.
        space: that was searched.
        best: the strategy to show.
    """

    def __init__(
        self, steps: StepModel, memory: RankMemory, space: SearchSpace, best: Ranked
    ) -> None:
        self.steps, self.memory, self.space, self.best = steps, memory, space, best

    def draw(self) -> dict[str, bytes]:
        """PNGs by name: ``memory``, ``timeline``, ``exchange``, ``gpus``."""
        drawers = {
            "memory": self._memory,
            "timeline": self._timeline,
            "exchange": self._exchange,
            "gpus": self._gpus,
        }
        return {name: _png(drawer) for name, drawer in drawers.items()}

    def save(self, folder: Path) -> None:
        """Write ``<name>.png`` for each picture."""
        folder.mkdir(parents=True, exist_ok=True)
        for name, data in self.draw().items():
            (folder / f"{name}.png").write_bytes(data)

    def html(self, text: str) -> str:
        """One page that needs nothing else: the pictures and ``text``, which explains."""
        title = html.escape(f"{self.steps.model.name}: {self.best.strategy.name}")
        images = [
            f'<img alt="{name}" src="data:image/png;base64,{base64.b64encode(data).decode()}">'
            for name, data in self.draw().items()
        ]
        style = "body{font-family:sans-serif;max-width:70em;margin:2em auto}img{max-width:100%}"
        return (
            f'<!doctype html><html lang="en"><head><meta charset="utf-8"><title>{title}</title>'
            f"<style>{style}</style></head><body><h1>{title}</h1><p>All numbers are modelled, "
            f"not measured.</p>{''.join(images)}<pre>{html.escape(text)}</pre></body></html>\n"
        )

    def _memory(self, axis: Any) -> None:
        """Static parts and the rest of each rank's peak, with the GPU's memory as a line."""
        strategy, stages = self.best.strategy, self.memory.stages(self.best.strategy)
        owners = strategy.owners
        ranks = np.arange(strategy.pp)
        parts = ("parameter", "gradient", "master", "optimizer", "communication")
        bottom = np.zeros(strategy.pp)
        for part, color in zip(parts, _COLORS, strict=False):
            height = np.zeros(strategy.pp)
            for rank, stage in zip(owners, stages, strict=True):
                height[rank] += getattr(stage, f"{part}_bytes") / 2**30
            axis.bar(ranks, height, bottom=bottom, color=color, label=part)
            bottom += height
        rest = np.array(self.best.peak_bytes) / 2**30 - bottom
        axis.bar(ranks, rest, bottom=bottom, color=_COLORS[5], label="activations, workspace")
        usable = self.steps.platform.device.usable_bytes / 2**30
        axis.axhline(usable, color="black", linewidth=1, linestyle="--")
        axis.set(title="memory at the peak", xlabel="pipeline rank", ylabel="GiB")
        axis.text(-0.5, usable, " a job may fill", fontsize=7, va="bottom")
        axis.set(xlim=(-0.5, strategy.pp - 0.5), ylim=(0, 1.12 * max(usable, *bottom + rest)))
        _count_along(axis.xaxis)
        axis.legend(fontsize=7, loc="center left", bbox_to_anchor=(1.0, 0.5))

    def _timeline(self, axis: Any) -> None:
        """Every pass of every rank."""
        timeline = self.steps.predict(self.best.strategy).timeline
        for rank, events in enumerate(timeline.events):
            spans = [(event.start_s, event.end_s - event.start_s) for event in events]
            colors = [_KINDS[event.step.actions[0].kind] for event in events]
            axis.broken_barh(spans, (rank - 0.4, 0.8), facecolors=colors)
        axis.invert_yaxis()
        _count_along(axis.yaxis)
        share = f"{timeline.bubble_share:.1%} idle"
        title = f"one step: forward light, backward dark, weights green; {share}"
        axis.set(title=title, xlabel="s", ylabel="pipeline rank")

    def _exchange(self, axis: Any) -> None:
        """What each NIC of an expert group sends, or a note that nothing is exchanged."""
        times = (
            self.steps.layer_time(layer, self.best.strategy)
            for layer in dict.fromkeys(self.steps.model.layers)
        )
        exchange = next((time.exchange for time in times if time.exchange is not None), None)
        axis.set(title="bytes that one layer sends, there and back")
        if exchange is None:
            axis.text(0.5, 0.5, "one rank holds all experts: nothing is sent", ha="center")
            axis.set_axis_off()
            return
        prediction = exchange.prediction
        per_node = max(self.steps.platform.topology.nodes[0].nics) + 1
        sent = np.asarray(prediction.nic_out_bytes) / 1e6
        padded = np.pad(sent, (0, -len(sent) % per_node)).reshape(-1, per_node)
        most = float(sent.max())
        image = axis.imshow(padded, aspect="auto", cmap="Blues", vmin=0, vmax=most or 1.0)
        if most == 0.0:
            center = (per_node - 1) / 2, (len(padded) - 1) / 2
            axis.text(*center, "one node holds all experts: nothing leaves it", ha="center")
        _count_along(axis.xaxis)
        _count_along(axis.yaxis)
        axis.figure.colorbar(image, ax=axis, label="MB out of the NIC")
        levels = ", ".join(f"{k} {v / 1e6:.0f} MB" for k, v in prediction.level_bytes.items())
        title = f"{prediction.name}, one expert group: {levels}"
        axis.set(title=title, xlabel="NIC", ylabel="node")
        axis.title.set_fontsize(8)

    def _gpus(self, axis: Any) -> None:
        """Tokens/s of the best strategy on fewer and on more GPUs, the batch unchanged."""
        found = []
        for factor in _FACTORS:
            count = round(self.space.num_gpus * factor)
            if count < 1 or count != self.space.num_gpus * factor:
                continue
            space = replace(self.space, num_gpus=count, fixed={})
            try:
                result = search(
                    self.steps,
                    self.memory.peak_bytes,
                    space,
                    least_bytes=self.memory.least_bytes,
                    num_best=1,
                )
            except PlanError:
                continue
            found.append((count, self.space.global_batch * space.seq_len / result.best[0].step_s))
        counts, rates = zip(*found, strict=True)
        axis.plot(counts, rates, marker="o", color=_COLORS[0])
        first = rates[0] / counts[0]
        axis.plot(counts, [first * count for count in counts], color="grey", linestyle=":")
        axis.set(xscale="log", yscale="log", xlabel="GPUs", ylabel="tokens/s")
        axis.set_xticks(counts, [str(count) for count in counts])
        axis.set_xticks([], minor=True)
        axis.set_title("the best strategy on other numbers of GPUs; dotted: in proportion")


def _count_along(axis: Any) -> None:
    """Whole numbers only: ranks, nodes and NICs have no halves."""
    from matplotlib.ticker import MaxNLocator

    axis.set_major_locator(MaxNLocator(integer=True, min_n_ticks=1))


def _png(drawer: Any) -> bytes:
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    # a figure of its own, without pyplot: no window, no global state
    figure = Figure(figsize=(9.0, 4.0), dpi=110, layout="constrained")
    FigureCanvasAgg(figure)
    drawer(figure.subplots())
    buffer = io.BytesIO()
    figure.savefig(buffer, format="png", metadata={"Software": "piper plan"})
    return buffer.getvalue()
