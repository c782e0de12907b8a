"""The traffic model: what each way of exchanging costs, and which to take.

It prices flat, HALO and HALO with de-duplication, under tensor parallelism also sliced against
replicated, in 1 .. n chunks that overlap with one another and with the experts. What to expect:
HALO alone moves the same bytes between nodes as a flat exchange plus a pass inside the node, so it
wins only where messages cost something or far links are badly used; de-duplication and slicing move
fewer bytes. Where flat is best, flat is chosen.

All numbers are modelled. Pure: no torch, no process group.
"""

import textwrap
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from piper_kernels.dist.chunk_schedule import Stage, makespan, schedule_chunks
from piper_kernels.dist.halo_phases import ALGORITHMS, Algorithm
from piper_kernels.dist.link_loads import link_loads
from piper_kernels.dist.links import LEVELS, FloatArray, Level
from piper_kernels.dist.phase_time import PhaseTime, chunk_times
from piper_kernels.dist.traffic_tasks import Task, TpMode, Traffic, list_tasks
from piper_kernels.errors import require

CHUNK_OPTIONS = (1, 2, 3, 4, 5, 6, 8, 12, 16)


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class Prediction:
    """One way of exchanging, priced.

    Attributes:
        algorithm: of the exchange.
        tp_mode: ``none`` without tensor parallelism.
        num_chunks: n.
        seconds: for the whole layer's exchange and, if given, its experts.
        stage_s: seconds of each stage, all chunks together, as if alone.
        stages: one chunk of each stage that sends, taken apart.
        level_bytes: sent at each level, there and back.
        level_messages: the same for messages, over all chunks.
        nic_out_bytes: ``[num_nics]`` sent by each NIC, there and back.
    """

    algorithm: Algorithm
    tp_mode: TpMode
    num_chunks: int
    seconds: float
    stage_s: dict[str, float]
    stages: dict[str, PhaseTime]
    level_bytes: dict[Level, float]
    level_messages: dict[Level, int]
    nic_out_bytes: FloatArray

    @property
    def name(self) -> str:
        """For people: ``halo_dedup sliced in 4 chunks``."""
        mode = "" if self.tp_mode == "none" else f" {self.tp_mode}"
        chunks = "" if self.num_chunks == 1 else f" in {self.num_chunks} chunks"
        return f"{self.algorithm}{mode}{chunks}"

    @property
    def crossing_bytes(self) -> float:
        """Bytes that leave their node."""
        return self.level_bytes["group"] + self.level_bytes["far"]

    @property
    def crossing_messages(self) -> int:
        """Messages that leave their node."""
        return self.level_messages["group"] + self.level_messages["far"]

    @property
    def limit(self) -> str:
        """The longest stage, its port, and what it spends its time on."""
        if not self.stages:
            return "nothing is sent"
        name = max(self.stages, key=lambda stage: self.stages[stage].seconds)
        time = self.stages[name]
        parts = {"latency": time.latency_s, "messages": time.gap_s, "bytes": time.transfer_s}
        cause = max(parts, key=lambda part: parts[part])
        return f"{name} on {time.port}, {parts[cause] / time.seconds:.0%} {cause}"


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class Choice:
    """What to do, and why.

    Attributes:
        best: the fastest; of equally fast ones the simplest.
        baseline: the flat exchange of everything at once.
        candidates: all that were priced, fastest first.
        reason: one or two sentences.
    """

    best: Prediction
    baseline: Prediction
    candidates: tuple[Prediction, ...]
    reason: str

    def describe(self, max_candidates: int = 12) -> str:
        """The reason and a table of the fastest candidates, at most 100 columns wide."""
        head = f"{'modelled':<22} {'n':>2} {'ms':>10} {'MB crossing':>12} {'messages':>9}  limit"
        lines = [*textwrap.wrap(self.reason, 100), head]
        for each in self.candidates[:max_candidates]:
            name = each.name.split(" in ")[0]
            size, count = each.crossing_bytes / 1e6, each.crossing_messages
            numbers = f"{each.num_chunks:>2} {each.seconds * 1e3:>10.3f} {size:>12.3f} {count:>9}"
            lines.append(f"{name:<22} {numbers}  {each.limit}"[:100])
        return "\n".join(lines)


def predict(
    traffic: Traffic, algorithm: Algorithm, tp_mode: TpMode = "none", num_chunks: int = 1
) -> Prediction:
    """Price one way of exchanging.

    Args:
        traffic: what is to be moved.
        algorithm: ``flat``, ``halo`` or ``halo_dedup``.
        tp_mode: ``none`` exactly if ``traffic.tp_size`` is 1.
        num_chunks: rows are cut into so many equal parts.

    Raises:
        ConfigError: a mode that does not fit the tensor parallelism, or no chunk.

    Example:
        >>> from piper_kernels.dist.exchange_counts import plain_counts
        >>> from piper_kernels.dist.topology_presets import frontier
        >>> topology = frontier(1).lay_out((1, 1))
        >>> traffic = Traffic(topology=topology, counts=plain_counts(topology, [[0, 5], [5, 0]]),
        ...                   dispatch_row_bytes=1e6, combine_row_bytes=1e6)
        >>> round(predict(traffic, "flat").seconds * 1e6)  # twice 10 + 5 + 200 us
        430
    """
    fits = (tp_mode == "none") == (traffic.tp_size == 1)
    requirement = f"be none exactly if tp_size is 1, and tp_size is {traffic.tp_size}"
    require(fits, "predict", "tp_mode", requirement, tp_mode)
    return _price(traffic, algorithm, tp_mode, (num_chunks,))[0]


def choose(
    traffic: Traffic,
    *,
    algorithms: Sequence[Algorithm] = ALGORITHMS,
    chunk_options: Sequence[int] = CHUNK_OPTIONS,
) -> Choice:
    """Price all ways of exchanging and take the fastest.

    Args:
        traffic: what is to be moved.
        algorithms: those allowed; the flat baseline is always priced.
        chunk_options: numbers of chunks allowed.

    Raises:
        ConfigError: no algorithm or no number of chunks.

    Example:
        One large message per rank and two nodes: nothing beats sending it.

        >>> from piper_kernels.dist.exchange_counts import plain_counts
        >>> from piper_kernels.dist.topology_presets import frontier
        >>> topology = frontier(1).lay_out((1, 1))
        >>> traffic = Traffic(topology=topology, counts=plain_counts(topology, [[0, 5], [5, 0]]),
        ...                   dispatch_row_bytes=1e6, combine_row_bytes=1e6)
        >>> choose(traffic).best.name
        'flat'
    """
    require(bool(algorithms), "choose", "algorithms", "name one at least", list(algorithms))
    require(
        bool(chunk_options), "choose", "chunk_options", "name one at least", list(chunk_options)
    )
    modes: tuple[TpMode, ...] = ("none",) if traffic.tp_size == 1 else ("replicated", "sliced")
    candidates = [
        prediction
        for mode in modes
        for algorithm in algorithms
        for prediction in _price(traffic, algorithm, mode, chunk_options)
    ]
    plain = ("flat", modes[0], 1)
    priced = [c for c in candidates if (c.algorithm, c.tp_mode, c.num_chunks) == plain]
    baseline = priced[0] if priced else predict(traffic, "flat", modes[0])
    # equal to 9 digits is equal: then fewer chunks, fewer messages and the simpler algorithm win
    candidates.sort(
        key=lambda c: (
            float(f"{c.seconds:.9e}"),
            c.num_chunks,
            ALGORITHMS.index(c.algorithm),
            c.tp_mode != modes[0],
        )
    )
    best = candidates[0]
    return Choice(
        best=best,
        baseline=baseline,
        candidates=tuple(candidates),
        reason=_reason(best, baseline, candidates),
    )


def _price(
    traffic: Traffic, algorithm: Algorithm, tp_mode: TpMode, chunk_options: Sequence[int]
) -> list[Prediction]:
    """One way of exchanging, for several numbers of chunks."""
    for num_chunks in chunk_options:
        require(num_chunks >= 1, "predict", "num_chunks", "be at least 1", num_chunks)
    tasks = list_tasks(traffic, algorithm, tp_mode)
    sent = [(task.name, task.phase, task.row_bytes) for task in tasks if task.phase is not None]
    loads = [link_loads(traffic.topology, [phase], size) for _, phase, size in sent]
    level_bytes = {level: sum(load.level_bytes[level] for load in loads) for level in LEVELS}
    messages = {level: sum(load.level_messages[level] for load in loads) for level in LEVELS}
    nic_out_bytes = np.zeros(len(traffic.topology.maps.nic_to_node))
    nic_out_bytes += sum(load.nic_out_bytes for load in loads)
    share = traffic.flat_far_efficiency
    times = {
        name: chunk_times(traffic.topology, phase, size, chunk_options, flat_far_efficiency=share)
        for name, phase, size in sent
    }
    predictions = []
    for index, num_chunks in enumerate(chunk_options):
        chunk = {name: each[index] for name, each in times.items()}
        stages = _stages(tasks, chunk, traffic.expert_s / num_chunks)
        predictions.append(
            Prediction(
                algorithm=algorithm,
                tp_mode=tp_mode,
                num_chunks=num_chunks,
                seconds=makespan(schedule_chunks(stages, num_chunks)),
                stage_s={stage.name: stage.seconds * num_chunks for stage in stages},
                stages=chunk,
                level_bytes=level_bytes,
                level_messages={level: count * num_chunks for level, count in messages.items()},
                nic_out_bytes=nic_out_bytes,
            )
        )
    return predictions


def _stages(tasks: Sequence[Task], chunk: dict[str, PhaseTime], expert_s: float) -> list[Stage]:
    """The tasks of one chunk with their seconds."""
    return [
        Stage(
            name=task.name,
            seconds=chunk[task.name].seconds if task.name in chunk else expert_s,
            resources=task.resources,
            after=task.after,
        )
        for task in tasks
    ]


def _reason(best: Prediction, baseline: Prediction, candidates: Sequence[Prediction]) -> str:
    """Why the best is best, from what differs between it and the baseline."""
    if best.name == baseline.name:
        others = [c for c in candidates if (c.algorithm, c.tp_mode) != ("flat", best.tp_mode)]
        if not others:
            return f"{best.name}: {_ms(best)}; nothing else is allowed."
        ratio = others[0].seconds / best.seconds if best.seconds else 1.0
        saved = " and ".join(_saved(others[0], best))
        but = f"though it sends {saved}" if saved else "and sends no fewer bytes or messages"
        alternative = f"{others[0].name} would take {ratio:.2f} times as long, {but}"
        return f"{best.name}: {_ms(best)}. {alternative}; limited by {others[0].limit}."
    why = _saved(best, baseline)
    if best.num_chunks > 1:
        why.append(f"{best.num_chunks} chunks overlap their stages")
    ratio = baseline.seconds / best.seconds
    because = ", ".join(why) if why else f"less time in {best.limit}"
    return (
        f"{best.name}: {_ms(best)}, {ratio:.2f} times faster than {baseline.name} "
        f"({_ms(baseline)}): {because}."
    )


def _saved(ours: Prediction, theirs: Prediction) -> list[str]:
    """What we send less of than they, between nodes; messages counted in one chunk."""
    saved = []
    if 0 < ours.crossing_bytes < 0.99 * theirs.crossing_bytes:
        ratio = theirs.crossing_bytes / ours.crossing_bytes
        saved.append(f"{ratio:.2f} times fewer bytes between nodes")
    ours_each = ours.crossing_messages / ours.num_chunks
    if 0 < ours_each < 0.99 * theirs.crossing_messages / theirs.num_chunks:
        ratio = theirs.crossing_messages / theirs.num_chunks / ours_each
        saved.append(f"{ratio:.2f} times fewer messages between nodes")
    return saved


def _ms(prediction: Prediction) -> str:
    return f"{prediction.seconds * 1e3:.3f} ms"
