"""Run a function on several ranks: real processes, one thread each, joined by a process group.

Ranks are forked by Python's fork server, which has loaded torch: a run of 16 takes 0.5 s, where
spawning them takes 19 s (measured with gloo on 2 cores, torch 2.13).
"""

import inspect
import os
import pickle
import sys
import tempfile
import warnings
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from torch.distributed import TCPStore  # type: ignore[attr-defined]

from piper_kernels.errors import ConfigError, PiperError, instruction, require
from piper_kernels.testing.rank_group import RankOutcome, echo_output, started, watch
from piper_kernels.testing.rank_process import FunctionAddress, RankPlace, RankTask


class RankError(PiperError, RuntimeError):
    """At least one rank did not return.

    Attributes:
        outcomes: one :class:`RankOutcome` per rank, in rank order.
    """

    def __init__(self, message: str, outcomes: list[RankOutcome]) -> None:
        super().__init__(message)
        self.outcomes = outcomes


def run_ranks(
    function: Callable[..., Any],
    num_ranks: int,
    *args: Any,
    backend: str = "gloo",
    timeout_s: float = 60.0,
    places: Sequence[RankPlace] | None = None,
) -> list[Any]:
    """Call ``function(*args)`` on every rank and return what each rank returned.

    Each rank is a process with one torch thread, the caller's environment, ``sys.path`` and warning
    filters, and a default process group: ``torch.distributed.get_rank()`` tells which rank it is,
    and the variables that torchrun sets are set. What ranks print appears on the caller's stdout
    when all have ended, each line with its rank. No process outlives the call, and none outlives a
    caller that is killed.

    Args:
        function: a module-level function. One of a test file is found by its file, so nothing has
            to be importable by name.
        num_ranks: how many processes.
        *args: pickled, so each rank gets copies; tensors are copied too, not shared.
        backend: of the process group.
        timeout_s: limit for the whole run once the processes exist, in seconds; also the process
            group's own.
        places: where each rank runs, for emulated nodes; ``None``: all here.

    Returns:
        The results in rank order. They travel pickled.

    Raises:
        ConfigError: ``function`` cannot be found from another process, something cannot be pickled,
            or ``num_ranks`` is below 1.
        RankError: a rank raised, died or hung. The message names it and shows its traceback, or the
            stack in which it crashed or hangs. The other ranks have been killed.

    Example:
        A test file with ``def which_rank(): return torch.distributed.get_rank()`` may call
        ``run_ranks(which_rank, 4)`` and gets ``[0, 1, 2, 3]``.
    """
    outcomes = _run(function, num_ranks, args, backend, timeout_s, places, stops_at_failure=True)
    if any(outcome.kind != "returned" for outcome in outcomes):
        raise RankError(_describe(outcomes, timeout_s), _by_rank(outcomes))
    return [outcome.result for outcome in _by_rank(outcomes)]


def rank_outcomes(
    function: Callable[..., Any],
    num_ranks: int,
    *args: Any,
    backend: str = "gloo",
    timeout_s: float = 60.0,
    places: Sequence[RankPlace] | None = None,
) -> list[RankOutcome]:
    """Like :func:`run_ranks`, but let each rank end in its own way and tell how it did.

    For tests of faults: what do the survivors of a killed rank see?

    Returns:
        One outcome per rank, in rank order.

    Raises:
        ConfigError: as :func:`run_ranks`.
    """
    outcomes = _run(function, num_ranks, args, backend, timeout_s, places, stops_at_failure=False)
    return _by_rank(outcomes)


def _run(
    function: Callable[..., Any],
    num_ranks: int,
    args: tuple[Any, ...],
    backend: str,
    timeout_s: float,
    places: Sequence[RankPlace] | None,
    *,
    stops_at_failure: bool,
) -> list[RankOutcome]:
    require(num_ranks >= 1, "run_ranks", "num_ranks", "be at least 1", num_ranks)
    fits = places is None or len(places) == num_ranks
    requirement = f"be one for each of the {num_ranks} ranks"
    require(fits, "run_ranks", "places", requirement, len(places or ()))
    address, packed_args = _address_of(function), _pack("args", args)
    packed_filters = _pack("warnings.filters", list(warnings.filters))
    # port 0: the system chooses a free port and this store holds it, so nobody can take it between
    store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    with tempfile.TemporaryDirectory(prefix="piper-ranks-") as folder:
        tasks = [
            RankTask(
                function=address,
                packed_args=packed_args,
                rank=rank,
                num_ranks=num_ranks,
                backend=backend,
                store_port=store.port,
                timeout_s=timeout_s,
                environment=dict(os.environ),
                packed_warning_filters=packed_filters,
                log_path=Path(folder, f"rank{rank}.log"),
                stack_path=Path(folder, f"rank{rank}.stack"),
                place=places[rank] if places is not None else None,
            )
            for rank in range(num_ranks)
        ]
        with started(tasks) as ranks:
            outcomes = watch(ranks, timeout_s, stops_at_failure=stops_at_failure)
        echo_output(ranks)
    return outcomes


def _address_of(function: Callable[..., Any]) -> FunctionAddress:
    """How another process finds ``function``."""
    name = getattr(function, "__qualname__", repr(function))
    path = getattr(sys.modules.get(function.__module__), "__file__", None)
    require(
        inspect.isfunction(function) and "<" not in name and path is not None,
        "run_ranks",
        "function",
        "be a function at the top level of a file",
        name,
        "Move it there and pass what it needs as arguments.",
    )
    assert path is not None
    return FunctionAddress(module=function.__module__, path=path, name=name)


def _pack(argument: str, value: Any) -> bytes:
    try:
        return pickle.dumps(value)
    except (pickle.PicklingError, TypeError, AttributeError, RuntimeError) as error:
        requirement = "be picklable, since other processes get a copy"
        raise ConfigError(instruction("run_ranks", argument, requirement, error)) from error


def _by_rank(outcomes: list[RankOutcome]) -> list[RankOutcome]:
    return sorted(outcomes, key=lambda outcome: outcome.rank)


def _describe(outcomes: list[RankOutcome], timeout_s: float) -> str:
    """The cause first (a death explains what others raise), then what each failed rank has said."""
    severity = ("died", "raised", "hung", "stopped")
    failed = [outcome for outcome in outcomes if outcome.kind != "returned"]
    failed.sort(key=lambda outcome: severity.index(outcome.kind))
    first = failed[0]
    lead = f"rank {first.rank} of {len(outcomes)} {first.kind}: {first.error}"
    if first.kind == "hung":
        ranks = ", ".join(str(outcome.rank) for outcome in failed)
        lead = f"still running after {timeout_s:g} s: rank {ranks} of {len(outcomes)}"
    sections = [f"run_ranks: {lead}"]
    for outcome in failed:
        headline = f"--- rank {outcome.rank} {outcome.kind}: {outcome.error}"
        sections.append(f"{headline}\n{outcome.details}".rstrip())
    return "\n".join(sections)
