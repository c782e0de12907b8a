from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from transformers.activations import ACT2CLS, ACT2FN

from piper_kernels.config import SWIGLU, Activation, WeightLayout
from piper_kernels.huggingface import layouts
from piper_kernels.huggingface.layouts import (
    is_experts_module,
    own_activation,
    read_activation,
    read_layout,
)
from piper_kernels.reference.activation import activation as reference_activation
from piper_kernels.testing.tiny_models import experts_classes, tiny_experts

CLASSES = [(family, name) for family, names in experts_classes().items() for name in names]

# What lies between their projections is not one of ours, so their own code runs.
COMPOSED = {"bailing_hybrid", "beam", "inkling2", "inkling2_loop", "step3p7"}

# One family for each layout of the facts sheet.
LAYOUTS = {
    "mixtral": WeightLayout(),
    "gpt_oss": WeightLayout(is_transposed=True, is_interleaved=True),
    "openai_privacy_filter": WeightLayout(is_transposed=True),
    "aria": WeightLayout(is_transposed=True),
    "nemotron_h": WeightLayout(is_gated=False),
    "muse_spark": WeightLayout(),
}


@pytest.mark.parametrize("family", LAYOUTS)
def test_read_layout_of_each_kind(family: str) -> None:
    module = tiny_experts(family, experts_classes()[family][0])
    assert is_experts_module(module)
    layout = read_layout(module)
    assert layout == LAYOUTS[family]
    first = module.gate_up_proj if module.has_gate else module.up_proj
    rows, columns = (1, 2) if layout.is_transposed else (2, 1)
    hidden_size, intermediate_size = first.shape[rows], module.down_proj.shape[rows]
    shapes = layout.weight_shapes(8, hidden_size, intermediate_size)
    assert (tuple(first.shape), tuple(module.down_proj.shape)) == shapes
    assert first.shape[columns] == layout.preact_size(intermediate_size)


def test_read_layout_ignores_the_shapes() -> None:
    # H = 2I: a guess by sizes could not tell the two dims apart (field report A52)
    module = tiny_experts("gpt_oss", "GptOssExperts")
    module.gate_up_proj = nn.Parameter(torch.zeros(8, 32, 32))
    assert read_layout(module) == WeightLayout(is_transposed=True, is_interleaved=True)
    module.is_transposed, module.is_concatenated = False, True
    assert read_layout(module) == WeightLayout()


def test_is_experts_module_is_false_for_other_modules() -> None:
    assert not is_experts_module(nn.Linear(2, 2))


@pytest.mark.parametrize(("family", "name"), CLASSES, ids=lambda part: part)
def test_read_activation_computes_what_the_module_does(family: str, name: str) -> None:
    module = tiny_experts(family, name)
    activation = read_activation(module)
    if not isinstance(activation, Activation):
        assert family in COMPOSED, "a new gate: is it a known one?"
        return
    # far beyond every clamp, and through 0
    generator = torch.Generator().manual_seed(3)
    preact = torch.randn(64, 10, generator=generator, dtype=torch.float64) * 8
    preact[0] = 0.0
    ours = reference_activation(preact, activation, read_layout(module))
    torch.testing.assert_close(ours, own_activation(module)(preact), rtol=1e-12, atol=1e-12)


def test_read_activation_knows_each_gate_of_its_table() -> None:
    # a renamed class would silently take the slow path
    met = set()
    for family, name in CLASSES:
        gate = tiny_experts(family, name)._apply_gate
        met.add((gate.__module__, gate.__qualname__))
    assert set(layouts._BY_GATE) | layouts._CLAMPED_AFTER <= met


@pytest.mark.parametrize(
    ("family", "name"),
    [("bailing_hybrid", "BailingHybridExperts"), ("step3p7", "Step3p7Experts")],
)
def test_read_activation_of_a_gate_that_clamps_what_the_activation_gives(
    family: str, name: str
) -> None:
    module = tiny_experts(family, name)
    assert not isinstance(read_activation(module), Activation)
    module.limit = None
    assert read_activation(module) == SWIGLU


@pytest.mark.parametrize("hidden_act", sorted(set(ACT2CLS) - {"xielu"}))
def test_read_activation_of_every_activation_name(hidden_act: str) -> None:
    module = tiny_experts("mixtral", "MixtralExperts")
    module.act_fn = ACT2FN[hidden_act]
    activation = read_activation(module)
    preact = torch.randn(32, 10, dtype=torch.float64) * 3
    if isinstance(activation, Activation):
        ours = reference_activation(preact, activation, WeightLayout())
        # quick_gelu and gelu_new spell their constants in fp32 digits
        torch.testing.assert_close(ours, own_activation(module)(preact), rtol=1e-9, atol=1e-9)
    else:
        assert activation == own_activation(module)


@pytest.mark.parametrize("family", LAYOUTS)
def test_read_activation_is_the_same_under_compile(family: str) -> None:
    # otherwise a compiled model would silently take the slow path
    module = tiny_experts(family, experts_classes()[family][0])

    def call(x: torch.Tensor) -> torch.Tensor:
        return x + (1.0 if isinstance(read_activation(module), Activation) else 0.0)

    compiled = torch.compile(call, backend="eager", fullgraph=True)
    assert compiled(torch.zeros(())).item() == 1.0


def test_read_activation_of_plain_functions() -> None:
    module = tiny_experts("lfm2_moe", "Lfm2MoeExperts")
    assert module.act_fn is F.silu
    assert read_activation(module) == SWIGLU


def test_read_activation_leaves_an_overridden_gate_alone() -> None:
    module = tiny_experts("gpt_oss", "GptOssExperts")
    assert read_activation(module) == Activation(alpha=1.702, limit=7.0, up_offset=1.0)

    class Mine(type(module)):  # type: ignore[misc]
        def _apply_gate(self, gate_up: torch.Tensor) -> torch.Tensor:
            return gate_up[..., ::2]

    mine: Any = Mine.__new__(Mine)
    mine.__dict__.update(module.__dict__)
    activation = read_activation(mine)
    assert callable(activation)
    assert not isinstance(activation, Activation)
    preact = torch.randn(3, 8)
    assert torch.equal(activation(preact), preact[..., ::2])
