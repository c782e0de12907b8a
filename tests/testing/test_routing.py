"""Every kind of routing is what it says."""

import pytest
import torch

from piper_kernels.errors import ConfigError
from piper_kernels.testing import ROUTING_KINDS, RoutingKind, make_routing


@pytest.mark.parametrize("kind", ROUTING_KINDS)
@pytest.mark.parametrize(("num_tokens", "num_experts", "top_k"), [(0, 4, 2), (1, 4, 4), (50, 7, 3)])
def test_make_routing_gives_different_experts_and_gates(
    kind: RoutingKind, num_tokens: int, num_experts: int, top_k: int
) -> None:
    ids, gates = make_routing(kind, num_tokens, num_experts, top_k)
    assert ids.shape == gates.shape == (num_tokens, top_k)
    assert ids.dtype == torch.int64
    is_valid = ids < num_experts
    assert bool((ids >= 0).all())
    for row, valid in zip(ids, is_valid, strict=True):
        assert len(row[valid].unique()) == int(valid.sum())
    assert bool((gates[is_valid] > 0).all())
    assert bool((gates[~is_valid] == 0).all())
    if kind != "with_sentinels":
        torch.testing.assert_close(gates.sum(-1), torch.ones(num_tokens))


def counts(kind: RoutingKind) -> torch.Tensor:
    ids, _ = make_routing(kind, 400, 8, 2)
    return torch.bincount(ids.flatten(), minlength=9)


def test_make_routing_uniform_is_balanced() -> None:
    # 100 rows an expert, standard deviation below 9
    assert int((counts("uniform")[:8] - 100).abs().max()) < 45


def test_make_routing_skewed_prefers_the_first() -> None:
    skewed = counts("skewed")[:8]
    assert int(skewed[0]) > 2 * int(skewed[7])
    assert int(skewed[0]) == int(skewed.max())


def test_make_routing_one_expert_empty_leaves_the_middle_one() -> None:
    empty = counts("one_expert_empty")[:8]
    assert empty[4] == 0
    assert int((empty == 0).sum()) == 1


def test_make_routing_all_to_one_sends_everybody_to_the_last() -> None:
    ids, _ = make_routing("all_to_one", 400, 8, 2)
    assert bool((ids[:, 0] == 7).all())


def test_make_routing_with_sentinels_marks_a_quarter() -> None:
    # 800 slots, 200 expected, standard deviation 12
    assert abs(int(counts("with_sentinels")[8]) - 200) < 60


def test_make_routing_depends_on_seed_and_dtype_alone() -> None:
    first, again = make_routing("skewed", 9, 5, 2), make_routing("skewed", 9, 5, 2)
    assert torch.equal(first[0], again[0])
    assert torch.equal(first[1], again[1])
    assert not torch.equal(make_routing("skewed", 9, 5, 2, seed=1)[0], first[0])
    assert make_routing("skewed", 9, 5, 2, dtype=torch.bfloat16)[1].dtype == torch.bfloat16


def test_make_routing_refuses_an_unknown_kind() -> None:
    with pytest.raises(ConfigError, match=r"make_routing: kind must be one of .*, got odd\."):
        make_routing("odd", 1, 2, 1)  # type: ignore[arg-type]
