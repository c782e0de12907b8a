"""The written-out activation and its derivative against the oracle's, edges included."""

import itertools

import pytest
import torch
from torch import Tensor

from piper_kernels.config import Activation, WeightLayout
from piper_kernels.cpu.activation import activation_backward, activation_forward
from piper_kernels.reference.activation import activation as reference_activation
from piper_kernels.testing import assert_close_to_baseline, guard_with_nan

DTYPES = [torch.float64, torch.float32, torch.bfloat16, torch.float16]
HALVES = WeightLayout()
INTERLEAVED = WeightLayout(is_transposed=True, is_interleaved=True)
UNGATED = WeightLayout(is_gated=False)
FUNCTIONS = ("silu", "gelu", "gelu_tanh", "relu", "relu2", "identity")
PLAIN = [Activation(function=name) for name in FUNCTIONS]
# limits that every dtype holds exactly, so that inputs can lie on the edge
GATED_ONLY = [
    Activation(alpha=1.702, limit=7.0, up_offset=1.0),
    Activation(function="gelu", limit=0.5),
    Activation(function="relu", up_offset=0.25),
    Activation(function="identity", limit=1.0, up_offset=-1.0),
]
CASES = [
    *itertools.product(PLAIN, [HALVES, INTERLEAVED, UNGATED]),
    *itertools.product([Activation(alpha=0.5)], [HALVES, UNGATED]),
    *itertools.product(GATED_ONLY, [HALVES, INTERLEAVED]),
]


def make_preact(num_rows: int, width: int, dtype: torch.dtype) -> Tensor:
    """Random values, and on the diagonal the points where a derivative jumps."""
    preact = torch.randn(num_rows, width) * 2
    edges = torch.tensor([0.0, 7.0, -7.0, 0.5, -0.5, 1.0, -1.0, 8.0, -8.0, 30.0, -30.0])
    for i, edge in enumerate(edges.tolist()):
        preact[i % num_rows, i % width] = edge
        preact[(i + 3) % num_rows, (i + width // 2) % width] = edge
    return guard_with_nan(preact.to(dtype))


def oracle(
    preact: Tensor, grad: Tensor, gates: Tensor, activation: Activation, layout: WeightLayout
) -> dict[str, Tensor]:
    """act, and the gradients of ``sum(grad * gate * act)``."""
    leaf, gates = preact.detach().requires_grad_(), gates.to(preact.dtype)
    act = reference_activation(leaf, activation, layout)
    (grad_preact,) = torch.autograd.grad(act, leaf, grad * gates[:, None])
    act = act.detach()
    return {
        "act": act,
        "grad_preact": grad_preact,
        "scaled_act": act * gates[:, None],
        "grad_gates": (grad * act).sum(1),
    }


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize(("activation", "layout"), CASES, ids=str)
def test_activation_matches_oracle(
    activation: Activation, layout: WeightLayout, dtype: torch.dtype
) -> None:
    num_rows, size = 24, 11
    wide = torch.promote_types(dtype, torch.float32)
    preact = make_preact(num_rows, layout.preact_size(size), dtype)
    grad, gates = torch.randn(num_rows, size).to(dtype), torch.rand(num_rows, dtype=wide)
    actual = {
        "act": torch.full((num_rows, size), torch.nan, dtype=dtype),
        "grad_preact": torch.full_like(preact, torch.nan),
        "scaled_act": torch.full((num_rows, size), torch.nan, dtype=dtype),
        "grad_gates": torch.full((num_rows,), torch.nan, dtype=wide),
    }
    activation_forward(actual["act"], preact, activation, layout)
    activation_backward(
        preact,
        grad,
        gates,
        activation,
        layout,
        **{name: value for name, value in actual.items() if name != "act"},
    )
    baseline = oracle(preact, grad, gates, activation, layout)
    truth = oracle(preact.double(), grad.double(), gates.double(), activation, layout)
    for name, value in actual.items():
        slack = 64.0 if dtype == torch.float64 else 4.0
        assert_close_to_baseline(name, value, baseline[name], truth[name], slack=slack)


@pytest.mark.parametrize("layout", [HALVES, INTERLEAVED, UNGATED], ids=str)
def test_activation_backward_fills_only_what_is_given(layout: WeightLayout) -> None:
    preact, grad = make_preact(6, layout.preact_size(4), torch.float32), torch.randn(6, 4)
    gates, activation = torch.rand(6), Activation()
    outputs = {
        "grad_preact": torch.empty_like(preact),
        "scaled_act": torch.empty(6, 4),
        "grad_gates": torch.empty(6),
    }
    nothing = dict.fromkeys(outputs)
    activation_backward(preact, grad, gates, activation, layout, **outputs)
    for name, expected in outputs.items():
        alone = torch.full_like(expected, torch.nan)
        # the scaled activation alone needs no gradient
        given = None if name == "scaled_act" else grad
        activation_backward(preact, given, gates, activation, layout, **nothing | {name: alone})
        assert torch.equal(alone, expected), name


def test_activation_backward_passes_the_gradient_on_the_edge_of_a_clamp() -> None:
    # by hand: identity(clamp(gate, max=1)) * clamp(up, -1, 1), gradients 1
    activation = Activation(function="identity", limit=1.0)
    preact = torch.tensor([[1.0, 1.0], [1.5, -1.0], [0.5, -2.0], [-3.0, 0.5]])
    grad_preact = torch.empty_like(preact)
    ones = torch.ones(4)
    activation_backward(
        preact,
        ones[:, None],
        ones,
        activation,
        HALVES,
        grad_preact=grad_preact,
        scaled_act=None,
        grad_gates=None,
    )
    assert grad_preact.tolist() == [[1.0, 1.0], [0.0, 1.0], [-1.0, 0.0], [0.5, -3.0]]


def test_activation_in_many_chunks() -> None:
    # more elements than one temporary holds
    preact = torch.randn(100, 2 * 1500)
    out = torch.empty(100, 1500)
    activation_forward(out, preact, Activation(), HALVES)
    gate, up = preact.chunk(2, dim=1)
    torch.testing.assert_close(out, torch.nn.functional.silu(gate) * up)


@pytest.mark.parametrize("name", FUNCTIONS)
def test_activation_of_nan_is_nan(name: str) -> None:
    preact = torch.full((1, 4), torch.nan)
    out, grad_preact = torch.zeros(1, 2), torch.zeros(1, 4)
    activation = Activation(function=name)
    activation_forward(out, preact, activation, HALVES)
    assert out.isnan().all()
    activation_backward(
        preact,
        torch.ones(1, 2),
        torch.ones(1),
        activation,
        HALVES,
        grad_preact=grad_preact,
        scaled_act=None,
        grad_gates=None,
    )
    assert grad_preact.isnan().all()
