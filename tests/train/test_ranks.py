"""What fails on one rank fails on all, and every rank says where."""

import pytest
import torch
import torch.distributed as dist

from piper_kernels.errors import DataError, TrainingError
from piper_kernels.testing import rank_outcomes
from piper_kernels.train.ranks import joined_ranks, local_device, num_ranks_started, together


def open_on_all_but_one() -> int:
    def read() -> int:
        if dist.get_rank() == 1:
            raise DataError("no such file")
        return dist.get_rank()

    with joined_ranks(torch.device("cpu"), 30.0):
        assert together("count", lambda: dist.get_rank() + 1) == dist.get_rank() + 1
        return together("read the text", read)


def test_together() -> None:
    outcomes = rank_outcomes(open_on_all_but_one, 3)
    messages = [outcome.error for outcome in outcomes]
    assert DataError.__name__ in messages[1]
    for rank in (0, 2):
        assert TrainingError.__name__ in messages[rank]
        assert f"rank {rank}: rank 1 cannot read the text: no such file" in messages[rank]


def test_a_process_alone_is_a_rank(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("WORLD_SIZE", raising=False)
    assert num_ranks_started() == 1
    with joined_ranks(torch.device("cpu"), 30.0):
        assert dist.get_world_size() == 1
    assert not dist.is_initialized()


def test_local_device_numbers_gpus_by_local_rank(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LOCAL_RANK", "3")
    assert local_device("cuda") == "cuda:3"
    assert local_device("cuda:1") == "cuda:1"
    assert local_device("cpu") == "cpu"
