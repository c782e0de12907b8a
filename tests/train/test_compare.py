from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from transformers.integrations.moe import ALL_EXPERTS_FUNCTIONS

from piper_kernels.errors import BackendError
from piper_kernels.train.compare import compare_experts
from piper_kernels.train.loop import Trainer

Make = Callable[..., Trainer]


@pytest.fixture
def register() -> Iterator[Callable[[str, Callable[..., Any]], None]]:
    """Registers experts functions with transformers for the length of a test."""
    names: list[str] = []

    def add(name: str, function: Callable[..., Any]) -> None:
        ALL_EXPERTS_FUNCTIONS.register(name, function)
        names.append(name)

    yield add
    for name in names:
        del type(ALL_EXPERTS_FUNCTIONS)._global_mapping[name]


def test_compare_experts_times_whole_steps_and_leaves_the_model_alone(make_trainer: Make) -> None:
    trainer = make_trainer(compare_rounds=3)
    trainer.train_step()
    before = [parameter.detach().clone() for parameter in trainer.model.parameters()]
    windows = trainer.sampler.windows(0, 4)
    names = ("eager", "grouped_mm", "batched_mm")
    timings = compare_experts(trainer.model, windows, trainer.settings, names)
    assert tuple(timing.experts for timing in timings) == names
    for timing in timings:
        assert len(timing.step_s) == len(timing.speedups) == 3
        assert timing.tokens == 64
        assert timing.median_s == sorted(timing.step_s)[1] > 0
    eager, grouped, _ = timings
    assert (eager.difference, eager.speedups) == (0.0, (1.0, 1.0, 1.0))
    assert 0 < grouped.difference < 1e-5
    assert grouped.speedups == pytest.approx(
        [base / own for base, own in zip(eager.step_s, grouped.step_s, strict=True)]
    )
    for parameter, old in zip(trainer.model.parameters(), before, strict=True):
        assert torch.equal(parameter, old)
        assert parameter.grad is None
    assert trainer.model.config._experts_implementation == "piper"
    # nothing was counted as training
    assert trainer.counter.take() == [[0] * 4] * 2


def test_compare_experts_interleaves_the_implementations(
    make_trainer: Make, register: Callable[..., None]
) -> None:
    trainer = make_trainer(compare_rounds=2)
    grouped = ALL_EXPERTS_FUNCTIONS["grouped_mm"]
    calls: list[str] = []

    def watched(name: str) -> Callable[..., Any]:
        def experts(*args: Any) -> Any:
            if not calls or calls[-1] != name:
                calls.append(name)
            return grouped(*args)

        return experts

    names = ("one", "two", "three")
    for name in names:
        register(name, watched(name))
    compare_experts(trainer.model, trainer.sampler.windows(0, 4), trainer.settings, names)
    # the check of both layers, a round to warm up, two timed ones, each with another one first
    assert calls == [*names, *names, *names, "two", "three", "one", "three", "one", "two"]


@pytest.mark.parametrize("fault", ["forward", "backward", "nan"])
def test_compare_experts_refuses_to_time_wrong_results(
    make_trainer: Make, register: Callable[..., None], fault: str
) -> None:
    trainer = make_trainer(compare_rounds=1)
    grouped = ALL_EXPERTS_FUNCTIONS["grouped_mm"]

    def wrong(*args: Any) -> torch.Tensor:
        result = grouped(*args)
        if fault == "backward":
            # right values, wrong gradient
            return result.detach() + 0.9 * (result - result.detach())
        return result * (1.1 if fault == "forward" else torch.nan)

    register("wrong", wrong)
    what, value = {
        "forward": ("output", "0.1"),
        "backward": ("gradient of hidden_states", "0.1"),
        "nan": ("output", "nan"),
    }[fault]
    message = (
        rf"compare: wrong's {what} in layer 0 must agree with eager's to 0.0001, "
        rf"got a relative difference of {value}\. Wrong results are not timed"
    )
    with pytest.raises(BackendError, match=message):
        compare_experts(
            trainer.model, trainer.sampler.windows(0, 4), trainer.settings, ("eager", "wrong")
        )


def test_compare_experts_allows_for_bf16(make_trainer: Make) -> None:
    trainer = make_trainer(compare_rounds=1, precision="bf16")
    names = ("eager", "grouped_mm")
    _, grouped = compare_experts(
        trainer.model, trainer.sampler.windows(0, 4), trainer.settings, names
    )
    assert 1e-5 < grouped.difference < 5e-2
