"""Plans carried out by plain messages: right rows, times for every round, and a gate that holds."""

import numpy as np
import pytest
import torch

from bench import exchange_plans
from bench.exchange_plans import PlanTask, time_plans
from piper_kernels.dist.topology_presets import frontier
from piper_kernels.testing import run_ranks

TOPOLOGY = frontier(1).lay_out((2, 3))
ROWS = np.random.default_rng(0).integers(0, 4, (5, 5))


def make_tasks() -> list[PlanTask]:
    return [
        PlanTask(name=algorithm, algorithm=algorithm, rows=ROWS, row_bytes=8)
        for algorithm in ("flat", "halo")
    ]


def test_time_plans_checks_and_times_every_task() -> None:
    results = run_ranks(time_plans, 5, TOPOLOGY, make_tasks(), 3)
    assert all(result == results[0] for result in results), "a round's time is the slowest rank's"
    assert [len(times) for times in results[0]] == [3, 3]
    assert min(min(times) for times in results[0]) > 0


def time_with_a_fault() -> None:
    """As :func:`time_plans`, but the first row of each message is lost."""
    right = exchange_plans._rows

    def wrong(buffer: torch.Tensor, transfer: exchange_plans.Transfer) -> torch.Tensor:
        rows = right(buffer, transfer).clone()
        rows[0] = 0
        return rows

    exchange_plans._rows = wrong
    time_plans(TOPOLOGY, make_tasks(), 1)


def test_time_plans_refuses_to_time_a_wrong_exchange() -> None:
    with pytest.raises(RuntimeError, match="flat differs from all_to_all_single"):
        run_ranks(time_with_a_fault, 5)
