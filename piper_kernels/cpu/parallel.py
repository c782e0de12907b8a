"""One task per thread: independent pieces of work, each on a single core.

Why not torch's own threads inside each GEMM: a GEMM's last bits may depend on how many threads
share it (measured: MKL 2024.2 in torch 2.13 on Zen 4, fp32 with 5 rows, or sizes like 97 x 131),
and small GEMMs do not scale. Pieces are cut by the shapes alone, write to memory of their own and
run on one core each, so no result depends on the number of threads.
"""

import os
from collections import deque
from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor, wait
from contextlib import AbstractContextManager
from functools import lru_cache
from typing import Any, TypeVar

import torch

Item = TypeVar("Item")
Scratch = TypeVar("Scratch")


@lru_cache
def _pool(num_threads: int, process_id: int) -> ThreadPoolExecutor:
    """Workers for this process (a forked child has none of its parent's threads)."""
    return ThreadPoolExecutor(num_threads, "piper", initializer=_use_one_thread)


def _use_one_thread() -> None:
    """Keep torch from threading inside the calling thread."""
    # a thread's first question sets its number to the process's; only after it does ours last
    torch.get_num_threads()
    torch.set_num_threads(1)


def _no_scratch() -> Any:
    return None


def run_tasks(
    items: Iterable[Item],
    work: Callable[[Item, Scratch], None],
    make_scratch: Callable[[], Scratch] = _no_scratch,
) -> None:
    """Call ``work(item, scratch)`` for every item, on ``torch.get_num_threads()`` threads.

    Args:
        items: the pieces; the longest first, so that the threads end together.
        work: must not touch what the work of another item touches.
        make_scratch: called once per thread, for buffers that its items use one after the other.
    """
    queue = deque(items)
    num_threads = torch.get_num_threads()
    if num_threads == 1:
        _drain(queue, work, make_scratch)
        return
    pool = _pool(num_threads, os.getpid())
    # what torch keeps per thread: workers need no graph, and write to inference tensors if any
    make_mode = torch.inference_mode if torch.is_inference_mode_enabled() else torch.no_grad
    num_workers = min(num_threads, len(queue))
    futures = [
        pool.submit(_drain_in, make_mode, queue, work, make_scratch) for _ in range(num_workers)
    ]
    wait(futures)
    for future in futures:
        future.result()
    # a worker's first set_num_threads(1) is also what threads started later would begin with
    torch.set_num_threads(num_threads)


def _drain(
    queue: deque[Item], work: Callable[[Item, Scratch], None], make_scratch: Callable[[], Scratch]
) -> None:
    scratch = make_scratch()
    while True:
        try:
            item = queue.popleft()
        except IndexError:
            return
        work(item, scratch)


def _drain_in(
    make_mode: Callable[[], AbstractContextManager[object]],
    queue: deque[Item],
    work: Callable[[Item, Scratch], None],
    make_scratch: Callable[[], Scratch],
) -> None:
    with make_mode():
        _drain(queue, work, make_scratch)
