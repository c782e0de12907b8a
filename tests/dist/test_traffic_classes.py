"""Traffic classes: right sums, urgent first, a chunk at most in between, errors that say where."""

import os
import signal
import threading
import time
from typing import Any

import pytest
import torch
import torch.distributed as dist

from piper_kernels.dist.traffic_classes import TrafficClass, TrafficClasses, TransferError
from piper_kernels.errors import ConfigError, DtypeError
from piper_kernels.testing import rank_outcomes, run_ranks

SHAPES = [(3, 5), (0,), (1,), (40, 7), (), (2, 2)]


def gradients(rank: int, dtype: torch.dtype) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(rank)
    # small whole numbers, so that sums are exact in any order
    return [torch.randint(-8, 9, shape, generator=generator).to(dtype) for shape in SHAPES]


def reduce_in_chunks(chunk_bytes: int, dtype: torch.dtype) -> bool:
    classes = TrafficClasses(chunk_bytes)
    mine = gradients(dist.get_rank(), dtype)
    first = classes.reduce_later(mine[:2])
    second = classes.reduce_later(mine[2:], op=dist.ReduceOp.MAX)
    first.wait()
    second.wait()
    classes.close()
    everyone = [gradients(rank, dtype) for rank in range(dist.get_world_size())]
    want = [torch.stack(parts).sum(0).to(dtype) for parts in zip(*everyone, strict=True)][:2]
    want += [torch.stack(parts).amax(0) for parts in list(zip(*everyone, strict=True))[2:]]
    is_done = first.num_done == first.num_chunks and second.num_done == second.num_chunks
    return is_done and all(torch.equal(a, b) for a, b in zip(mine, want, strict=True))


@pytest.mark.parametrize(
    ("chunk_bytes", "dtype"), [(1, torch.float64), (64, torch.bfloat16), (1 << 20, torch.float32)]
)
def test_reduce_later_equals_all_reduce(chunk_bytes: int, dtype: torch.dtype) -> None:
    assert run_ranks(reduce_in_chunks, 3, chunk_bytes, dtype) == [True] * 3


def hold_back() -> dict[str, Any]:
    classes = TrafficClasses(chunk_bytes=8)
    grad = torch.ones(64)
    with classes.transfer(TrafficClass.CRITICAL):
        handle = classes.reduce_later([grad])
        time.sleep(0.2)
        during = handle.num_done
    dist.barrier(classes_group())
    while handle.num_done < handle.num_chunks:
        time.sleep(0.01)
    handle.wait()
    classes.close()
    return {"during": during, "after": handle.num_done, "sum": float(grad.sum())}


def classes_group() -> dist.ProcessGroup:
    """A second group over all ranks: chunks run on the default one."""
    group = dist.new_group()
    assert isinstance(group, dist.ProcessGroup)
    return group


def test_nothing_deferrable_starts_during_an_exchange() -> None:
    found = run_ranks(hold_back, 2)
    assert found == [{"during": 0, "after": 32, "sum": 128.0}] * 2


def wait_while_held() -> float:
    classes = TrafficClasses(chunk_bytes=8)
    grad = torch.ones(8)
    with classes.transfer(TrafficClass.CRITICAL):
        # what is waited for is urgent: this must not deadlock
        classes.reduce_later([grad]).wait()
    classes.close()
    return float(grad.sum())


def test_what_is_waited_for_is_not_held_back() -> None:
    assert run_ranks(wait_while_held, 2, timeout_s=20.0) == [16.0, 16.0]


def test_pipeline_sends_wait_for_the_exchange_but_not_the_reverse() -> None:
    classes = TrafficClasses()
    order = []
    is_entered = threading.Event()

    def send() -> None:
        is_entered.set()
        with classes.transfer(TrafficClass.PIPELINE):
            order.append("send")

    with classes.transfer(TrafficClass.CRITICAL):
        thread = threading.Thread(target=send)
        thread.start()
        is_entered.wait()
        time.sleep(0.05)
        order.append("exchange")
    thread.join(timeout=5)
    with classes.transfer(TrafficClass.PIPELINE), classes.transfer(TrafficClass.CRITICAL):
        order.append("exchange beside a send")
    assert order == ["exchange", "send", "exchange beside a send"]
    classes.close()


def lose_a_peer() -> str:
    classes = TrafficClasses(chunk_bytes=4)
    handles = [classes.reduce_later([torch.ones(4)], name=name) for name in ("warm-up", "dense")]
    handles[0].wait()
    if dist.get_rank() == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    handles += [classes.reduce_later([torch.ones(1 << 12)], name="experts")]
    try:
        for handle in handles:
            handle.wait()
    except TransferError as error:
        message = str(error)
    else:
        message = "no error"
    with pytest.raises(TransferError):
        classes.reduce_later([torch.ones(1)], name="late").wait()
    classes.close()
    return message


def test_a_dead_peer_is_an_error_that_says_where() -> None:
    survivor, victim = rank_outcomes(lose_a_peer, 2, timeout_s=20.0)
    assert victim.kind == "died"
    assert survivor.kind == "returned", survivor.details
    assert survivor.result.startswith("rank 0: reduction of ")
    assert "chunk" in survivor.result


def test_traffic_classes_refuse() -> None:
    classes = TrafficClasses()
    message = r"tensors\[1\] must be contiguous, got strides \(1, 3\). Call contiguous"
    with pytest.raises(ConfigError, match=message):
        classes.reduce_later([torch.ones(2), torch.ones(2, 3).t()])
    with pytest.raises(DtypeError, match=r"tensors\[1\] must be one of float32, got float64"):
        classes.reduce_later([torch.ones(2), torch.ones(2, dtype=torch.float64)])
    with pytest.raises(ConfigError, match="chunk_bytes must be at least 1, got 0"):
        TrafficClasses(0)
    classes.close()


def test_nothing_to_reduce_is_done_at_once() -> None:
    classes = TrafficClasses()
    classes.reduce_later([]).wait()
    classes.reduce_later([torch.ones(0)]).wait()
    classes.close()
    classes.close()
