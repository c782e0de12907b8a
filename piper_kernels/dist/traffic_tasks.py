"""What a way of exchanging does, stage by stage, so that the traffic model can price it.

Without tensor parallelism (TP) a layer is: dispatch, experts, combine. Under TP every rank of a TP
group holds all tokens of the group, and its experts are cut over the group, so either

- ``replicated``: each TP rank exchanges all rows; expert outputs are all-reduced; or
- ``sliced``: each TP rank exchanges its share of the rows, an all-gather inside the TP group
  completes them, and on the way back a reduce-scatter cuts them again.

Pure: no torch, no process group. Letters: P ranks of the expert-parallel group, t ranks of a TP
group; world rank = ep * t + tp.
Source: MoNTA (2411.00662) for slice, exchange, gather in chunks; its public patch has no model.
"""

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Literal

import numpy as np

from piper_kernels.dist.exchange_counts import CountArray, ExchangeCounts
from piper_kernels.dist.halo_phases import Algorithm, Phase
from piper_kernels.dist.halo_plan import make_plan
from piper_kernels.dist.topology import Topology
from piper_kernels.errors import require

TpMode = Literal["none", "replicated", "sliced"]


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class Traffic:
    """What one layer has to move, once.

    Attributes:
        topology: of all ``P * tp_size`` ranks, a TP group's ranks side by side.
        counts: rows between the P expert-parallel ranks, counted or expected; under TP those of one
            TP rank's full copy.
        dispatch_row_bytes: of one row on the way to the experts.
        combine_row_bytes: of one row on the way back.
        top_k: rows per token, to know how many tokens a TP group has.
        tp_size: t, at most the ranks of a node.
        expert_s: seconds that the experts need for all rows of the slowest rank; cut into as many
            chunks as the exchange, and overlapped with it.
        has_combine: also move the rows back.
        flat_far_efficiency: share of a NIC's bandwidth that a flat exchange gets between switch
            groups. The one calibration constant: 1.0 is physics; vendors' collectives have less.
    """

    topology: Topology
    counts: ExchangeCounts
    dispatch_row_bytes: float
    combine_row_bytes: float
    top_k: int = 1
    tp_size: int = 1
    expert_s: float = 0.0
    has_combine: bool = True
    flat_far_efficiency: float = 1.0

    def __post_init__(self) -> None:
        name, num_ranks = "Traffic", self.topology.num_ranks
        fits = self.tp_size >= 1 and num_ranks % self.tp_size == 0
        require(fits, name, "tp_size", f"divide the {num_ranks} ranks", self.tp_size)
        nodes = self.topology.maps.rank_to_node.reshape(-1, self.tp_size)
        is_inside = bool((nodes == nodes[:, :1]).all())
        remedy = "Give tensor parallelism the innermost axis and ranks of one node."
        requirement = "keep each group of tensor parallelism on one node"
        require(is_inside, name, "topology", requirement, "one that spans two", remedy)
        self.counts.check(name, self.part(0))
        for field in ("dispatch_row_bytes", "combine_row_bytes", "top_k"):
            value = getattr(self, field)
            require(value > 0, name, field, "be above 0", value)
        require(self.expert_s >= 0, name, "expert_s", "be >= 0", self.expert_s)
        share = self.flat_far_efficiency
        require(0 < share <= 1, name, "flat_far_efficiency", "be above 0, at most 1", share)

    def part(self, tp_rank: int) -> Topology:
        """The expert-parallel group that holds the ``tp_rank``-th copy."""
        if self.tp_size == 1:
            return self.topology
        return self.topology.select(range(tp_rank, self.topology.num_ranks, self.tp_size))


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class Task:
    """One stage to price: some messages, or the experts.

    Attributes:
        name: unique among the tasks of a strategy.
        phase: messages over world ranks; ``None`` for the experts.
        row_bytes: of one row.
        resources: what it occupies: ``nic``, ``node``, ``gpu``.
        after: tasks of the same chunk that must have ended.
    """

    name: str
    phase: Phase | None
    row_bytes: float
    resources: tuple[str, ...]
    after: tuple[str, ...]


def list_tasks(traffic: Traffic, algorithm: Algorithm, tp_mode: TpMode) -> tuple[Task, ...]:
    """The stages of one layer's exchange; those without messages are left out."""
    is_sliced, tp_size = tp_mode == "sliced", traffic.tp_size
    counts = _share(traffic.counts, tp_size) if is_sliced else traffic.counts
    plans = [
        make_plan(traffic.part(i), counts, traffic.dispatch_row_bytes, algorithm, has_blocks=False)
        for i in range(tp_size)
    ]
    there = [_merge([plan.phases[i] for plan in plans]) for i in range(len(plans[0].phases))]
    arrived = plans[0].block_rows.sum(axis=0)
    tokens = traffic.counts.rows.sum(axis=1) / traffic.top_k
    tasks = list(_leg(traffic, "dispatch", there, traffic.dispatch_row_bytes, ()))
    if is_sliced:
        gather = _tp_phase(arrived, tp_size)
        tasks += _collective(traffic, "gather", gather, traffic.dispatch_row_bytes, tasks)
    if traffic.expert_s:
        last = _leaves(tasks)
        tasks.append(Task(name="experts", phase=None, row_bytes=0, resources=("gpu",), after=last))
    if not traffic.has_combine:
        return tuple(tasks)
    size = traffic.combine_row_bytes
    if tp_size > 1:
        reduce = _tp_phase(arrived if is_sliced else 2 * arrived / tp_size, tp_size)
        tasks += _collective(traffic, "reduce", reduce, size, tasks)
    back = [plan.reverse() for plan in plans]
    phases = [_merge([plan.phases[i] for plan in back]) for i in range(len(back[0].phases))]
    tasks += list(_leg(traffic, "combine", phases, size, _leaves(tasks)))
    if is_sliced:
        regather = _tp_phase(tokens / tp_size, tp_size)
        tasks += _collective(traffic, "regather", regather, size, tasks)
    return tuple(tasks)


def _share(counts: ExchangeCounts, tp_size: int) -> ExchangeCounts:
    """The part of the rows that one TP rank exchanges."""
    return ExchangeCounts(
        rows=counts.rows / tp_size,
        rank_rows=counts.rank_rows / tp_size,
        node_rows=counts.node_rows / tp_size,
    )


def _merge(parts: list[Phase]) -> Phase:
    """The same phase of every TP rank's exchange as one phase over world ranks."""
    tp_size = len(parts)
    return replace(
        parts[0],
        src=np.concatenate([part.src * tp_size + i for i, part in enumerate(parts)]),
        dst=np.concatenate([part.dst * tp_size + i for i, part in enumerate(parts)]),
        num_rows=np.concatenate([part.num_rows for part in parts]),
        step=np.concatenate([part.step for part in parts]),
    )


def _tp_phase(rows: CountArray, tp_size: int) -> Phase:
    """Each TP rank sends ``rows[ep]`` rows to each other rank of its TP group."""
    members = np.arange(tp_size)
    src, dst = (side.ravel() for side in np.meshgrid(members, members, indexing="ij"))
    others = src != dst
    base = np.arange(len(rows))[:, None] * tp_size
    shape = (len(rows), int(others.sum()))
    return Phase(
        name="I",
        after=(),
        src=(base + src[others]).ravel().astype(np.int32),
        dst=(base + dst[others]).ravel().astype(np.int32),
        num_rows=np.broadcast_to(np.asarray(rows)[:, None], shape).ravel(),
        step=np.zeros(shape, dtype=np.int32).ravel(),
        blocks=None,
    )


def _leg(
    traffic: Traffic, leg: str, phases: list[Phase], row_bytes: float, after: tuple[str, ...]
) -> Iterator[Task]:
    """Dispatch or combine: a task for each phase that sends anything."""
    kept = {phase.name for phase in phases if _levels(traffic, phase).max(initial=0) > 0}
    for phase in phases:
        if phase.name not in kept:
            continue
        waits = tuple(f"{leg} {name}" for name in phase.after if name in kept)
        levels = _levels(traffic, phase)
        uses = (("nic", (levels >= 2).any()), ("node", (levels == 1).any()))
        yield Task(
            name=f"{leg} {phase.name}",
            phase=phase,
            row_bytes=row_bytes,
            resources=tuple(name for name, is_used in uses if is_used),
            after=waits or after,
        )


def _levels(traffic: Traffic, phase: Phase) -> CountArray:
    return traffic.topology.distances(phase.src, phase.dst)


def _collective(
    traffic: Traffic, name: str, phase: Phase, row_bytes: float, before: list[Task]
) -> list[Task]:
    """A collective of the TP groups, inside nodes, after everything before."""
    if traffic.tp_size == 1:
        return []
    last = _leaves(before)
    return [Task(name=name, phase=phase, row_bytes=row_bytes, resources=("node",), after=last)]


def _leaves(tasks: list[Task]) -> tuple[str, ...]:
    """Tasks that no other waits for."""
    awaited = {name for task in tasks for name in task.after}
    return tuple(task.name for task in tasks if task.name not in awaited)
