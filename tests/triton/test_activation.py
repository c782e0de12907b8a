"""The activation kernel and its device functions equal the oracle."""

from dataclasses import replace
from typing import get_args

import pytest
import torch

from piper_kernels.config import GPT_OSS_SWIGLU, Activation, ActivationFunction, WeightLayout
from piper_kernels.permutation import Permutation
from piper_kernels.reference.activation import activation as reference
from piper_kernels.testing import assert_close_to_baseline, guard_with_nan
from piper_kernels.triton.activation import activation_forward

LAYOUTS = [WeightLayout(), WeightLayout(is_interleaved=True), WeightLayout(is_gated=False)]
ACTIVATIONS = [
    *(Activation(function=function) for function in get_args(ActivationFunction)),
    replace(GPT_OSS_SWIGLU, limit=1.0),
]


@pytest.mark.parametrize("layout", LAYOUTS, ids=["halves", "interleaved", "ungated"])
@pytest.mark.parametrize("activation", ACTIVATIONS, ids=lambda a: f"{a.function}-{a.limit}")
def test_activation_forward(activation: Activation, layout: WeightLayout) -> None:
    if activation.limit is not None and not layout.is_gated:
        pytest.skip("a clamp needs a gate")
    permutation = Permutation.from_expert_ids(torch.tensor([[0, 1]] * 9 + [[2, 2]]), 2)
    gates = torch.rand(10, 2)
    preact = torch.randn(20, layout.preact_size(21)) * 3
    act = activation_forward(guard_with_nan(preact), permutation, activation, layout, gates=gates)
    per_row = gates.flatten()[permutation.row_to_slot.long(), None]
    truth = reference(preact.double(), activation, layout) * per_row.double()
    baseline = reference(preact, activation, layout) * per_row
    assert_close_to_baseline("act", act[:18], baseline[:18], truth[:18])
    assert act[18:].isnan().all(), "sentinel rows are not written"


# exp(-z) may be inf, and 1 / (1 + inf) is the right 0; only numpy, the interpreter's engine, warns
@pytest.mark.filterwarnings("ignore:overflow encountered:RuntimeWarning")
def test_activation_keeps_nan_and_large_values() -> None:
    permutation = Permutation.from_expert_ids(torch.zeros(1, 1, dtype=torch.int64), 1)
    for activation in ACTIVATIONS[:-1]:
        preact = torch.tensor([[torch.nan, 1e4, -1e4]])
        layout = WeightLayout(is_gated=False)
        act = activation_forward(preact, permutation, activation, layout)
        assert torch.equal(act.isnan(), torch.tensor([[True, False, False]])), activation
        assert torch.allclose(act[:, 1:], reference(preact, activation, layout)[:, 1:])


def test_activation_example() -> None:
    permutation = Permutation.from_expert_ids(torch.tensor([[0]]), 1)
    act = activation_forward(
        torch.tensor([[1.0, 2.0]]),
        permutation,
        Activation(function="relu"),
        WeightLayout(),
        gates=torch.tensor([[0.5]]),
    )
    assert act.tolist() == [[1.0]]
