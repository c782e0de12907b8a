"""Compile many cases in parallel processes, each with Triton's cache in a folder of our own."""

import os
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, ProcessPoolExecutor, wait
from concurrent.futures.process import BrokenProcessPool
from dataclasses import dataclass
from multiprocessing import get_context
from pathlib import Path

from piper_kernels.triton.offline.assembly import Resources
from piper_kernels.triton.offline.cases import Case


@dataclass(frozen=True, kw_only=True, slots=True)
class Outcome:
    """One case: what it takes, or why it did not compile."""

    case: Case
    resources: Resources | None = None
    error: str = ""


def _prepare(cache_folder: str) -> None:
    """Settings of a worker, before it loads Triton."""
    os.environ.pop("TRITON_INTERPRET", None)
    os.environ["TRITON_CACHE_DIR"] = cache_folder
    os.environ["OMP_NUM_THREADS"] = "1"


def compile_case(case: Case) -> Outcome:
    """Record the case's launch and compile it, in this process; whatever fails becomes data."""
    # what loads Triton is imported once the environment is set
    from piper_kernels.triton.offline.compiling import compile_launch
    from piper_kernels.triton.offline.recording import record

    try:
        return Outcome(case=case, resources=compile_launch(record(case), case.target))
    except Exception as error:  # a compiler may raise anything, and the others must go on
        text = " ".join(f"{type(error).__name__}: {error}".split())
        return Outcome(case=case, error=text[:400])


def _run_pool(cases: Sequence[Case], jobs: int, cache_folder: Path) -> Iterator[Outcome]:
    """Outcomes as they come; raises BrokenProcessPool when a process dies."""
    with ProcessPoolExecutor(
        jobs,
        mp_context=get_context("spawn"),
        initializer=_prepare,
        initargs=(str(cache_folder),),
    ) as pool:
        running: set[Future[Outcome]] = {pool.submit(compile_case, case) for case in cases}
        while running:
            done, running = wait(running, return_when=FIRST_COMPLETED)
            for future in done:
                yield future.result()


def compile_cases(
    cases: Sequence[Case],
    *,
    jobs: int,
    cache_folder: Path,
    on_outcome: Callable[[Outcome], None] = lambda outcome: None,
) -> list[Outcome]:
    """Compile every case.

    A compiler that takes its process down is an outcome of the case it worked on; to find which one
    that was, those that may have been running are then compiled one process each.

    Args:
        cases: what to compile.
        jobs: processes.
        cache_folder: Triton's cache; repeated compilations are read from it.
        on_outcome: called after each case, e.g. to show progress.

    Returns:
        Outcomes in the order of the cases.
    """
    found: dict[Case, Outcome] = {}

    def keep(outcome: Outcome) -> None:
        found[outcome.case] = outcome
        on_outcome(outcome)

    while pending := [case for case in cases if case not in found]:
        try:
            for outcome in _run_pool(pending, min(jobs, len(pending)), cache_folder):
                keep(outcome)
        except BrokenProcessPool:
            suspects = [case for case in pending if case not in found][: 2 * jobs + 1]
            for case in suspects:
                try:
                    keep(next(_run_pool([case], 1, cache_folder)))
                except BrokenProcessPool:
                    keep(Outcome(case=case, error="the compiler took its process down"))
    return [found[case] for case in cases]
