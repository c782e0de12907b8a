"""Exchanges on arrays in one process: what programs say is done, row by row."""

from collections.abc import Callable, Sequence
from typing import Any, Literal, get_args

import numpy as np
from numpy.typing import NDArray

from piper_kernels.dist.halo_program import Buffer, PhaseProgram, RankProgram, Transfer
from piper_kernels.dist.topology import Topology
from piper_kernels.dist.topology_presets import frontier
from piper_kernels.errors import PlanError

Rows = NDArray[Any]
CountsKind = Literal["uniform", "skewed", "sparse", "all_to_one", "one_silent", "none"]
COUNTS_KINDS: tuple[CountsKind, ...] = get_args(CountsKind)


def make_buffers(programs: Sequence[RankProgram], row: Rows) -> list[dict[Buffer, Rows]]:
    """Every rank's buffers, each row set to ``row``, so that a row nobody writes shows."""
    return [
        {name: np.repeat(row[None], count, axis=0) for name, count in p.buffer_rows.items()}
        for p in programs
    ]


def run_programs(
    programs: Sequence[RankProgram],
    buffers: Sequence[dict[Buffer, Rows]],
    between: Callable[[str], None] | None = None,
) -> None:
    """Carry out an exchange: each rank's part in each phase, on the ranks' buffers, in place.

    Args:
        programs: of all ranks, in rank order.
        buffers: of all ranks.
        between: called with a phase's name before it starts, for what a caller does then.

    Raises:
        PlanError: a message that one end sends and the other does not expect, or of other length.
    """
    for index, first in enumerate(programs[0].phases):
        if between is not None:
            between(first.name)
        phases = [program.phases[index] for program in programs]
        wire = {}
        for rank, phase in enumerate(phases):
            for send in phase.sends:
                wire[rank, send.peer] = _rows(send, buffers[rank][phase.source])
        _receive(phases, buffers, wire)


def _receive(
    phases: Sequence[PhaseProgram],
    buffers: Sequence[dict[Buffer, Rows]],
    wire: dict[tuple[int, int], Rows],
) -> None:
    """Take every message off the wire, to the places its receiver names."""
    for rank, phase in enumerate(phases):
        for recv in phase.recvs:
            rows = wire.pop((recv.peer, rank), None)
            found = "none" if rows is None else len(rows)
            if rows is None or len(rows) != recv.num_rows:
                pair = f"from rank {recv.peer} to rank {rank}"
                sentence = f"phase {phase.name} {pair}: {recv.num_rows} rows expected, got {found}"
                raise PlanError(f"run_programs: {sentence}.")
            done = 0
            for start, stop in zip(recv.starts, recv.stops, strict=True):
                buffers[rank][phase.target][start:stop] = rows[done : done + stop - start]
                done += stop - start
    if wire:
        raise PlanError(f"run_programs: nobody expects the messages {sorted(wire)}.")


def _rows(send: Transfer, buffer: Rows) -> Rows:
    pieces = [buffer[start:stop] for start, stop in zip(send.starts, send.stops, strict=True)]
    return np.concatenate(pieces)


def make_cluster(sizes: Sequence[int], groups: Sequence[int], seed: int) -> Topology:
    """Nodes of ``sizes`` ranks in switch groups ``groups``, ranks dealt out at random.

    Every third node has all its ranks on one NIC, the others two ranks to a NIC.
    """
    topology = frontier(1).lay_out(sizes, groups=[f"group{group}" for group in groups])
    order = np.random.default_rng(seed).permutation(topology.num_ranks)
    nodes = [
        node.replace(nics=(0,) * len(node.nics)) if index % 3 == 2 else node
        for index, node in enumerate(topology.nodes)
    ]
    return topology.replace(nodes=tuple(nodes)).select(order.tolist())


def make_counts(kind: CountsKind, num_ranks: int, seed: int) -> NDArray[np.int64]:
    """``[P, P]`` rows from rank to rank.

    Args:
        kind: ``uniform``; ``skewed`` (popularity falls as 1 / rank^1.2); ``sparse`` (most are 0);
            ``all_to_one``; ``one_silent`` (the middle rank neither sends nor receives); ``none``.
        num_ranks: P.
        seed: equal seeds give equal counts.
    """
    rng = np.random.default_rng(seed)
    shape, middle = (num_ranks, num_ranks), num_ranks // 2
    if kind == "skewed":
        popularity = 1 / np.arange(1, num_ranks + 1) ** 1.2
        share = rng.permutation(popularity / popularity.sum())
        return rng.poisson(4 * num_ranks * share, shape)
    counts = rng.integers(0, 6, shape)
    if kind == "sparse":
        counts *= rng.random(shape) < 0.2
    elif kind == "all_to_one":
        counts[:, np.arange(num_ranks) != middle] = 0
    elif kind == "one_silent":
        counts[middle, :] = counts[:, middle] = 0
    elif kind == "none":
        counts[:] = 0
    return counts
