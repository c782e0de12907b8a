"""run_tasks: every item once, one core each, errors through, nothing changed for the caller."""

import os
import signal
import threading
import time
from collections.abc import Iterator

import pytest
import torch

from piper_kernels.cpu import parallel
from piper_kernels.cpu.parallel import run_tasks


@pytest.fixture(params=[1, 2, 3], ids="{}_threads".format)
def num_threads(request: pytest.FixtureRequest) -> Iterator[int]:
    before = torch.get_num_threads()
    torch.set_num_threads(request.param)
    yield request.param
    torch.set_num_threads(before)


@pytest.mark.parametrize("num_items", [0, 1, 2, 50])
def test_run_tasks_does_every_item_once(num_threads: int, num_items: int) -> None:
    done: list[int] = []
    scratches: list[list[int]] = []

    def make_scratch() -> list[int]:
        scratches.append([])
        return scratches[-1]

    def work(item: int, scratch: list[int]) -> None:
        scratch.append(item)
        done.append(item)

    run_tasks(range(num_items), work, make_scratch)
    assert sorted(done) == list(range(num_items))
    assert sorted(item for scratch in scratches for item in scratch) == list(range(num_items))
    assert len(scratches) <= num_threads


def test_run_tasks_gives_each_item_one_core(num_threads: int) -> None:
    # also in later calls: a thread must not fall back to the process's number
    parallel._pool.cache_clear()
    seen = set()
    for _ in range(5):
        run_tasks(range(4), lambda item, _: seen.add(torch.get_num_threads()))
    assert seen == {1}
    assert torch.get_num_threads() == num_threads
    # and a thread that starts later begins with the process's number
    later: list[int] = []
    thread = threading.Thread(target=lambda: later.append(torch.get_num_threads()))
    thread.start()
    thread.join()
    assert later == [num_threads]


def test_run_tasks_passes_errors_on(num_threads: int) -> None:
    def work(item: int, _: None) -> None:
        if item == 3:
            raise ValueError("item 3")

    with pytest.raises(ValueError, match="item 3"):
        run_tasks(range(8), work)
    run_tasks(range(3), work)


def test_run_tasks_builds_no_graph(num_threads: int) -> None:
    weight = torch.ones(2, 2, requires_grad=True)
    out = torch.empty(4, 2, 2)
    with torch.no_grad():
        run_tasks(range(4), lambda item, _: torch.mul(weight, item, out=out[item]))
    assert out.sum() == 4 * (0 + 1 + 2 + 3)
    with torch.inference_mode():
        inference = torch.empty(4, 2, 2)
        run_tasks(range(4), lambda item, _: torch.mul(weight, item, out=inference[item]))
    assert torch.equal(inference, out)


def test_run_tasks_from_several_threads() -> None:
    before = torch.get_num_threads()
    done: list[tuple[int, int]] = []

    def caller(number: int) -> None:
        torch.set_num_threads(2)
        for _ in range(20):
            run_tasks(range(5), lambda item, _: done.append((number, item)))

    callers = [threading.Thread(target=caller, args=(number,)) for number in range(3)]
    for thread in callers:
        thread.start()
    for thread in callers:
        thread.join(timeout=60)
    torch.set_num_threads(before)
    assert sorted(done) == sorted((n, i) for n in range(3) for i in range(5) for _ in range(20))


@pytest.mark.filterwarnings("ignore:.*use of fork:DeprecationWarning")
def test_run_tasks_in_a_forked_child(num_threads: int) -> None:
    # the parent's threads do not exist in the child
    run_tasks(range(4), lambda item, _: None)
    child = os.fork()
    if child == 0:
        done: list[int] = []
        run_tasks(range(4), lambda item, _: done.append(item))
        os._exit(len(done))
    deadline = time.monotonic() + 60
    while time.monotonic() < deadline:
        pid, status = os.waitpid(child, os.WNOHANG)
        if pid:
            assert os.waitstatus_to_exitcode(status) == 4
            return
        time.sleep(0.01)
    os.kill(child, signal.SIGKILL)
    os.waitpid(child, 0)
    pytest.fail("the child hangs")
