"""Permutation as an op: one node under torch.compile, batched by a loop under vmap."""

from collections.abc import Sequence

import torch
from torch import Tensor

from piper_kernels.functional.backend import load
from piper_kernels.functional.transforms import register_loop_over_batch
from piper_kernels.permutation import Permutation, refuse_negative_ids

Maps = tuple[Tensor, Tensor, Tensor, Tensor, Tensor]


@torch.library.custom_op("piper::routing_metadata", mutates_args=())
def _routing_metadata(expert_ids: Tensor, num_experts: int, backend: str) -> Maps:
    # here the ids are real, also under torch.compile and vmap
    if expert_ids.device.type == "cpu":
        refuse_negative_ids("experts", expert_ids, num_experts)
    if backend == "triton":
        build = load(backend, "routing_metadata").permutation_from_expert_ids
    else:
        build = Permutation.from_expert_ids
    return maps_of(build(expert_ids, num_experts))


@_routing_metadata.register_fake
def _(expert_ids: Tensor, num_experts: int, backend: str) -> Maps:
    num_rows = expert_ids.shape[0] * expert_ids.shape[1]

    def new(size: int) -> Tensor:
        return expert_ids.new_empty(size, dtype=torch.int32)

    return new(num_experts), new(num_experts + 1), new(num_rows), new(num_rows), new(num_rows)


register_loop_over_batch(_routing_metadata)


def build_permutation(expert_ids: Tensor, num_experts: int, backend: str) -> Permutation:
    """``Permutation.from_expert_ids``, fit for torch.compile and vmap.

    Args:
        expert_ids: ``[T, K]`` int64 or int32. Ids outside ``[0, E)`` are sentinels.
        num_experts: E.
        backend: ``"triton"`` has kernels for it, the others use plain torch.

    Returns:
        The permutation.

    Raises:
        RoutingError: an id is negative and lies on the CPU, where looking is free.
    """
    maps = _routing_metadata(expert_ids, num_experts, backend)
    return permutation_of(maps, num_experts, expert_ids.shape[1])


def maps_of(permutation: Permutation) -> Maps:
    """A permutation's tensors, as ops pass them."""
    return (
        permutation.expert_counts,
        permutation.expert_offsets,
        permutation.row_to_slot,
        permutation.slot_to_row,
        permutation.row_to_token,
    )


def permutation_of(maps: Sequence[Tensor], num_experts: int, top_k: int) -> Permutation:
    """The inverse of :func:`maps_of`."""
    counts, offsets, row_to_slot, slot_to_row, row_to_token = maps
    return Permutation(
        num_experts=num_experts,
        top_k=top_k,
        expert_counts=counts,
        expert_offsets=offsets,
        row_to_slot=row_to_slot,
        slot_to_row=slot_to_row,
        row_to_token=row_to_token,
    )
