"""build_permutation is Permutation.from_expert_ids, as an op."""

import dataclasses

import pytest
import torch

from piper_kernels.errors import ShapeError
from piper_kernels.functional.routing_metadata import build_permutation, maps_of, permutation_of
from piper_kernels.permutation import Permutation
from piper_kernels.testing import ROUTING_KINDS, make_routing


@pytest.mark.parametrize("kind", ROUTING_KINDS)
@pytest.mark.parametrize("num_tokens", [0, 1, 23])
def test_build_permutation(kind: str, num_tokens: int) -> None:
    ids, _ = make_routing(kind, num_tokens, 6, 3)
    actual, expected = build_permutation(ids, 6, "cpu"), Permutation.from_expert_ids(ids, 6)
    for field in dataclasses.fields(Permutation):
        a, b = getattr(actual, field.name), getattr(expected, field.name)
        assert torch.equal(a, b) and a.dtype == b.dtype if torch.is_tensor(a) else a == b
    actual.check(ids)


def test_build_permutation_under_vmap_and_compile() -> None:
    ids = torch.stack([make_routing("uniform", 7, 6, 3, seed=seed)[0] for seed in range(4)])
    batched = torch.vmap(lambda ids: maps_of(build_permutation(ids, 6, "cpu")))(ids)
    for i, sample in enumerate(ids):
        for a, b in zip(batched, maps_of(Permutation.from_expert_ids(sample, 6)), strict=True):
            assert torch.equal(a[i], b)
    compiled = torch.compile(
        lambda ids: maps_of(build_permutation(ids, 6, "cpu")), fullgraph=True, backend="aot_eager"
    )
    for a, b in zip(compiled(ids[0]), batched, strict=True):
        assert torch.equal(a, b[0])


def test_permutation_of_inverts_maps_of() -> None:
    permutation = Permutation.from_expert_ids(make_routing("uniform", 7, 6, 3)[0], 6)
    again = permutation_of(maps_of(permutation), 6, 3)
    for field in dataclasses.fields(Permutation):
        assert getattr(again, field.name) is getattr(permutation, field.name)


def test_build_permutation_wrong_ids() -> None:
    with pytest.raises(ShapeError, match=r"expert_ids must have shape \(T, K\)"):
        build_permutation(torch.zeros(3).long(), 6, "cpu")
