"""run_ranks itself: results, faults in every form, and nothing left behind."""

import importlib.util
import os
import signal
import subprocess
import sys
import time
import warnings
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from piper_kernels.errors import ConfigError
from piper_kernels.testing.ranks import RankError, rank_outcomes, run_ranks

ROOT = Path(__file__).resolve().parents[2]


@dataclass
class Parcel:
    """A class of a test module, to travel both ways."""

    rank: int
    tensor: Tensor


def add_rank(parcel: Parcel) -> Parcel:
    total = parcel.tensor + dist.get_rank()
    dist.all_reduce(total)
    return Parcel(rank=dist.get_rank(), tensor=total)


def test_run_ranks_returns_results_in_rank_order() -> None:
    parcels = run_ranks(add_rank, 3, Parcel(rank=-1, tensor=torch.tensor([1.0, 2.0])))
    assert [parcel.rank for parcel in parcels] == [0, 1, 2]
    for parcel in parcels:
        assert parcel.tensor.tolist() == [6.0, 9.0]


def surroundings() -> dict[str, Any]:
    with warnings.catch_warnings(record=True) as seen:
        warnings.simplefilter("always")
        warnings.warn("seen", UserWarning, stacklevel=1)
    action = next(f[0] for f in warnings.filters if f[2] is DeprecationWarning)
    return {
        "num_threads": torch.get_num_threads(),
        "variable": os.environ.get("PIPER_TEST_VARIABLE"),
        "torchrun": [os.environ[k] for k in ("RANK", "WORLD_SIZE", "LOCAL_RANK")],
        "folder": os.getcwd(),
        "num_warnings": len(seen),
        "action": action,
        "interface": os.environ["GLOO_SOCKET_IFNAME"],
    }


def test_run_ranks_gives_ranks_the_callers_surroundings(monkeypatch: pytest.MonkeyPatch) -> None:
    run_ranks(surroundings_free, 1)  # the fork server runs before the variable is set
    monkeypatch.setenv("PIPER_TEST_VARIABLE", "41")
    with warnings.catch_warnings():
        warnings.filterwarnings("once", category=DeprecationWarning)
        results = run_ranks(surroundings, 2)
    for rank, result in enumerate(results):
        assert result == {
            "num_threads": 1,
            "variable": "41",
            "torchrun": [str(rank), "2", str(rank)],
            "folder": os.getcwd(),
            "num_warnings": 1,
            "action": "once",
            "interface": "lo",
        }


def surroundings_free() -> None:
    assert "PIPER_TEST_VARIABLE" not in os.environ


def warn() -> None:
    warnings.warn("careful", UserWarning, stacklevel=1)


def test_run_ranks_turns_warnings_into_errors_like_the_caller() -> None:
    with pytest.raises(RankError, match="rank 0 of 1 raised: UserWarning: careful"):
        run_ranks(warn, 1)


def speak() -> None:
    print(f"hello from {dist.get_rank()}")
    os.write(2, b"from C\n")


def test_run_ranks_repeats_output_with_its_rank(capsys: pytest.CaptureFixture[str]) -> None:
    run_ranks(speak, 2)
    lines = capsys.readouterr().out.splitlines()
    assert sorted(lines) == [
        "[rank 0] from C",
        "[rank 0] hello from 0",
        "[rank 1] from C",
        "[rank 1] hello from 1",
    ]


def test_run_ranks_finds_a_function_by_its_file(tmp_path: Path) -> None:
    """Two modules of one name, as pytest's importlib mode makes them; neither is on sys.path."""
    results = []
    for number in (1, 2):
        path = tmp_path / str(number) / "test_twin.py"
        path.parent.mkdir()
        path.write_text(f"def number(offset):\n    return {number} + offset\n")
        spec = importlib.util.spec_from_file_location("test_twin", path)
        assert spec is not None
        assert spec.loader is not None
        module = importlib.util.module_from_spec(spec)
        sys.modules["test_twin"] = module
        try:
            spec.loader.exec_module(module)
            results += run_ranks(module.number, 1, 10)
        finally:
            del sys.modules["test_twin"]
    assert results == [11, 12]


def test_run_ranks_runs_beside_another_run() -> None:
    with ThreadPoolExecutor(3) as pool:
        runs = [
            pool.submit(run_ranks, add_rank, 2, Parcel(rank=-1, tensor=torch.tensor(float(i))))
            for i in range(3)
        ]
        totals = [[parcel.tensor.item() for parcel in run.result()] for run in runs]
    assert totals == [[1.0, 1.0], [3.0, 3.0], [5.0, 5.0]]


def leave_group() -> int:
    dist.destroy_process_group()
    return 7


def test_run_ranks_lets_the_function_destroy_the_group() -> None:
    assert run_ranks(leave_group, 2) == [7, 7]


def finish_early() -> float:
    """Rank 0 only sends; it must not close its sockets before rank 1 has received."""
    data = torch.ones(1024)
    if dist.get_rank() == 0:
        dist.send(data, 1)
        return 0.0
    time.sleep(0.3)
    dist.recv(data.zero_(), 0)
    return data.sum().item()


def test_run_ranks_keeps_early_ranks_reachable() -> None:
    assert run_ranks(finish_early, 2) == [0.0, 1024.0]


def note_pid(folder: Path) -> None:
    """Leave this rank's process id, and that of a grandchild that would live for a minute."""
    child = subprocess.Popen(["sleep", "60"])
    (folder / f"{dist.get_rank()}").write_text(f"{os.getpid()} {child.pid}")


def is_running(pid: int) -> bool:
    try:
        state = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except (FileNotFoundError, ProcessLookupError):
        return False
    return state != "Z"


def assert_nobody_left(folder: Path, num_ranks: int) -> None:
    files = sorted(folder.iterdir())
    assert len(files) == num_ranks
    pids = [int(pid) for file in files for pid in file.read_text().split()]
    deadline = time.monotonic() + 5
    while left := [pid for pid in pids if is_running(pid)]:
        assert time.monotonic() < deadline, f"still running: {left}"
        time.sleep(0.02)


def return_leaving_a_child(folder: Path) -> None:
    note_pid(folder)


def raise_in_one(folder: Path) -> None:
    note_pid(folder)
    dist.barrier()
    if dist.get_rank() == 1:
        raise ValueError("boom in one")
    dist.barrier()


def exit_in_one(folder: Path) -> None:
    note_pid(folder)
    dist.barrier()
    if dist.get_rank() == 1:
        os._exit(3)
    dist.barrier()


def sigkill_one(folder: Path) -> None:
    note_pid(folder)
    dist.barrier()
    if dist.get_rank() == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    dist.barrier()


def abort_in_one(folder: Path) -> None:
    note_pid(folder)
    dist.barrier()
    if dist.get_rank() == 1:
        os.abort()
    dist.barrier()


def hang_in_two(folder: Path) -> None:
    note_pid(folder)
    dist.barrier()
    if dist.get_rank() == 1:
        wait_for_nothing()
    if dist.get_rank() == 2:
        os.kill(os.getpid(), signal.SIGSTOP)


def wait_for_nothing() -> None:
    time.sleep(600)


def test_run_ranks_ends_what_a_returned_rank_has_started(tmp_path: Path) -> None:
    run_ranks(return_leaving_a_child, 2, tmp_path)
    assert_nobody_left(tmp_path, 2)


@pytest.mark.parametrize(
    ("function", "lead", "details"),
    [
        (raise_in_one, "rank 1 of 3 raised: ValueError: boom in one", 'raise ValueError("boom in'),
        (exit_in_one, "rank 1 of 3 died: ended with exit code 3 before its function", ""),
        (sigkill_one, "rank 1 of 3 died: killed by SIGKILL before its function returned", ""),
        (abort_in_one, "rank 1 of 3 died: killed by SIGABRT before", "in abort_in_one"),
    ],
    ids=["raise", "exit", "sigkill", "abort"],
)
def test_run_ranks_names_the_rank_that_failed(
    function: Callable[[Path], None], lead: str, details: str, tmp_path: Path
) -> None:
    start = time.monotonic()
    with pytest.raises(RankError) as caught:
        run_ranks(function, 3, tmp_path)
    assert str(caught.value).startswith(f"run_ranks: {lead}")
    assert details in str(caught.value)
    assert [outcome.rank for outcome in caught.value.outcomes] == [0, 1, 2]
    assert time.monotonic() - start < 15, "the survivors were waited for"
    assert_nobody_left(tmp_path, 3)


def test_run_ranks_names_the_ranks_that_hang(tmp_path: Path) -> None:
    with pytest.raises(RankError, match=r"still running after 4 s: rank 1, 2 of 3") as caught:
        run_ranks(hang_in_two, 3, tmp_path, timeout_s=4)
    kinds = [outcome.kind for outcome in caught.value.outcomes]
    assert kinds == ["returned", "hung", "hung"]
    assert "in wait_for_nothing" in str(caught.value), "the stack shows where it hangs"
    assert_nobody_left(tmp_path, 3)


def raise_everywhere() -> None:
    raise ValueError(f"boom in {dist.get_rank()}")


def test_run_ranks_shows_each_rank_that_raised() -> None:
    with pytest.raises(RankError) as caught:
        run_ranks(raise_everywhere, 2)
    for rank in (0, 1):
        assert f"--- rank {rank} raised: ValueError: boom in {rank}" in str(caught.value)
    assert "rank_process.py" not in str(caught.value), "the harness is not part of the traceback"


def return_a_lambda() -> Callable[[], None]:
    return lambda: None


def test_run_ranks_names_the_rank_whose_result_cannot_travel() -> None:
    with pytest.raises(RankError, match=r"rank 0 of 1 raised: .*pickle"):
        run_ranks(return_a_lambda, 1)


def test_run_ranks_refuses_what_cannot_travel() -> None:
    with pytest.raises(ConfigError, match=r"run_ranks: function must be a function at the top"):
        run_ranks(lambda: None, 1)
    with pytest.raises(ConfigError, match=r"args must be picklable.*lambda"):
        run_ranks(warn, 1, lambda: None)
    with pytest.raises(ConfigError, match="num_ranks must be at least 1, got 0"):
        run_ranks(warn, 0)


def survive() -> str:
    if dist.get_rank() == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    try:
        dist.barrier()
    except RuntimeError as error:
        return type(error).__name__
    return "no error"


def test_rank_outcomes_lets_survivors_tell() -> None:
    outcomes = rank_outcomes(survive, 3)
    assert [outcome.kind for outcome in outcomes] == ["returned", "died", "returned"]
    assert outcomes[1].error == "killed by SIGKILL before its function returned"
    for survivor in (outcomes[0], outcomes[2]):
        assert survivor.result.endswith("Error"), survivor


def raise_or_wait() -> str:
    if dist.get_rank() == 0:
        raise ValueError("boom")
    try:
        dist.barrier()
    except RuntimeError:
        return "saw it"
    return "no error"


def test_rank_outcomes_closes_the_sockets_of_a_rank_that_raised() -> None:
    raised, survivor = rank_outcomes(raise_or_wait, 2)
    assert (raised.kind, raised.error) == ("raised", "ValueError: boom")
    assert (survivor.kind, survivor.result) == ("returned", "saw it")


SCRIPT = """
import os, subprocess, sys, time
from pathlib import Path
import torch.distributed as dist
from piper_kernels.testing.ranks import run_ranks

def which():
    return dist.get_rank()

def note_and_hang(folder):
    child = subprocess.Popen(["sleep", "60"])
    part = Path(folder) / f"{dist.get_rank()}.part"
    part.write_text(f"{os.getpid()} {child.pid}")
    part.rename(part.with_suffix(""))
    time.sleep(600)

if __name__ == "__main__":
    print(run_ranks(which, 2), flush=True)
    run_ranks(note_and_hang, 2, sys.argv[1])
"""


def test_run_ranks_works_from_a_script_and_dies_with_it(tmp_path: Path) -> None:
    script, folder = tmp_path / "script.py", tmp_path / "pids"
    script.write_text(SCRIPT)
    folder.mkdir()
    command = [sys.executable, str(script), str(folder)]
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "TMPDIR": str(tmp_path)}
    with subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, text=True) as caller:
        try:
            assert caller.stdout is not None
            assert caller.stdout.readline() == "[0, 1]\n"
            deadline = time.monotonic() + 60
            while {path.name for path in folder.iterdir()} != {"0", "1"}:
                assert time.monotonic() < deadline, "the ranks did not start"
                time.sleep(0.05)
        finally:
            caller.kill()
    assert_nobody_left(folder, 2)
