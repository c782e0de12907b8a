from dataclasses import replace

import pytest
import torch

from piper_kernels.testing.model_steps import ModelStep, assert_steps_close, run_step, token_ids
from piper_kernels.testing.tiny_models import tiny_model


def step() -> ModelStep:
    grads = {"a": torch.tensor([1.0, 2.0]), "b": None, "c": torch.tensor([1e-9])}
    return ModelStep(output=torch.tensor([4.0]), grads=grads)


def test_token_ids_are_reproducible_and_never_special() -> None:
    assert torch.equal(token_ids(), token_ids())
    assert token_ids(3, 9).shape == (3, 9)
    assert token_ids(20, 20).min() >= 3
    assert not torch.equal(token_ids(seed=1), token_ids(seed=2))


def test_run_step_gives_every_gradient_and_clears_them() -> None:
    model = tiny_model("mixtral", num_hidden_layers=1)
    found = run_step(model, "piper")
    assert found.output.shape == (2, 7, 64)
    assert set(found.grads) == {name for name, _ in model.named_parameters()}
    assert all(grad is not None for grad in found.grads.values())
    assert all(parameter.grad is None for parameter in model.parameters())
    assert model.get_experts_implementation() == {"": "piper"}


def test_assert_steps_close_accepts_equal_ones_and_rounding_of_nothing() -> None:
    assert_steps_close(step(), step(), 0.0)
    # the gradient of c is nothing beside that of a
    near = replace(step(), grads=step().grads | {"c": torch.tensor([-1e-9])})
    assert_steps_close(near, step(), 1e-5)


def test_assert_steps_close_names_what_differs() -> None:
    with pytest.raises(AssertionError, match=r"output: relative error 0\.25"):
        assert_steps_close(replace(step(), output=torch.tensor([5.0])), step(), 1e-3)
    wrong = replace(step(), grads=step().grads | {"a": torch.tensor([1.0, 2.1])})
    with pytest.raises(AssertionError, match=r"a: relative error 0\.05"):
        assert_steps_close(wrong, step(), 1e-3)
    missing = replace(step(), grads=step().grads | {"a": None})
    with pytest.raises(AssertionError, match="a: a gradient is missing on one side"):
        assert_steps_close(missing, step(), 1e-3)
    nan = replace(step(), output=torch.tensor([torch.nan]))
    with pytest.raises(AssertionError, match="output"):
        assert_steps_close(nan, step(), 1e-3)


def test_assert_steps_close_counts_the_baselines_own_error() -> None:
    def off_by(share: float) -> ModelStep:
        return replace(step(), output=step().output * (1 + share))

    with pytest.raises(AssertionError, match="output: relative error"):
        assert_steps_close(off_by(-2e-3), off_by(2e-3), 1e-3)
    assert_steps_close(off_by(-2e-3), off_by(2e-3), 1e-3, truth=step())
    with pytest.raises(AssertionError, match="output: relative error"):
        assert_steps_close(off_by(-4e-3), off_by(2e-3), 1e-3, truth=step())
    missing = replace(step(), grads=dict.fromkeys(step().grads))
    with pytest.raises(AssertionError, match="the truth has no gradient"):
        assert_steps_close(step(), step(), 1e-3, truth=missing)
