"""Sizes and costs: sums, roofs, impossible values."""

import pytest
import torch

from piper_kernels import cost
from piper_kernels.cost import Cost, ExpertsSizes
from piper_kernels.errors import ConfigError


def sizes_of(num_tokens: int) -> ExpertsSizes:
    return ExpertsSizes(
        num_tokens=num_tokens, hidden_size=6, intermediate_size=5, num_experts=4, top_k=2
    )


def test_cost_adds_and_has_a_roof() -> None:
    total = Cost(10, 4) + Cost(2, 6)
    assert total == Cost(12, 10)
    assert total.roof_s(flops_per_s=12.0, bytes_per_s=5.0) == 2.0
    assert total.roof_s(flops_per_s=3.0, bytes_per_s=5.0) == 4.0


def test_experts_sizes_reads_hit_experts_only() -> None:
    assert sizes_of(0).hit_experts == 0
    assert cost.experts_forward_cost(sizes_of(0), keeps_preact=True) == Cost(0, 0)
    assert sizes_of(1).hit_experts == 2
    assert sizes_of(7).hit_experts == 4


def test_experts_sizes_refuses_impossible_values() -> None:
    with pytest.raises(ConfigError, match=r"ExpertsSizes: top_k must be >= 1, got 0\."):
        ExpertsSizes(num_tokens=1, hidden_size=1, intermediate_size=1, num_experts=1, top_k=0)
    with pytest.raises(ConfigError, match=r"num_hit_experts must be .* = 2, got 3\."):
        ExpertsSizes(
            num_tokens=1,
            hidden_size=1,
            intermediate_size=1,
            num_experts=4,
            top_k=2,
            num_hit_experts=3,
        )


def test_expected_hit_experts_is_the_mean_of_uniform_draws() -> None:
    assert cost.expected_hit_experts(num_experts=4, top_k=2, num_tokens=2) == 3.0
    ids = torch.rand(4000, 3, 8).topk(2, dim=-1).indices
    drawn = torch.zeros(4000, 8).scatter_(1, ids.view(4000, -1), 1.0).sum(1).mean().item()
    # standard error of the mean of 4000 draws is below 0.02
    assert abs(drawn - cost.expected_hit_experts(8, 2, 3)) < 0.1
