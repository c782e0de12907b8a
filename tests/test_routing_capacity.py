"""Capacity and counts against loops. A66."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from piper_kernels.config import RouterConfig, RouterKind
from piper_kernels.errors import ConfigError, DtypeError
from piper_kernels.routing import Routing, apply_capacity, count_experts, route

KINDS: tuple[RouterKind, ...] = ("softmax_topk", "topk_softmax", "sigmoid_topk")


def loop_capacity(routing: Routing, capacity: int) -> list[list[int]]:
    """Expert ids after dropping, by the book."""
    ids, gates = routing.expert_ids.tolist(), routing.gates.tolist()
    for e in range(routing.num_experts):
        takers = [(t, k) for t, row in enumerate(ids) for k, i in enumerate(row) if i == e]
        for t, k in sorted(takers, key=lambda s: (-gates[s[0]][s[1]], s[0]))[capacity:]:
            ids[t][k] = routing.num_experts
    return ids


@pytest.mark.parametrize("kind", KINDS)
def test_apply_capacity_drops_the_later_of_equals(kind: RouterKind) -> None:
    """A66: five equal tokens on one expert with room for four; token 5 gets nothing."""
    logits = torch.tensor([[0.3, 0.0, 0.0, 0.0]]).repeat(5, 1).requires_grad_()
    routing = route(logits, 1, RouterConfig(kind=kind, is_normalized=False))
    kept, num_dropped = apply_capacity(routing, 3.2)
    assert kept.expert_ids.flatten().tolist() == [0, 0, 0, 0, 4]
    assert num_dropped == 1
    assert num_dropped.shape == ()
    assert torch.equal(kept.gates[:4], routing.gates[:4])
    assert kept.gates[4] == 0
    kept.gates.sum().backward()
    assert (logits.grad[4] == 0).all()
    assert torch.equal(kept.logits, routing.logits)


def test_apply_capacity_drops_the_lowest_gate_first() -> None:
    logits = torch.tensor([[1.0, 0.0], [3.0, 0.0], [2.0, 0.0], [0.0, 1.0]])
    routing = route(logits, 1, RouterConfig(is_normalized=False))
    kept, num_dropped = apply_capacity(routing, 1.0)
    assert kept.expert_ids.flatten().tolist() == [2, 0, 0, 1]
    assert num_dropped == 1


def test_apply_capacity_leaves_the_other_gate_alone() -> None:
    """A66: K = 2 with one of the two dropped is not normalised anew."""
    logits = torch.tensor([[2.0, 1.0, 0.0], [3.0, 1.0, 0.0], [2.5, 0.0, 1.0]])
    routing = route(logits, 2, RouterConfig())
    kept, num_dropped = apply_capacity(routing, 1.0)
    assert kept.expert_ids.tolist() == [[3, 1], [0, 1], [0, 2]]
    assert num_dropped == 1
    assert kept.gates[0, 0] == 0
    assert kept.gates[0, 1] == routing.gates[0, 1]


@pytest.mark.parametrize("num_tokens", [1, 5])
@pytest.mark.parametrize("factor", [2.0, 4.0, 8.0, 1e12, float("inf")])
def test_apply_capacity_with_room_for_all(num_tokens: int, factor: float) -> None:
    """A66: E / K = 2 and more equals no dropping, also beyond T."""
    routing = route(torch.ones(num_tokens, 4), 2, RouterConfig())
    kept, num_dropped = apply_capacity(routing, factor)
    assert num_dropped == 0
    assert torch.equal(kept.expert_ids, routing.expert_ids)
    assert torch.equal(kept.gates, routing.gates)


@pytest.mark.parametrize(
    ("factor", "num_tokens", "num_kept"),
    # 1.1 / 2 * 100 is 55.00000000000001 in floating point; a capacity is never 0
    [(1.1, 50, 55), (1.1, 10, 11), (0.7, 10, 7), (2 / 3, 3, 2), (0.75, 3, 3), (1e-9, 3, 1)],
)
def test_apply_capacity_rounds_up(factor: float, num_tokens: int, num_kept: int) -> None:
    routing = route(torch.ones(num_tokens * 2, 2), 1, RouterConfig())
    kept, num_dropped = apply_capacity(routing, factor)
    assert count_experts(kept.expert_ids, 2).tolist() == [num_kept, 0]
    assert num_dropped == num_tokens * 2 - num_kept


def test_apply_capacity_counts_real_tokens_only() -> None:
    """A37: padding neither fills an expert nor makes room."""
    logits = torch.randn(12, 4)
    mask = torch.rand(12) < 0.5
    mask[0] = True
    padded, num_dropped = apply_capacity(route(logits, 2, RouterConfig(), mask=mask), 0.5)
    compact, compact_dropped = apply_capacity(route(logits[mask], 2, RouterConfig()), 0.5)
    assert torch.equal(padded.expert_ids[mask], compact.expert_ids)
    assert (padded.expert_ids[~mask] == 4).all()
    assert num_dropped == compact_dropped
    assert num_dropped > 0


@given(
    st.integers(0, 30),
    st.integers(1, 6),
    st.sampled_from([0.3, 0.5, 1.0, 1.25, 2.0]),
    st.booleans(),
    st.integers(0, 2**31 - 1),
    st.data(),
)
def test_apply_capacity_equals_the_loop(
    num_tokens: int, num_experts: int, factor: float, has_ties: bool, seed: int, data: st.DataObject
) -> None:
    top_k = data.draw(st.integers(1, num_experts))
    generator = torch.Generator().manual_seed(seed)
    logits = torch.randn(num_tokens, num_experts, generator=generator)
    config = RouterConfig(kind=data.draw(st.sampled_from(KINDS)))
    routing = route(logits.round() if has_ties else logits, top_k, config)
    kept, num_dropped = apply_capacity(routing, factor)
    # num_tokens * top_k * factor is exact in units of 0.05
    capacity = -(-round(factor * 20) * num_tokens * top_k // (20 * num_experts))
    assert kept.expert_ids.tolist() == loop_capacity(routing, capacity)
    is_dropped = kept.expert_ids == num_experts
    assert num_dropped == is_dropped.sum()
    assert torch.equal(kept.gates, routing.gates.masked_fill(is_dropped, 0.0))


@pytest.mark.parametrize("factor", [0.0, -1.0, float("nan")])
def test_apply_capacity_refuses_a_bad_factor(factor: float) -> None:
    routing = route(torch.ones(2, 2), 1, RouterConfig())
    with pytest.raises(ConfigError, match="apply_capacity: capacity_factor must be above 0, got"):
        apply_capacity(routing, factor)


@given(st.integers(0, 50), st.integers(1, 9), st.integers(1, 4), st.integers(0, 2**31 - 1))
def test_count_experts_equals_bincount(
    num_tokens: int, num_experts: int, top_k: int, seed: int
) -> None:
    generator = torch.Generator().manual_seed(seed)
    expert_ids = torch.randint(num_experts + 3, (num_tokens, top_k), generator=generator)
    counts = count_experts(expert_ids, num_experts)
    valid = expert_ids[expert_ids < num_experts]
    assert counts.dtype == torch.int64
    assert torch.equal(counts, torch.bincount(valid, minlength=num_experts))
    assert torch.equal(count_experts(expert_ids.int(), num_experts), counts)


def test_count_experts_messages() -> None:
    with pytest.raises(ConfigError, match="count_experts: num_experts must be at least 1, got 0"):
        count_experts(torch.zeros(2, 2, dtype=torch.int64), 0)
    with pytest.raises(DtypeError, match="count_experts: expert_ids must be one of int64, int32"):
        count_experts(torch.zeros(2, 2), 2)
