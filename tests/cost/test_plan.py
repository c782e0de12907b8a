"""The plan's formulas against hand counts and against the oracle's own tensors."""

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.utils.flop_counter import FlopCounterMode

from piper_kernels import cost
from piper_kernels.config import WeightLayout
from piper_kernels.cost import Cost, ExpertsSizes
from piper_kernels.permutation import Permutation
from piper_kernels.reference.experts import experts
from piper_kernels.reference.permute import permute
from piper_kernels.reference.unpermute import unpermute

QWEN3_30B = ExpertsSizes(
    num_tokens=32768, hidden_size=2048, intermediate_size=768, num_experts=128, top_k=8
)
GATED, UNGATED = WeightLayout(), WeightLayout(is_gated=False)


def sizes_of(num_tokens: int, layout: WeightLayout = GATED) -> ExpertsSizes:
    return ExpertsSizes(
        num_tokens=num_tokens,
        hidden_size=6,
        intermediate_size=5,
        num_experts=4,
        top_k=2,
        element_bytes=4,
        layout=layout,
    )


def problem(sizes: ExpertsSizes) -> tuple[torch.Tensor, ...]:
    """Every expert hit where there are rows enough: ids go round."""
    ids = torch.arange(sizes.num_rows).view(-1, sizes.top_k) % sizes.num_experts
    gates = torch.rand(ids.shape)
    gate_up, down = sizes.layout.weight_shapes(
        sizes.num_experts, sizes.hidden_size, sizes.intermediate_size
    )
    x = torch.randn(sizes.num_tokens, sizes.hidden_size)
    return x, ids, gates, torch.randn(gate_up), torch.randn(down)


def num_bytes(*tensors: torch.Tensor) -> int:
    return sum(tensor.numel() * tensor.element_size() for tensor in tensors)


def test_permute_cost_counts_the_tensors_moved() -> None:
    x, ids, _, _, _ = problem(sizes_of(7))
    permutation = Permutation.from_expert_ids(ids, 4)
    rows = permute(x, permutation)
    assert cost.permute_cost(sizes_of(7)) == Cost(0, num_bytes(x, rows, permutation.row_to_token))


def test_unpermute_cost_counts_the_tensors_moved() -> None:
    x, ids, gates, _, _ = problem(sizes_of(7))
    permutation = Permutation.from_expert_ids(ids, 4)
    rows = permute(x, permutation)
    y = unpermute(rows, gates, permutation)
    moved = num_bytes(rows, y, gates, permutation.slot_to_row)
    assert cost.unpermute_cost(sizes_of(7)) == Cost(2 * rows.numel(), moved)


def test_route_cost_counts_by_hand() -> None:
    # T=7, H=6, E=4, K=2, fp32: x 168, weight 96, logits 112, ids 112, gates 56 bytes
    assert cost.route_cost(sizes_of(7)) == Cost(2 * 7 * 6 * 4, 168 + 96 + 112 + 112 + 56)


def test_grouped_gemm_cost_counts_by_hand() -> None:
    # 4*8 + 4*2 elements of rows, 3 * 16 of weights, in bf16
    assert cost.grouped_gemm_cost(4, 8, 2, 3) == Cost(128, (32 + 8 + 48) * 2)
    # empty experts' gradients are written too
    assert cost.grouped_gemm_wgrad_cost(4, 8, 2, 5) == Cost(128, (32 + 8 + 80) * 2)


@pytest.mark.parametrize("layout", [GATED, UNGATED], ids=["gated", "ungated"])
def test_experts_cost_has_the_matmul_flops_of_the_oracle(layout: WeightLayout) -> None:
    sizes = sizes_of(7, layout)
    x, ids, gates, gate_up, down = problem(sizes)
    for tensor in (x, gate_up, down):
        tensor.requires_grad_()
    with FlopCounterMode(display=False) as forward:
        y = experts(x, ids, gates, gate_up, down, layout=layout)
    with FlopCounterMode(display=False) as backward:
        y.sum().backward()
    combine = cost.unpermute_cost(sizes).flops
    assert cost.experts_forward_cost(sizes, keeps_preact=True).flops - combine == (
        forward.get_total_flops()
    )
    sum_over_k = sizes.num_rows * sizes.hidden_size
    assert cost.experts_backward_cost(sizes).flops - sum_over_k == backward.get_total_flops()


def test_experts_forward_launches_count_the_tensors_of_each_launch() -> None:
    sizes = sizes_of(7)
    x, ids, gates, gate_up, down = problem(sizes)
    permutation = Permutation.from_expert_ids(ids, 4)
    preact, act = torch.empty(14, 10), torch.empty(14, 5)
    rows, y = torch.empty(14, 6), torch.empty(7, 6)
    launches = cost.experts_forward_launches(sizes, keeps_preact=True)
    moved = {name: launch.bytes for name, launch in launches.items()}
    assert moved == {
        "gate_up": num_bytes(x, gate_up, preact, act, permutation.row_to_token),
        "down": num_bytes(act, down, rows),
        "combine": num_bytes(rows, y, gates, permutation.slot_to_row),
    }
    inference = cost.experts_forward_cost(sizes, keeps_preact=False)
    assert sum(moved.values()) - inference.bytes == num_bytes(preact)


def test_experts_backward_launches_count_the_tensors_of_each_launch() -> None:
    sizes = sizes_of(7)
    x, ids, gates, gate_up, down = problem(sizes)
    permutation = Permutation.from_expert_ids(ids, 4)
    grad_y = torch.empty_like(x)
    preact, act, rows = torch.empty(14, 10), torch.empty(14, 5), torch.empty(14, 6)
    row_map, slot_map = permutation.row_to_token, permutation.slot_to_row
    launches = cost.experts_backward_launches(sizes)
    assert {name: launch.bytes for name, launch in launches.items()} == {
        "grad_preact": num_bytes(grad_y, down, preact, preact, act, gates, gates, row_map),
        "grad_down": num_bytes(grad_y, act, down, row_map),
        "grad_gate_up": num_bytes(x, preact, gate_up, row_map),
        "grad_rows": num_bytes(preact, gate_up, rows),
        "grad_x": num_bytes(rows, x, slot_map),
    }


def test_experts_backward_skips_what_nobody_needs() -> None:
    names = set(cost.experts_backward_launches(QWEN3_30B))
    frozen = cost.experts_backward_launches(QWEN3_30B, needs_weights=False)
    assert names - set(frozen) == {"grad_down", "grad_gate_up"}
    first_layer = cost.experts_backward_launches(QWEN3_30B, needs_x=False)
    assert names - set(first_layer) == {"grad_rows", "grad_x"}
    recomputed = cost.experts_backward_launches(QWEN3_30B, has_preact=False)
    assert set(recomputed) - names == {"gate_up"}
    full, gate_up = (
        cost.experts_backward_cost(QWEN3_30B),
        cost.experts_forward_launches(QWEN3_30B, keeps_preact=False)["gate_up"],
    )
    assert cost.experts_backward_cost(QWEN3_30B, has_preact=False).flops == (
        full.flops + gate_up.flops
    )


def test_experts_cost_agrees_with_the_plan_at_qwen3_30b() -> None:
    # the plan for this layer in bf16 is about 5.2 GB forward and 9.1 GB backward
    forward = cost.experts_forward_cost(QWEN3_30B, keeps_preact=True)
    assert math.isclose(forward.bytes, 5.2e9, rel_tol=0.02)
    assert math.isclose(cost.experts_backward_cost(QWEN3_30B).bytes, 9.1e9, rel_tol=0.02)


@given(num_tokens=st.integers(0, 40), top_k=st.integers(1, 4), num_experts=st.integers(4, 9))
def test_experts_cost_rises_with_tokens_and_width(
    num_tokens: int, top_k: int, num_experts: int
) -> None:
    def forward(tokens: int, hidden: int) -> Cost:
        sizes = ExpertsSizes(
            num_tokens=tokens,
            hidden_size=hidden,
            intermediate_size=3,
            num_experts=num_experts,
            top_k=top_k,
        )
        return cost.experts_forward_cost(sizes, keeps_preact=True)

    here, longer, wider = forward(num_tokens, 8), forward(num_tokens + 1, 8), forward(num_tokens, 9)
    assert here.flops < longer.flops
    assert here.bytes < longer.bytes
    assert (here.flops < wider.flops) == (num_tokens > 0)
