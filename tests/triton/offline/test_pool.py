"""Compiling in processes: real compilations, a case that fails, a process that dies."""

from collections.abc import Iterator, Sequence
from concurrent.futures.process import BrokenProcessPool
from pathlib import Path

import pytest

from piper_kernels.triton.offline import pool
from piper_kernels.triton.offline.cases import PLAIN, Case
from piper_kernels.triton.offline.pool import Outcome, compile_case, compile_cases

SMALL = [
    Case(target="sm_90", op="offsets", dtype="int", variant=PLAIN, tiles=None),
    Case(target="gfx942", op="permute", dtype="bf16", variant=PLAIN, tiles=None),
]


def test_compile_cases_compiles_and_reports_what_fails(tmp_path: Path) -> None:
    broken = Case(target="sm_90", op="permute", dtype="int", variant=PLAIN, tiles=None)
    seen: list[Outcome] = []
    cases = [SMALL[0], broken, SMALL[1]]
    found = compile_cases(cases, jobs=1, cache_folder=tmp_path, on_outcome=seen.append)
    assert [outcome.case for outcome in found] == cases
    assert len(seen) == 3
    for outcome, wide_loads in ((found[0], 0), (found[2], 2)):
        assert outcome.resources is not None, outcome.error
        assert outcome.resources.registers > 0
        assert outcome.resources.num_spills == outcome.resources.stack_bytes == 0
        assert outcome.resources.num_wide_loads == wide_loads
    assert (found[1].resources, found[1].error) == (None, "KeyError: 'int'")
    assert list(tmp_path.rglob("*.cubin"))
    assert list(tmp_path.rglob("*.amdgcn"))


def test_compile_case_turns_a_failure_into_data() -> None:
    case = Case(target="sm_90", op="nonsense", dtype="bf16", variant=PLAIN, tiles=None)
    assert compile_case(case) == Outcome(case=case, error="KeyError: 'nonsense'")


def test_compile_cases_finds_the_case_that_kills_its_process(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    cases = [
        Case(target="sm_90", op=op, dtype="bf16", variant=PLAIN, tiles=None)
        for op in ("a", "b", "deadly", "c", "d", "e", "f", "g")
    ]

    def run_pool(cases: Sequence[Case], jobs: int, cache_folder: Path) -> Iterator[Outcome]:
        for case in cases:
            if case.op == "deadly":
                raise BrokenProcessPool
            yield Outcome(case=case, error="fine")

    monkeypatch.setattr(pool, "_run_pool", run_pool)
    found = compile_cases(cases, jobs=1, cache_folder=tmp_path)
    assert [outcome.case for outcome in found] == cases
    errors = {outcome.case.op: outcome.error for outcome in found}
    assert errors.pop("deadly") == "the compiler took its process down"
    assert set(errors.values()) == {"fine"}
