"""SharedExperts against an MLP of linear layers, in every form."""

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from piper_kernels import MoEConfig, SharedExpertsConfig, WeightLayout
from piper_kernels.config import GPT_OSS_SWIGLU, RELU2, SWIGLU, Activation
from piper_kernels.errors import ConfigError
from piper_kernels.modules.shared_experts import SharedExperts
from piper_kernels.reference.activation import apply_function


def config(activation: Activation, *, is_gated: bool = True, by_token: bool = False) -> MoEConfig:
    return MoEConfig(
        hidden_size=8,
        intermediate_size=6,
        num_experts=4,
        top_k=2,
        activation=activation,
        # how the routed experts are stored has no bearing on the shared one
        layout=WeightLayout(is_gated=is_gated, is_transposed=True, is_interleaved=is_gated),
        shared_experts=SharedExpertsConfig(intermediate_size=5, is_gated_by_token=by_token),
    )


@pytest.mark.parametrize("by_token", [True, False])
def test_shared_experts_is_a_swiglu_mlp(by_token: bool) -> None:
    shared = SharedExperts.build(config(SWIGLU, by_token=by_token), dtype=torch.float64)
    x = torch.randn(7, 8, dtype=torch.float64)
    expected = shared.down_proj(F.silu(shared.gate_proj(x)) * shared.up_proj(x))
    if by_token:
        expected = torch.sigmoid(shared.gate(x)) * expected
    torch.testing.assert_close(shared(x), expected)


def test_shared_experts_without_a_gate() -> None:
    shared = SharedExperts.build(config(RELU2, is_gated=False))
    x = torch.randn(7, 8)
    assert dict(shared.named_parameters()).keys() == {"up_proj.weight", "down_proj.weight"}
    torch.testing.assert_close(shared(x), shared.down_proj(F.relu(shared.up_proj(x)).square()))


def test_shared_experts_clamp_like_the_routed_ones() -> None:
    shared = SharedExperts.build(config(GPT_OSS_SWIGLU))
    x = 100.0 * torch.randn(7, 8)
    gate = shared.gate_proj(x).clamp(max=7.0)
    up = shared.up_proj(x).clamp(min=-7.0, max=7.0)
    expected = shared.down_proj((up + 1.0) * apply_function(gate, GPT_OSS_SWIGLU))
    torch.testing.assert_close(shared(x), expected)


def test_shared_experts_take_other_dtypes() -> None:
    shared = SharedExperts.build(config(SWIGLU, by_token=True), dtype=torch.bfloat16)
    x = torch.randn(7, 8)
    y = shared(x)
    assert y.dtype == torch.float32
    assert torch.equal(y, shared(x.bfloat16()).float())
    with torch.autocast("cpu", torch.bfloat16):
        assert shared.float()(x).dtype == torch.bfloat16


def test_shared_experts_adopt_modules() -> None:
    up, down, gate_proj = nn.Linear(8, 5), nn.Linear(5, 8), nn.Linear(8, 5)
    shared = SharedExperts(SWIGLU, up_proj=up, down_proj=down, gate_proj=gate_proj)
    assert shared.up_proj is up
    x = torch.randn(3, 8)
    torch.testing.assert_close(shared(x), down(F.silu(gate_proj(x)) * up(x)))


def test_shared_experts_build_needs_a_config() -> None:
    plain = MoEConfig(hidden_size=8, intermediate_size=6, num_experts=4, top_k=2)
    with pytest.raises(ConfigError, match=r"config.shared_experts must be given, got None"):
        SharedExperts.build(plain)
