"""Experts: parameters by config, adopted or new, and modules that can stand in for them."""

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from piper_kernels import MoEConfig, PiperMoE, WeightLayout
from piper_kernels.errors import ConfigError, ShapeError
from piper_kernels.modules.experts import Experts, expert_shapes
from piper_kernels.modules.router import Router
from piper_kernels.reference.experts import experts as reference_experts


def config(**options: Any) -> MoEConfig:
    return MoEConfig(hidden_size=8, intermediate_size=6, num_experts=4, top_k=2, **options)


@pytest.mark.parametrize(
    ("layout", "gate_up_shape", "down_shape", "gate_up_bias_shape"),
    [
        (WeightLayout(), (4, 12, 8), (4, 8, 6), (4, 12)),
        (WeightLayout(is_transposed=True), (4, 8, 12), (4, 6, 8), (4, 12)),
        (WeightLayout(is_gated=False), (4, 6, 8), (4, 8, 6), (4, 6)),
    ],
    ids=["halves", "transposed", "ungated"],
)
def test_expert_shapes_follow_the_layout(
    layout: WeightLayout,
    gate_up_shape: tuple[int, ...],
    down_shape: tuple[int, ...],
    gate_up_bias_shape: tuple[int, ...],
) -> None:
    assert expert_shapes(config(layout=layout, has_expert_bias=True)) == {
        "gate_up_proj": gate_up_shape,
        "down_proj": down_shape,
        "gate_up_proj_bias": gate_up_bias_shape,
        "down_proj_bias": (4, 8),
    }
    experts = Experts.build(config(layout=layout))
    assert {n: tuple(p.shape) for n, p in experts.named_parameters()} == {
        "gate_up_proj": gate_up_shape,
        "down_proj": down_shape,
    }


def test_experts_adopt_parameters() -> None:
    built = Experts.build(config(has_expert_bias=True))
    given = dict(built.named_parameters())
    adopted = Experts(config(has_expert_bias=True), **given)
    for name, parameter in adopted.named_parameters():
        assert parameter is given[name]


def test_experts_word_their_errors() -> None:
    good = dict(Experts.build(config()).named_parameters())
    with pytest.raises(
        ShapeError, match=r"Experts: down_proj must have shape \(4, 8, 6\), got \(4"
    ):
        Experts(config(), good["gate_up_proj"], nn.Parameter(torch.randn(4, 6, 8)))
    with pytest.raises(ConfigError, match="Experts: gate_up_proj_bias must be given for this con"):
        Experts(config(has_expert_bias=True), **good)


class DenseExperts(nn.Module):
    """Another implementation, called as Hugging Face's experts modules are."""

    def __init__(self, like: Experts) -> None:
        super().__init__()
        self.gate_up_proj, self.down_proj = like.gate_up_proj, like.down_proj

    def forward(self, hidden_states: Tensor, top_k_index: Tensor, top_k_weights: Tensor) -> Tensor:
        return reference_experts(
            hidden_states, top_k_index, top_k_weights, self.gate_up_proj, self.down_proj
        )


def test_moe_from_parts_keeps_the_parameter_objects() -> None:
    moe = PiperMoE.from_config(config(capacity_factor=1.0))
    twin = PiperMoE.from_parts(
        moe.config, Router(moe.config, moe.router.weight), DenseExperts(moe.experts)
    )
    own = dict(moe.named_parameters())
    for name, parameter in twin.named_parameters():
        assert parameter is own[name]
    x = torch.randn(2, 7, 8)
    mask = torch.rand(2, 7) < 0.7
    y, stats = twin(x, mask=mask, return_stats=True)
    assert (stats.routing.expert_ids == 4).any(), "sentinels are part of the test"
    torch.testing.assert_close(y, moe(x, mask=mask))
