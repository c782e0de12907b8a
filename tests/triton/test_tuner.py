"""Tuning with a timer that is a table: who wins, who is skipped and why."""

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from piper_kernels.triton.tiles import TileConfig
from piper_kernels.triton.tuner import is_same, tune


def make(block_n: int) -> TileConfig:
    return TileConfig(block_m=64, block_n=block_n, block_k=32)


DEFAULT, SECOND, THIRD = make(16), make(32), make(64)


class Machine:
    """Runs are free; each takes the next of the seconds given for its tiles."""

    def __init__(self, seconds: dict[TileConfig, list[float]]) -> None:
        self.seconds = {tiles: iter(times) for tiles, times in seconds.items()}
        self.last = DEFAULT
        self.timed: list[TileConfig] = []

    def run(self, tiles: TileConfig) -> tuple[Tensor, ...]:
        self.last = tiles
        return (torch.ones(4),)

    def time(self, call: Callable[[], object]) -> float:
        call()
        self.timed.append(self.last)
        return next(self.seconds[self.last])


def test_tune_takes_the_least_median_of_interleaved_rounds() -> None:
    machine = Machine({DEFAULT: [4.0, 4.0, 4.0], SECOND: [1.0, 9.0, 9.0], THIRD: [3.0, 9.0, 2.0]})
    outcome = tune((DEFAULT, SECOND, THIRD), machine.run, machine.time, num_rounds=3)
    assert (outcome.winner, outcome.winner_s, outcome.default_s) == (THIRD, 3.0, 4.0)
    assert outcome.speedup == 4 / 3
    assert outcome.num_measured == 3
    assert machine.timed == [DEFAULT, SECOND, THIRD] * 3


def test_tune_keeps_the_default_unless_clearly_beaten() -> None:
    machine = Machine({DEFAULT: [1.0], SECOND: [0.99]})
    outcome = tune((DEFAULT, SECOND), machine.run, machine.time, num_rounds=1)
    assert outcome.winner == DEFAULT
    assert outcome.speedup == 1.0


def test_tune_skips_what_fails_or_computes_something_else() -> None:
    def run(tiles: TileConfig) -> tuple[Tensor, ...]:
        if tiles == SECOND:
            raise RuntimeError("out of resource: shared memory\nmore")
        return (torch.full((4,), torch.nan if tiles == THIRD else 1.0),)

    outcome = tune((DEFAULT, SECOND, THIRD), run, lambda _: 4.0)
    assert (outcome.winner, outcome.num_measured) == (DEFAULT, 1)
    reasons = {skipped.tiles: skipped.reason for skipped in outcome.skipped}
    assert reasons == {
        SECOND: "RuntimeError: out of resource: shared memory",
        THIRD: "computes something else",
    }


def test_tune_lets_the_default_fail_loudly() -> None:
    def run(tiles: TileConfig) -> tuple[Tensor, ...]:
        raise RuntimeError("no driver")

    with pytest.raises(RuntimeError, match="no driver"):
        tune((DEFAULT, SECOND), run, lambda _: 1.0)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
def test_is_same_bounds_by_the_norm(dtype: torch.dtype) -> None:
    value = torch.randn(64, 64, generator=torch.Generator().manual_seed(0)).to(dtype)
    eps = torch.finfo(dtype).eps
    assert is_same([value], [value])
    assert is_same([(value.double() * (1 + eps)).to(dtype)], [value])
    # one column of 64 in the wrong place, and one wrong of many results
    wrong = value.clone()
    wrong[:, 0] = value[:, 1]
    assert not is_same([wrong], [value])
    assert not is_same([value, wrong], [value, value])
