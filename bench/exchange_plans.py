"""Carry out exchange plans with plain sends and receives, and time them on emulated nodes.

No part of the library's own execution: what is measured here is the plan, as the simulator sees it.
Every rank posts its receives first. With gloo the other order halves the rate of a pair: the word
that a receiver is ready queues behind its own bytes.
"""

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
import torch
import torch.distributed as dist
from numpy.typing import NDArray
from torch import Tensor

from piper_kernels.dist.exchange_counts import plain_counts
from piper_kernels.dist.halo_phases import Algorithm
from piper_kernels.dist.halo_program import Buffer, PhaseProgram, RankProgram, Transfer, rank_counts
from piper_kernels.dist.halo_routes import rank_routes
from piper_kernels.dist.topology import Topology
from piper_kernels.errors import PlanError

Buffers = dict[Buffer, Tensor]


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class PlanTask:
    """One exchange to be timed.

    Attributes:
        name: for the table.
        algorithm: ``flat`` or ``halo``.
        rows: ``[P, P]`` from rank to rank.
        row_bytes: of one row.
    """

    name: str
    algorithm: Algorithm
    rows: NDArray[np.int64]
    row_bytes: int


def time_plans(topology: Topology, tasks: Sequence[PlanTask], num_rounds: int) -> list[list[float]]:
    """On every rank: check each task's result, then time all tasks in turns.

    Returns:
        Seconds by task and round; a round's are those of the slowest rank.

    Raises:
        PlanError: an exchange delivered something else than ``all_to_all_single``.
    """
    rank = dist.get_rank()
    prepared = [_prepare(topology, task, rank) for task in tasks]
    for task, (program, buffers) in zip(tasks, prepared, strict=True):
        _run(program, buffers)
        _check(task, rank, buffers)
    seconds: list[list[float]] = [[] for _ in tasks]
    for _ in range(num_rounds):
        for times, (program, buffers) in zip(seconds, prepared, strict=True):
            dist.barrier()
            start = time.perf_counter()
            _run(program, buffers)
            slowest = torch.tensor([time.perf_counter() - start], dtype=torch.float64)
            dist.all_reduce(slowest, dist.ReduceOp.MAX)
            times.append(float(slowest))
    return seconds


def _prepare(topology: Topology, task: PlanTask, rank: int) -> tuple[RankProgram, Buffers]:
    """This rank's part, and its buffers: the input drawn at random, the rest poisoned."""
    counts = plain_counts(topology, task.rows)
    mine = rank_counts(topology, counts, rank, task.algorithm)
    program = rank_routes(topology, rank, task.algorithm).program(mine)
    buffers = {
        name: torch.full((rows, task.row_bytes), 255, dtype=torch.uint8)
        for name, rows in program.buffer_rows.items()
    }
    generator = torch.Generator().manual_seed(rank)
    shape = buffers["input"].shape
    buffers["input"] = torch.randint(0, 255, shape, dtype=torch.uint8, generator=generator)
    return program, buffers


def _run(program: RankProgram, buffers: Buffers) -> None:
    """One exchange. Phases that wait for nothing are under way together."""
    waiting = list(program.phases)
    while waiting:
        names = {phase.name for phase in waiting}
        ready = [phase for phase in waiting if not names & set(phase.after)]
        ends = [_start(program.rank, phase, buffers) for phase in ready]
        for end in ends:
            end()
        waiting = [phase for phase in waiting if phase not in ready]


def _start(rank: int, phase: PhaseProgram, buffers: Buffers) -> Callable[[], None]:
    """Post all messages of a phase; the result waits for them and puts rows in their places."""
    source, target = buffers[phase.source], buffers[phase.target]
    landed = [(recv, torch.empty_like(_rows(target, recv))) for recv in phase.recvs]
    works = [dist.irecv(into, recv.peer) for recv, into in landed if recv.peer != rank]
    # kept until they are sent
    sent = [(send.peer, _rows(source, send)) for send in phase.sends]
    works += [dist.isend(rows, peer) for peer, rows in sent if peer != rank]
    for recv, into in landed:
        if recv.peer == rank:
            into.copy_(next(rows for peer, rows in sent if peer == rank))

    def end() -> None:
        for work in works:
            assert work is not None
            work.wait()
        for recv, into in landed:
            target[_index(recv)] = into

    return end


def _index(transfer: Transfer) -> Tensor | slice:
    """Rows of a message in its buffer."""
    pieces = list(zip(transfer.starts.tolist(), transfer.stops.tolist(), strict=True))
    if len(pieces) == 1:
        return slice(*pieces[0])
    return torch.cat([torch.arange(start, stop) for start, stop in pieces])


def _rows(buffer: Tensor, transfer: Transfer) -> Tensor:
    """The rows of a message; a view where they lie together."""
    return buffer[_index(transfer)]


def _check(task: PlanTask, rank: int, buffers: Buffers) -> None:
    """Compare with torch's own exchange."""
    received = torch.empty_like(buffers["output"])
    into, out = task.rows[:, rank].tolist(), task.rows[rank].tolist()
    dist.all_to_all_single(received, buffers["input"], into, out)
    if not torch.equal(received, buffers["output"]):
        raise PlanError(f"time_plans: rank {rank}: {task.name} differs from all_to_all_single.")
