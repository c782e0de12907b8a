"""The parent's side of a run: start the ranks, watch how each one ends, leave none behind."""

import multiprocessing
import os
import pickle
import signal
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from multiprocessing.connection import Connection, wait
from multiprocessing.context import ForkServerProcess
from pathlib import Path
from typing import Any, Literal

from piper_kernels.testing.rank_process import STACK_SIGNAL, RankReport, RankTask, run_rank

# Slow to import and needed by most ranks (optimizers and DDP import torch._dynamo). The fork server
# skips what is not installed.
PRELOADED = ["torch", "torch._dynamo", "torch.distributed.fsdp", "pytest", "hypothesis"]
# How long ranks that fail for the same reason have to say so, once one has failed.
_GRACE_S = 0.3
# How long a hanging rank has to write its stack.
_STACK_WAIT_S = 0.3
# How long a rank whose function has returned has to end.
_EXIT_WAIT_S = 10.0
_NUM_LOG_LINES = 30


@dataclass(frozen=True, kw_only=True, slots=True)
class RankOutcome:
    """How one rank ended.

    Attributes:
        rank: which one.
        kind: ``returned``; ``raised``; ``died`` (a signal, ``os._exit``, an abort in C++); ``hung``
            (killed at the time-out); ``stopped`` (killed because another rank had failed).
        result: what the function returned, or ``None``.
        error: one line, e.g. ``ValueError: boom`` or ``killed by SIGKILL``; empty if it returned.
        details: the traceback (``raised``), or the Python stack and the last lines of output
            (``died``, ``hung``); else empty.
    """

    rank: int
    kind: Literal["returned", "raised", "died", "hung", "stopped"]
    result: Any = None
    error: str = ""
    details: str = ""


@dataclass(frozen=True, kw_only=True, slots=True)
class RunningRank:
    """The parent's handle on a rank's process."""

    task: RankTask
    process: ForkServerProcess
    connection: Connection

    @property
    def rank(self) -> int:
        """Which rank it is."""
        return self.task.rank

    @property
    def pid(self) -> int:
        """Process id; also the id of the session and of the process group that it leads."""
        pid = self.process.pid
        assert pid is not None, f"rank {self.rank} was never started"
        return pid


@contextmanager
def started(tasks: Sequence[RankTask]) -> Iterator[list[RunningRank]]:
    """The ranks as running processes. When the context ends, so has every process."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(PRELOADED)
    ranks: list[RunningRank] = []
    try:
        for task in tasks:
            here, there = context.Pipe()
            process = context.Process(target=run_rank, args=(task, there))
            process.start()
            there.close()
            ranks.append(RunningRank(task=task, process=process, connection=here))
        yield ranks
    finally:
        for rank in ranks:
            _kill(rank)


def watch(
    ranks: Sequence[RunningRank], timeout_s: float, *, stops_at_failure: bool
) -> list[RankOutcome]:
    """Wait until every rank has ended, time is up, or a failure's grace is over.

    Returns:
        One outcome per rank, in the order in which they ended.
    """
    outcomes: dict[int, RankOutcome] = {}
    deadline = time.monotonic() + timeout_s
    is_stopping = False
    while running := [rank for rank in ranks if rank.rank not in outcomes]:
        handles = [handle for r in running for handle in (r.connection, r.process.sentinel)]
        ready = wait(handles, max(0.0, deadline - time.monotonic()))
        if not ready:
            break
        for rank in running:
            if rank.connection in ready or rank.process.sentinel in ready:
                outcomes[rank.rank] = _outcome_of(rank)
        has_failed = any(outcome.kind != "returned" for outcome in outcomes.values())
        if stops_at_failure and has_failed and not is_stopping:
            is_stopping = True
            deadline = min(deadline, time.monotonic() + _GRACE_S)
    if is_stopping:
        stopped = [RankOutcome(rank=r.rank, kind="stopped", error="killed") for r in running]
        return [*outcomes.values(), *stopped]
    hung = _outcomes_of_hung(running, timeout_s)
    return [*_release(ranks, outcomes), *hung]


def _outcome_of(rank: RunningRank) -> RankOutcome:
    """Read a rank's report; one that ended without a report has died."""
    report: RankReport | None = None
    with suppress(EOFError, ConnectionError):
        if rank.connection.poll():
            report = rank.connection.recv()
    if report is None:
        rank.process.join(_EXIT_WAIT_S)
        return _died(rank, "before its function returned")
    if report.kind == "raised":
        return RankOutcome(rank=rank.rank, kind="raised", error=report.error, details=report.stack)
    return RankOutcome(rank=rank.rank, kind="returned", result=pickle.loads(report.packed_result))


def _died(rank: RunningRank, when: str) -> RankOutcome:
    code = rank.process.exitcode
    if code is None:
        error = f"did not end within {_EXIT_WAIT_S:g} s"
    elif code < 0:
        error = f"killed by {signal.Signals(-code).name}"
    else:
        error = f"ended with exit code {code}"
    return RankOutcome(
        rank=rank.rank, kind="died", error=f"{error} {when}", details=_traces_of(rank)
    )


def _outcomes_of_hung(ranks: Sequence[RunningRank], timeout_s: float) -> list[RankOutcome]:
    """Where each rank hangs: its Python stack and its last output."""
    for rank in ranks:
        with suppress(ProcessLookupError):
            os.kill(rank.pid, STACK_SIGNAL)
    if ranks:
        time.sleep(_STACK_WAIT_S)
    error = f"still running after {timeout_s:g} s"
    return [
        RankOutcome(rank=rank.rank, kind="hung", error=error, details=_traces_of(rank))
        for rank in ranks
    ]


def _release(
    ranks: Sequence[RunningRank], outcomes: dict[int, RankOutcome]
) -> Iterator[RankOutcome]:
    """Let the ranks that returned leave their process group; one that cannot has died."""
    returned = [rank for rank in ranks if rank.rank in outcomes]
    returned = [rank for rank in returned if outcomes[rank.rank].kind == "returned"]
    for rank in returned:
        with suppress(ConnectionError):
            rank.connection.send("leave")
    deadline = time.monotonic() + _EXIT_WAIT_S
    for rank in returned:
        rank.process.join(max(0.0, deadline - time.monotonic()))
        if rank.process.exitcode != 0:
            result = outcomes[rank.rank].result
            died = _died(rank, "after its function returned")
            outcomes[rank.rank] = replace(died, result=result)
    yield from outcomes.values()


def _traces_of(rank: RunningRank) -> str:
    """The rank's Python stack, if it wrote one, and its last lines of output."""
    stack = _read(rank.task.stack_path).rstrip()
    lines = _read(rank.task.log_path).splitlines()[-_NUM_LOG_LINES:]
    return "\n".join([stack, *lines] if stack else lines)


def _read(path: Path) -> str:
    """The file's text; empty if the rank ended before it made the file."""
    return path.read_text(errors="replace") if path.exists() else ""


def _kill(rank: RunningRank) -> None:
    """End a rank's process and everything it has started."""
    with suppress(ProcessLookupError, PermissionError):
        os.killpg(rank.pid, signal.SIGKILL)
    # it may not have become the leader of a group yet
    rank.process.kill()
    rank.process.join()
    rank.process.close()
    rank.connection.close()


def echo_output(ranks: Sequence[RunningRank]) -> None:
    """Repeat on our stdout what the ranks have printed, each line with its rank."""
    for rank in ranks:
        for line in _read(rank.task.log_path).splitlines():
            sys.stdout.write(f"[rank {rank.rank}] {line}\n")
