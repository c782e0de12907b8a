"""routing_metadata: expert ids -> Permutation, on the device, stable, without a host sync.

::

    count:  block_counts[e, b] = how many slots of block b chose expert e
    scan:   block_starts[e, b] = sum of block_counts[e, :b]; totals[e] = sum of block_counts[e]
    ends:   expert_offsets = exclusive cumulative totals
    place:  row = expert_offsets[e] + block_starts[e, b] + rank of the slot among block b's e

Ranks come from comparisons, not from atomics, so equal inputs give equal bits, and rows of one
expert keep slot order. Few slots take one program that ranks each slot among all.
Letters: T num_tokens, K top_k, E num_experts, R = T*K num_rows. Sentinels count as expert E.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from piper_kernels.errors import check_dtype, check_shape
from piper_kernels.permutation import ID_DTYPES, Permutation
from piper_kernels.triton.launch import launch, next_power_of_2

SLOTS_PER_BLOCK = 256
BLOCKS_PER_SCAN = 1024
MAX_SLOTS_OF_ONE_PROGRAM = 1024


@triton.jit
def _load_ids(expert_ids_ptr, slots, num_rows, num_experts):
    """Expert of each slot; E for a sentinel (any id that is no expert), E + 1 past the end."""
    ids = tl.load(expert_ids_ptr + slots, mask=slots < num_rows, other=0)
    ids = tl.where((ids >= 0) & (ids < num_experts), ids, num_experts).to(tl.int32)
    return tl.where(slots < num_rows, ids, num_experts + 1)


@triton.jit
def _count_kernel(
    block_counts_ptr, expert_ids_ptr, num_rows, num_experts, num_blocks,
    SLOTS: tl.constexpr, NUM_BINS: tl.constexpr,
):  # fmt: skip
    """Program b counts the ids of block b. Example: ids [2, 0, 2], E = 2: counts [1, 0, 2]."""
    block = tl.program_id(0)
    ids = _load_ids(
        expert_ids_ptr, block.to(tl.int64) * SLOTS + tl.arange(0, SLOTS), num_rows, num_experts
    )
    counts = tl.histogram(ids, NUM_BINS)
    experts = tl.arange(0, NUM_BINS)
    ptrs = block_counts_ptr + experts.to(tl.int64) * num_blocks + block
    tl.store(ptrs, counts, mask=experts <= num_experts)


@triton.jit
def _scan_kernel(totals_ptr, block_counts_ptr, num_blocks, BLOCKS: tl.constexpr):
    """Program e turns row e of block_counts into exclusive sums, in place, and stores its total.

    Example: [2, 0, 3] becomes [0, 2, 2], total 5.
    """
    expert = tl.program_id(0)
    counts_ptr = block_counts_ptr + expert.to(tl.int64) * num_blocks
    total = 0
    for start in range(0, num_blocks, BLOCKS):
        blocks = start + tl.arange(0, BLOCKS)
        counts = tl.load(counts_ptr + blocks, mask=blocks < num_blocks, other=0)
        sums = total + tl.cumsum(counts, 0) - counts
        tl.store(counts_ptr + blocks, sums, mask=blocks < num_blocks)
        total += tl.sum(counts)
    tl.store(totals_ptr + expert, total)


@triton.jit
def _store_offsets(expert_counts_ptr, expert_offsets_ptr, counts, num_experts, NUM_BINS):
    """Store ``expert_counts [E]`` and their exclusive sums ``[E + 1]``."""
    experts = tl.arange(0, NUM_BINS)
    tl.store(expert_counts_ptr + experts, counts, mask=experts < num_experts)
    offsets = tl.cumsum(counts, 0) - counts
    tl.store(expert_offsets_ptr + experts, offsets, mask=experts <= num_experts)


@triton.jit
def _offsets_kernel(
    expert_counts_ptr, expert_offsets_ptr, totals_ptr, num_experts, NUM_BINS: tl.constexpr
):
    """One program sums the totals. Example: totals [2, 1, 4 sentinels]: offsets [0, 2, 3]."""
    experts = tl.arange(0, NUM_BINS)
    totals = tl.load(totals_ptr + experts, mask=experts <= num_experts, other=0)
    _store_offsets(expert_counts_ptr, expert_offsets_ptr, totals, num_experts, NUM_BINS)


@triton.jit
def _store_maps(row_to_slot_ptr, slot_to_row_ptr, row_to_token_ptr, slots, rows, num_rows, top_k):
    """Store the three maps for some slots whose rows are known."""
    is_slot = slots < num_rows
    tl.store(slot_to_row_ptr + slots, rows, mask=is_slot)
    tl.store(row_to_slot_ptr + rows, slots.to(tl.int32), mask=is_slot)
    tl.store(row_to_token_ptr + rows, (slots // top_k).to(tl.int32), mask=is_slot)


@triton.jit
def _place_kernel(
    row_to_slot_ptr, slot_to_row_ptr, row_to_token_ptr,
    expert_ids_ptr, expert_offsets_ptr, block_starts_ptr,
    num_rows, num_experts, num_blocks, top_k, SLOTS: tl.constexpr, CHUNK: tl.constexpr,
):  # fmt: skip
    """Program b gives each slot of block b its row.

    Example: ids [1, 0, 1], offsets [0, 1, 3]: slot_to_row [1, 0, 2].
    """
    block = tl.program_id(0)
    first = block.to(tl.int64) * SLOTS
    local = tl.arange(0, SLOTS)
    ids = _load_ids(expert_ids_ptr, first + local, num_rows, num_experts)
    rank = tl.zeros((SLOTS,), tl.int32)
    for start in range(0, SLOTS, CHUNK):
        others = start + tl.arange(0, CHUNK)
        other_ids = _load_ids(expert_ids_ptr, first + others, num_rows, num_experts)
        is_before = (other_ids[None, :] == ids[:, None]) & (others[None, :] < local[:, None])
        rank += tl.sum(is_before.to(tl.int32), 1)
    is_slot = ids <= num_experts
    base = tl.load(expert_offsets_ptr + ids, mask=is_slot, other=0)
    start_ptrs = block_starts_ptr + ids.to(tl.int64) * num_blocks + block
    rows = base + tl.load(start_ptrs, mask=is_slot, other=0) + rank
    _store_maps(
        row_to_slot_ptr, slot_to_row_ptr, row_to_token_ptr, first + local, rows, num_rows, top_k
    )


@triton.jit
def _one_program_kernel(
    expert_counts_ptr, expert_offsets_ptr, row_to_slot_ptr, slot_to_row_ptr, row_to_token_ptr,
    expert_ids_ptr, num_rows, num_experts, top_k,
    SLOTS: tl.constexpr, NUM_BINS: tl.constexpr, CHUNK: tl.constexpr,
):  # fmt: skip
    """One program does it all: a slot's row is the number of slots sorted before it.

    Example: ids [1, 0, 1]: slot_to_row [1, 0, 2].
    """
    slots = tl.arange(0, SLOTS)
    ids = _load_ids(expert_ids_ptr, slots, num_rows, num_experts)
    rows = tl.zeros((SLOTS,), tl.int32)
    for start in range(0, num_rows, CHUNK):
        others = start + tl.arange(0, CHUNK)
        other_ids = _load_ids(expert_ids_ptr, others, num_rows, num_experts)
        is_tie = (other_ids[None, :] == ids[:, None]) & (others[None, :] < slots[:, None])
        is_before = (other_ids[None, :] < ids[:, None]) | is_tie
        rows += tl.sum(is_before.to(tl.int32), 1)
    counts = tl.histogram(ids, NUM_BINS)
    _store_offsets(expert_counts_ptr, expert_offsets_ptr, counts, num_experts, NUM_BINS)
    _store_maps(row_to_slot_ptr, slot_to_row_ptr, row_to_token_ptr, slots, rows, num_rows, top_k)


def permutation_from_expert_ids(expert_ids: Tensor, num_experts: int) -> Permutation:
    """The same as ``Permutation.from_expert_ids``, bit for bit, in one or four launches.

    Args:
        expert_ids: ``[T, K]`` int64 or int32, any strides. Ids outside ``[0, E)`` are
            sentinels.
        num_experts: E.

    Returns:
        The permutation, on the device of ``expert_ids``.

    Raises:
        ShapeError: ``expert_ids`` is not two-dimensional.
        DtypeError: ``expert_ids`` is not an integer tensor.

    Example:
        ids [[2, 0], [0, 1], [2, 3]], E = 3: row_to_slot [1, 2, 3, 0, 4, 5].
    """
    name = "permutation_from_expert_ids"
    check_shape(name, "expert_ids", expert_ids, ("T", "K"), (None, None))
    check_dtype(name, "expert_ids", expert_ids, ID_DTYPES)
    num_rows = expert_ids.numel()
    slot_ids = expert_ids.contiguous().view(-1)

    def empty(size: int) -> Tensor:
        return torch.empty(size, dtype=torch.int32, device=expert_ids.device)

    permutation = Permutation(
        num_experts=num_experts,
        top_k=expert_ids.shape[1],
        expert_counts=empty(num_experts),
        expert_offsets=empty(num_experts + 1),
        row_to_slot=empty(num_rows),
        slot_to_row=empty(num_rows),
        row_to_token=empty(num_rows),
    )
    if num_rows <= MAX_SLOTS_OF_ONE_PROGRAM:
        _fill_in_one_program(permutation, slot_ids)
    else:
        _fill_in_blocks(permutation, slot_ids)
    return permutation


def _maps(permutation: Permutation) -> dict[str, Tensor]:
    return {
        "row_to_slot_ptr": permutation.row_to_slot,
        "slot_to_row_ptr": permutation.slot_to_row,
        "row_to_token_ptr": permutation.row_to_token,
    }


def _offsets(permutation: Permutation) -> dict[str, Tensor]:
    return {
        "expert_counts_ptr": permutation.expert_counts,
        "expert_offsets_ptr": permutation.expert_offsets,
    }


def _fill_in_one_program(permutation: Permutation, slot_ids: Tensor) -> None:
    launch(
        _one_program_kernel,
        (1,),
        slot_ids.device,
        **_offsets(permutation),
        **_maps(permutation),
        expert_ids_ptr=slot_ids,
        num_rows=permutation.num_rows,
        num_experts=permutation.num_experts,
        top_k=permutation.top_k,
        SLOTS=max(16, next_power_of_2(permutation.num_rows)),
        NUM_BINS=next_power_of_2(permutation.num_experts + 2),
        CHUNK=16,
        num_warps=8,
    )


def _fill_in_blocks(permutation: Permutation, slot_ids: Tensor) -> None:
    num_rows, num_experts = permutation.num_rows, permutation.num_experts
    num_blocks = triton.cdiv(num_rows, SLOTS_PER_BLOCK)
    device = slot_ids.device
    block_counts = torch.empty(num_experts + 1, num_blocks, dtype=torch.int32, device=device)
    totals = torch.empty(num_experts + 1, dtype=torch.int32, device=device)
    num_bins = next_power_of_2(num_experts + 2)
    sizes = {"num_rows": num_rows, "num_experts": num_experts, "num_blocks": num_blocks}
    launch(
        _count_kernel,
        (num_blocks,),
        device,
        block_counts_ptr=block_counts,
        expert_ids_ptr=slot_ids,
        **sizes,
        SLOTS=SLOTS_PER_BLOCK,
        NUM_BINS=num_bins,
    )
    launch(
        _scan_kernel,
        (num_experts + 1,),
        device,
        totals_ptr=totals,
        block_counts_ptr=block_counts,
        num_blocks=num_blocks,
        BLOCKS=BLOCKS_PER_SCAN,
    )
    launch(
        _offsets_kernel,
        (1,),
        device,
        **_offsets(permutation),
        totals_ptr=totals,
        num_experts=num_experts,
        NUM_BINS=num_bins,
    )
    launch(
        _place_kernel,
        (num_blocks,),
        device,
        **_maps(permutation),
        expert_ids_ptr=slot_ids,
        expert_offsets_ptr=permutation.expert_offsets,
        block_starts_ptr=block_counts,
        **sizes,
        top_k=permutation.top_k,
        SLOTS=SLOTS_PER_BLOCK,
        CHUNK=16,
    )
