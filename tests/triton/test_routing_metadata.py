"""The device-built permutation equals ``Permutation.from_expert_ids`` bit for bit."""

import pytest
import torch

from piper_kernels.errors import DtypeError, ShapeError
from piper_kernels.permutation import Permutation
from piper_kernels.testing import ROUTING_KINDS, RoutingKind, make_routing
from piper_kernels.triton import routing_metadata
from piper_kernels.triton.routing_metadata import permutation_from_expert_ids

FIELDS = ("expert_counts", "expert_offsets", "row_to_slot", "slot_to_row", "row_to_token")


def assert_same(actual: Permutation, expected: Permutation) -> None:
    assert (actual.num_experts, actual.top_k) == (expected.num_experts, expected.top_k)
    for field in FIELDS:
        have, want = getattr(actual, field), getattr(expected, field)
        assert have.dtype == want.dtype, field
        assert torch.equal(have, want), field


def check(expert_ids: torch.Tensor, num_experts: int) -> None:
    expected = Permutation.from_expert_ids(expert_ids, num_experts)
    assert_same(permutation_from_expert_ids(expert_ids, num_experts), expected)


@pytest.mark.parametrize("kind", ROUTING_KINDS)
@pytest.mark.parametrize("num_tokens", [33, 700], ids=["one_program", "blocks"])
def test_permutation_equals_oracle(kind: RoutingKind, num_tokens: int) -> None:
    check(make_routing(kind, num_tokens, 7, 3)[0], 7)


# T = 0 and tiny T with any E, powers of two or not (A03)
@pytest.mark.parametrize("num_experts", [1, 2, 3, 60, 160, 257, 512])
@pytest.mark.parametrize("num_tokens", [0, 1, 2])
def test_permutation_of_few_tokens(num_tokens: int, num_experts: int) -> None:
    top_k = min(8, num_experts)
    check(make_routing("uniform", num_tokens, num_experts, top_k)[0], num_experts)


# every T around powers of two, K = E included (A04)
@pytest.mark.parametrize("top_k", [2, 8])
def test_permutation_sweep_of_token_counts(top_k: int) -> None:
    for num_tokens in [*range(1, 10), 15, 17, 31, 33, 63, 65, 100, 127, 128, 129]:
        check(make_routing("uniform", num_tokens, 8, top_k)[0], 8)


@pytest.mark.parametrize("num_tokens", [5, 600])
def test_permutation_all_sentinels(num_tokens: int) -> None:
    check(torch.full((num_tokens, 2), 4), 4)


def test_permutation_of_strided_and_int32_ids() -> None:
    wide = make_routing("skewed", 50, 9, 6)[0]
    check(wide[:, ::2], 9)
    check(wide.to(torch.int32), 9)


def test_permutation_of_duplicate_ids() -> None:
    check(torch.tensor([[1, 1, 0], [1, 1, 1]]), 2)


def test_permutation_of_many_blocks_needs_a_second_scan_step(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(routing_metadata, "SLOTS_PER_BLOCK", 16)
    monkeypatch.setattr(routing_metadata, "BLOCKS_PER_SCAN", 16)
    check(make_routing("skewed", 600, 5, 2)[0], 5)


def test_permutation_counts_the_forced_routing() -> None:
    ids = torch.full((1024, 1), 15)
    permutation = permutation_from_expert_ids(ids, 16)
    assert permutation.expert_counts.tolist() == [0] * 15 + [1024]
    permutation.check(ids)


def test_permutation_example() -> None:
    permutation = permutation_from_expert_ids(torch.tensor([[2, 0], [0, 1], [2, 3]]), 3)
    assert permutation.row_to_slot.tolist() == [1, 2, 3, 0, 4, 5]
    assert permutation.expert_offsets.tolist() == [0, 2, 3, 5]


def test_permutation_refuses_wrong_ids() -> None:
    with pytest.raises(ShapeError, match=r"expert_ids must have shape \(T, K\)"):
        permutation_from_expert_ids(torch.zeros(4, dtype=torch.int64), 4)
    with pytest.raises(DtypeError, match="expert_ids must be one of int64, int32, got float32"):
        permutation_from_expert_ids(torch.zeros(4, 2), 4)


@pytest.mark.parametrize("num_tokens", [33, 700], ids=["one_program", "blocks"])
def test_permutation_negative_ids_are_sentinels(num_tokens: int) -> None:
    ids, _ = make_routing("uniform", num_tokens, 6, 3)
    ids[::4, 1] = -5
    check(ids, 6)
    actual = permutation_from_expert_ids(ids, 6)
    assert int(actual.expert_offsets[-1]) == int((ids >= 0).sum())
