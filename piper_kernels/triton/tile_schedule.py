"""tile_schedule: which (expert, first row) each program of a ragged grid works on.

::

    for b in BLOCK_ROWS:
        entries = [(e, r) for e in experts for r in range(offsets[e], offsets[e + 1], b)]

Schedules for all block sizes are built at once, on the device, without a host synchronisation, and
padded with -1 to a bound that follows from R and E alone. So the block size may be chosen later.
Letters: R num_rows, E num_experts, B len(BLOCK_ROWS).
"""

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

from piper_kernels.cost.ragged import max_chunks, max_tiles
from piper_kernels.triton.launch import launch
from piper_kernels.triton.tiles import BLOCK_ROWS

# of a program, and of one of its steps
ENTRIES = 128
EXPERTS = 32


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class TileSchedules:
    """Schedules for every size in ``BLOCK_ROWS``.

    Attributes:
        num_rows: R.
        num_experts: E.
        entries: ``[B, max_tiles(R, E, 16), 2]`` int32: expert and first row, expert-major; -1 where
            nothing is to be done.
        tile_offsets: ``[B, E + 1]`` int32, exclusive: the tiles of expert e are
            ``tile_offsets[b, e]:tile_offsets[b, e + 1]``.
    """

    num_rows: int
    num_experts: int
    entries: Tensor
    tile_offsets: Tensor

    def of(self, block_rows: int) -> Tensor:
        """``[max_tiles(R, E, block_rows), 2]``: the schedule of one block size."""
        num_tiles = max_tiles(self.num_rows, self.num_experts, block_rows)
        return self.entries[BLOCK_ROWS.index(block_rows), :num_tiles]

    def offsets_of(self, block_rows: int) -> Tensor:
        """``[E + 1]``: where each expert's tiles begin."""
        return self.tile_offsets[BLOCK_ROWS.index(block_rows)]


@triton.jit(do_not_specialize=["num_entries", "min_rows"])
def _tile_schedule_kernel(
    entries_ptr, tile_offsets_ptr, expert_offsets_ptr, num_entries, num_experts, smallest_block,
    min_rows, ENTRIES: tl.constexpr, EXPERTS: tl.constexpr,
):  # fmt: skip
    """Program (i, b) writes ENTRIES entries for block size ``smallest_block << b``.

    Experts with ``min_rows`` rows or fewer get none.
    Example: offsets [0, 3, 3, 20], block size 16: entries (0, 0), (2, 3), (2, 19), then (-1, -1).
    """
    size = tl.program_id(1)
    block_rows = smallest_block << size
    tile_offsets_ptr += size * (num_experts + 1)
    tile = tl.program_id(0) * ENTRIES + tl.arange(0, ENTRIES)
    expert = tl.zeros((ENTRIES,), tl.int32)
    first_tile = tl.zeros((ENTRIES,), tl.int32)
    total = 0
    for start in range(0, num_experts, EXPERTS):
        ids = start + tl.arange(0, EXPERTS)
        is_expert = ids < num_experts
        starts = tl.load(expert_offsets_ptr + ids, mask=is_expert, other=0)
        counts = tl.load(expert_offsets_ptr + ids + 1, mask=is_expert, other=0) - starts
        num_tiles = tl.where(counts > min_rows, (counts + block_rows - 1) // block_rows, 0)
        ends = total + tl.cumsum(num_tiles, 0)
        total += tl.sum(num_tiles)
        # a tile's expert is the number of experts whose tiles all come before it
        is_behind = (ends[None, :] <= tile[:, None]) & is_expert[None, :]
        expert += tl.sum(is_behind.to(tl.int32), 1)
        first_tile = tl.maximum(first_tile, tl.max(tl.where(is_behind, ends[None, :], 0), 1))
        if tl.program_id(0) == 0:
            tl.store(tile_offsets_ptr + 1 + ids, ends, mask=is_expert)
    if tl.program_id(0) == 0:
        tl.store(tile_offsets_ptr, 0)

    is_tile = tile < total
    first_row = tl.load(expert_offsets_ptr + expert, mask=is_tile, other=0)
    row = first_row + (tile - first_tile) * block_rows
    entry_ptrs = entries_ptr + (size.to(tl.int64) * num_entries + tile) * 2
    tl.store(entry_ptrs, tl.where(is_tile, expert, -1), mask=tile < num_entries)
    tl.store(entry_ptrs + 1, tl.where(is_tile, row, -1), mask=tile < num_entries)


def _build(
    expert_offsets: Tensor, num_entries: int, num_sizes: int, smallest_block: int, min_rows: int
) -> tuple[Tensor, Tensor]:
    """Allocate ``[num_sizes, num_entries, 2]`` entries and their offsets, and fill both."""
    num_experts = expert_offsets.shape[0] - 1
    entries = expert_offsets.new_empty(num_sizes, num_entries, 2)
    tile_offsets = expert_offsets.new_empty(num_sizes, num_experts + 1)
    launch(
        _tile_schedule_kernel,
        # one program at least, for the offsets
        (max(1, triton.cdiv(num_entries, ENTRIES)), num_sizes),
        expert_offsets.device,
        entries_ptr=entries,
        tile_offsets_ptr=tile_offsets,
        expert_offsets_ptr=expert_offsets,
        num_entries=num_entries,
        num_experts=num_experts,
        smallest_block=smallest_block,
        min_rows=min_rows,
        ENTRIES=ENTRIES,
        EXPERTS=EXPERTS,
    )
    return entries, tile_offsets


def tile_schedules(expert_offsets: Tensor, num_rows: int) -> TileSchedules:
    """Build the schedules of all block sizes in one launch.

    Args:
        expert_offsets: ``[E + 1]`` int32, exclusive, contiguous.
        num_rows: R, at least the last offset.

    Returns:
        The schedules; their shapes depend on R and E only.
    """
    num_experts = expert_offsets.shape[0] - 1
    num_entries = max_tiles(num_rows, num_experts, BLOCK_ROWS[0])
    entries, tile_offsets = _build(expert_offsets, num_entries, len(BLOCK_ROWS), BLOCK_ROWS[0], 0)
    return TileSchedules(
        num_rows=num_rows, num_experts=num_experts, entries=entries, tile_offsets=tile_offsets
    )


def chunk_schedule(expert_offsets: Tensor, num_rows: int, chunk_rows: int) -> tuple[Tensor, Tensor]:
    """Cut only the experts with more than ``chunk_rows`` rows.

    Args:
        expert_offsets: ``[E + 1]`` int32, exclusive, contiguous.
        num_rows: R.
        chunk_rows: rows of a chunk.

    Returns:
        ``(entries [max_chunks, 2], chunk_offsets [E + 1])``, int32, as in :class:`TileSchedules`.
    """
    num_entries = max_chunks(num_rows, chunk_rows)
    entries, chunk_offsets = _build(expert_offsets, num_entries, 1, chunk_rows, chunk_rows)
    return entries[0], chunk_offsets[0]


def tile_schedule_torch(expert_offsets: Tensor, block_rows: int, min_rows: int = 0) -> Tensor:
    """The same schedule in plain torch, with a host synchronisation: for tests and for reading.

    Returns:
        ``[n, 2]`` int32 without padding.
    """
    ends = expert_offsets.tolist()
    pairs = [
        (expert, row)
        for expert in range(len(ends) - 1)
        if ends[expert + 1] - ends[expert] > min_rows
        for row in range(ends[expert], ends[expert + 1], block_rows)
    ]
    return torch.tensor(pairs, dtype=torch.int32).reshape(-1, 2)
