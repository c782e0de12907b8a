"""Permutation: the docstring's numbers, every promise, every planted fault. A04, A05."""

import dataclasses
from collections.abc import Callable

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode

from piper_kernels.errors import ConfigError, DtypeError, RoutingError, ShapeError
from piper_kernels.permutation import (
    MAX_ROWS,
    Permutation,
    mark_sentinels,
    refuse_negative_ids,
)
from piper_kernels.testing import ROUTING_KINDS, RoutingKind, make_routing

EXAMPLE_IDS = torch.tensor([[2, 0], [0, 1], [2, 3]])
FIELDS = ("expert_counts", "expert_offsets", "row_to_slot", "slot_to_row", "row_to_token")


def as_dict(permutation: Permutation) -> dict[str, list[int]]:
    return {name: getattr(permutation, name).tolist() for name in FIELDS}


def loop_permutation(expert_ids: list[list[int]], num_experts: int, top_k: int) -> dict[str, list]:
    """The same by Python's own stable sort."""
    slot_ids = [min(e, num_experts) for row in expert_ids for e in row]
    row_to_slot = sorted(range(len(slot_ids)), key=lambda slot: slot_ids[slot])
    counts = [slot_ids.count(e) for e in range(num_experts)]
    return {
        "expert_counts": counts,
        "expert_offsets": [sum(counts[:e]) for e in range(num_experts + 1)],
        "row_to_slot": row_to_slot,
        "slot_to_row": [row_to_slot.index(slot) for slot in range(len(slot_ids))],
        "row_to_token": [slot // top_k for slot in row_to_slot],
    }


def test_permutation_example_of_the_docstring() -> None:
    permutation = Permutation.from_expert_ids(EXAMPLE_IDS, 3)
    assert as_dict(permutation) == {
        "expert_counts": [2, 1, 2],
        "expert_offsets": [0, 2, 3, 5],
        "row_to_slot": [1, 2, 3, 0, 4, 5],
        "slot_to_row": [3, 0, 1, 2, 4, 5],
        "row_to_token": [0, 1, 1, 0, 2, 2],
    }
    assert (permutation.num_rows, permutation.num_tokens) == (6, 3)
    permutation.check(EXAMPLE_IDS)


@given(
    st.integers(0, 24),
    st.integers(1, 9),
    st.integers(0, 4),
    st.sampled_from([torch.int64, torch.int32]),
    st.integers(0, 2**31 - 1),
    st.data(),
)
def test_from_expert_ids_equals_the_loop(
    num_tokens: int,
    num_experts: int,
    num_foreign: int,
    dtype: torch.dtype,
    seed: int,
    data: st.DataObject,
) -> None:
    """Sentinels are E and whatever is above it; an expert may even occur twice in a token."""
    top_k = data.draw(st.integers(1, num_experts))
    generator = torch.Generator().manual_seed(seed)
    shape = (num_tokens, top_k)
    expert_ids = torch.randint(num_experts + num_foreign, shape, generator=generator).to(dtype)
    before = expert_ids.clone()
    permutation = Permutation.from_expert_ids(expert_ids, num_experts)
    assert torch.equal(expert_ids, before)
    assert as_dict(permutation) == loop_permutation(expert_ids.tolist(), num_experts, top_k)
    permutation.check(expert_ids)
    for name in FIELDS:
        assert getattr(permutation, name).dtype == torch.int32
        assert getattr(permutation, name).is_contiguous()
    assert (permutation.num_tokens, permutation.top_k) == shape


@pytest.mark.parametrize("kind", ROUTING_KINDS)
@pytest.mark.parametrize("top_k", [2, 8])
def test_from_expert_ids_is_a_bijection_for_every_t(kind: RoutingKind, top_k: int) -> None:
    """A04: T = 1 to 130, K = 2 and K = E."""
    for num_tokens in range(131):
        expert_ids, _ = make_routing(kind, num_tokens, 8, top_k, seed=num_tokens)
        permutation = Permutation.from_expert_ids(expert_ids, 8)
        permutation.check(expert_ids)
        slots = permutation.row_to_slot.sort().values
        assert torch.equal(slots, torch.arange(num_tokens * top_k, dtype=torch.int32))


def test_from_expert_ids_all_to_one() -> None:
    """A05: everything on the last expert of 16, then on the last two."""
    one = torch.full((1024, 1), 15)
    permutation = Permutation.from_expert_ids(one, 16)
    permutation.check(one)
    assert permutation.expert_counts.tolist() == [0] * 15 + [1024]
    assert torch.equal(permutation.row_to_slot, torch.arange(1024, dtype=torch.int32))
    two = torch.tensor([[14, 15]]).expand(1024, 2)
    assert Permutation.from_expert_ids(two, 16).expert_counts.tolist() == [0] * 14 + [1024, 1024]


def test_from_expert_ids_takes_any_strides() -> None:
    ids = torch.randint(5, (6, 8))
    for view in (ids.t(), ids[:, ::2], ids[:1].expand(7, 8)):
        got = Permutation.from_expert_ids(view, 5)
        assert as_dict(got) == as_dict(Permutation.from_expert_ids(view.contiguous(), 5))


def test_from_expert_ids_nothing_valid() -> None:
    """T = 0, and a rank that owns no expert of its tokens."""
    for ids in (torch.zeros(0, 2, dtype=torch.int64), torch.full((3, 2), 4)):
        permutation = Permutation.from_expert_ids(ids, 4)
        permutation.check(ids)
        assert permutation.expert_offsets.tolist() == [0] * 5
        assert permutation.row_to_slot.tolist() == list(range(ids.numel()))


def swapped(name: str, i: int, j: int) -> Callable[[Permutation], Permutation]:
    """A fault: two entries of one map change places."""

    def plant(permutation: Permutation) -> Permutation:
        values = getattr(permutation, name).clone()
        values[[i, j]] = values[[j, i]]
        return dataclasses.replace(permutation, **{name: values})

    return plant


def added(name: str, i: int, amount: int) -> Callable[[Permutation], Permutation]:
    """A fault: one entry is off."""

    def plant(permutation: Permutation) -> Permutation:
        values = getattr(permutation, name).clone()
        values[i] += amount
        return dataclasses.replace(permutation, **{name: values})

    return plant


def reordered(i: int, j: int) -> Callable[[Permutation], Permutation]:
    """A fault that is consistent in itself: rows i and j exchanged in all three maps."""

    def plant(permutation: Permutation) -> Permutation:
        rows = torch.arange(permutation.num_rows)
        rows[[i, j]] = rows[[j, i]]
        row_to_slot = permutation.row_to_slot[rows]
        slot_to_row = torch.empty_like(row_to_slot)
        slot_to_row[row_to_slot.long()] = torch.arange(permutation.num_rows, dtype=torch.int32)
        return dataclasses.replace(
            permutation,
            row_to_slot=row_to_slot,
            slot_to_row=slot_to_row,
            row_to_token=row_to_slot // permutation.top_k,
        )

    return plant


@pytest.mark.parametrize(
    ("plant", "promise"),
    [
        (swapped("slot_to_row", 0, 3), "slot_to_row must be the inverse of row_to_slot"),
        (swapped("row_to_slot", 0, 3), "slot_to_row must be the inverse of row_to_slot"),
        (reordered(1, 2), "rows must be sorted by expert"),
        (reordered(4, 5), "rows must be sorted by expert"),
        (reordered(0, 1), "rows of one expert must keep slot order"),
        (added("expert_counts", 2, 1), "expert_counts must count the ids"),
        (added("expert_offsets", 0, 1), "expert_offsets must be the exclusive cumulative counts"),
        (added("expert_offsets", 3, 1), "expert_offsets must be the exclusive cumulative counts"),
        (added("row_to_token", 5, -1), "row_to_token must be row_to_slot // top_k"),
    ],
)
def test_check_catches_a_planted_fault(
    plant: Callable[[Permutation], Permutation], promise: str
) -> None:
    permutation = plant(Permutation.from_expert_ids(EXAMPLE_IDS, 3))
    with pytest.raises(RoutingError, match=f"Permutation.check: {promise}"):
        permutation.check(EXAMPLE_IDS)


def test_check_reports_a_negative_id() -> None:
    ids = torch.tensor([[0, -2], [1, 0]])
    permutation = Permutation.from_expert_ids(ids, 3)
    with pytest.raises(
        RoutingError,
        match=r"Permutation\.check: expert_ids must be >= 0, got -2\. Mark slots .* with 3\.",
    ):
        permutation.check(ids)


@pytest.mark.parametrize("sentinel", [3, 2**31, 2**62])
def test_check_takes_any_sentinel(sentinel: int) -> None:
    """Any id >= E marks a slot that nobody computes, also a dtype's largest number."""
    ids = torch.tensor([[0, sentinel], [sentinel, 2]])
    permutation = Permutation.from_expert_ids(ids, 3)
    permutation.check(ids)
    assert permutation.expert_counts.tolist() == [1, 0, 1]


def shapes(permutation: Permutation) -> list[tuple[int, ...]]:
    return [tuple(getattr(permutation, name).shape) for name in FIELDS]


def test_from_expert_ids_shapes_depend_on_sizes_alone() -> None:
    """So it traces, and never waits for a device: on fake tensors a value cannot be had."""
    wanted = [(8,), (9,), (36,), (36,), (36,)]
    for kind in ROUTING_KINDS:
        assert shapes(Permutation.from_expert_ids(make_routing(kind, 12, 8, 3)[0], 8)) == wanted
    meta_ids = torch.empty(12, 3, dtype=torch.int64, device="meta")
    assert shapes(Permutation.from_expert_ids(meta_ids, 8)) == wanted
    with FakeTensorMode():
        fake_ids = torch.empty(12, 3, dtype=torch.int64)
        with pytest.raises(RuntimeError):
            bool(fake_ids.sum() > 0)
        assert shapes(Permutation.from_expert_ids(fake_ids, 8)) == wanted


def test_from_expert_ids_compiles_into_one_graph() -> None:
    def build(expert_ids: Tensor) -> Permutation:
        return Permutation.from_expert_ids(expert_ids, 8)

    traced = torch.compile(build, fullgraph=True, dynamic=True, backend="aot_eager")
    for num_tokens in (5, 9):
        expert_ids, _ = make_routing("with_sentinels", num_tokens, 8, 3)
        permutation = traced(expert_ids)
        permutation.check(expert_ids)
        assert as_dict(permutation) == as_dict(build(expert_ids))


def test_from_expert_ids_row_maps_are_int32() -> None:
    """2^31 - 1 rows are the most; one more is refused before anything is allocated."""
    most = torch.empty(MAX_ROWS, 1, dtype=torch.int64, device="meta")
    assert Permutation.from_expert_ids(most, 8).num_rows == 2**31 - 1
    too_many = torch.empty(2**28, 8, dtype=torch.int64, device="meta")
    with pytest.raises(
        ShapeError,
        match=r"T \* K must be below 2\^31 .* with shape \(268435456, 8\), got 2147483648\. "
        r"Use a smaller microbatch",
    ):
        Permutation.from_expert_ids(too_many, 8)


@pytest.mark.parametrize(
    ("expert_ids", "num_experts", "error", "match"),
    [
        (torch.zeros(4).long(), 2, ShapeError, r"expert_ids must have shape \(T, K\).*got \(4\)"),
        (torch.zeros(4, 0).long(), 2, ShapeError, "top_k must be at least 1, got 0"),
        (torch.zeros(4, 2), 2, DtypeError, "expert_ids must be one of int64, int32, got float32"),
        (torch.zeros(4, 2).bool(), 2, DtypeError, "expert_ids .*, got bool"),
        (torch.zeros(4, 2).long(), 0, ConfigError, "num_experts must be at least 1, got 0"),
    ],
)
def test_from_expert_ids_messages(
    expert_ids: Tensor, num_experts: int, error: type[Exception], match: str
) -> None:
    with pytest.raises(error, match=f"Permutation.from_expert_ids: {match}"):
        Permutation.from_expert_ids(expert_ids, num_experts)


@pytest.mark.parametrize("dtype", [torch.int64, torch.int32], ids=str)
def test_mark_sentinels_from_expert_ids(dtype: torch.dtype) -> None:
    """Every id that is no expert's goes to the tail, whatever its sign."""
    least, most = torch.iinfo(dtype).min, torch.iinfo(dtype).max
    ids = torch.tensor([[0, -1], [most, 2], [least, 1]], dtype=dtype)
    marked = torch.tensor([[0, 3], [3, 2], [3, 1]], dtype=dtype)
    assert torch.equal(mark_sentinels(ids, 3), marked)
    actual = Permutation.from_expert_ids(ids, 3)
    actual.check(marked)
    assert actual.expert_offsets.tolist() == [0, 1, 2, 3]
    assert actual.row_to_slot.tolist() == [0, 5, 3, 1, 2, 4]


def test_refuse_negative_ids() -> None:
    refuse_negative_ids("f", torch.tensor([[0, 7]]), 3)
    message = r"f: expert_ids must be >= 0, got 2 negative ids\. Mark slots .* with E = 3\."
    with pytest.raises(RoutingError, match=message):
        refuse_negative_ids("f", torch.tensor([[0, -7], [-1, 2]]), 3)
