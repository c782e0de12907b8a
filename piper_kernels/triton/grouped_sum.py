"""grouped_sum: the sum of each expert's rows, which is the gradient of its bias.

::

    out[e] = sum over the rows r of expert e of values[r]                       or, gathered,
    out[e] = sum over the rows r of expert e of gates[slot] * values[token]

Tiles of rows are summed in fp32 first, then each expert's tiles in ascending order: no atomics, and
a long expert does not serialise the first step.
Letters: T num_tokens, K top_k, R num_rows, E num_experts, N number of columns.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from piper_kernels.permutation import Permutation
from piper_kernels.triton.launch import launch
from piper_kernels.triton.tile_schedule import TileSchedules

BLOCK_ROWS_SUMMED = 128
BLOCK_N = 64
TILES_PER_STEP = 16


@triton.jit
def _sum_tiles_kernel(
    partials_ptr, values_ptr, gates_ptr, row_to_slot_ptr, schedule_ptr, expert_offsets_ptr,
    num_cols, top_k, stride_values_r, stride_values_c,
    HAS_GATES: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
):  # fmt: skip
    """Program (i, j) sums the rows of tile i in columns j. Example: rows [[1], [2]]: [3]."""
    tile = tl.program_id(0)
    expert = tl.load(schedule_ptr + 2 * tile)
    if expert < 0:
        return
    rows = tl.load(schedule_ptr + 2 * tile + 1) + tl.arange(0, BLOCK_M)
    is_row = rows < tl.load(expert_offsets_ptr + expert + 1)
    cols = (tl.program_id(1) * BLOCK_N + tl.arange(0, BLOCK_N)).to(tl.int64)
    is_col = cols < num_cols
    places = rows.to(tl.int64)
    if HAS_GATES:
        slots = tl.load(row_to_slot_ptr + rows, mask=is_row, other=0)
        places = (slots // top_k).to(tl.int64)
    ptrs = values_ptr + places[:, None] * stride_values_r + cols[None, :] * stride_values_c
    values = tl.load(ptrs, mask=is_row[:, None] & is_col[None, :], other=0.0).to(tl.float32)
    if HAS_GATES:
        values *= tl.load(gates_ptr + slots, mask=is_row, other=0.0)[:, None]
    tl.store(partials_ptr + tile.to(tl.int64) * num_cols + cols, tl.sum(values, 0), mask=is_col)


@triton.jit
def _sum_experts_kernel(
    out_ptr, partials_ptr, tile_offsets_ptr, num_cols, stride_out_e, stride_out_n,
    TILES: tl.constexpr, BLOCK_N: tl.constexpr,
):  # fmt: skip
    """Program (e, j) adds the partial sums of expert e. Example: [3], [4]: 7; none: 0."""
    expert = tl.program_id(0)
    first = tl.load(tile_offsets_ptr + expert)
    end = tl.load(tile_offsets_ptr + expert + 1)
    cols = (tl.program_id(1) * BLOCK_N + tl.arange(0, BLOCK_N)).to(tl.int64)
    is_col = cols < num_cols
    total = tl.zeros((BLOCK_N,), tl.float32)
    for start in range(first, end, TILES):
        tiles = start + tl.arange(0, TILES)
        ptrs = partials_ptr + tiles.to(tl.int64)[:, None] * num_cols + cols[None, :]
        mask = (tiles < end)[:, None] & is_col[None, :]
        total += tl.sum(tl.load(ptrs, mask=mask, other=0.0), 0)
    out_ptrs = out_ptr + expert.to(tl.int64) * stride_out_e + cols * stride_out_n
    tl.store(out_ptrs, total.to(out_ptr.dtype.element_ty), mask=is_col)


def grouped_sum(
    values: Tensor,
    permutation: Permutation,
    schedules: TileSchedules,
    *,
    out: Tensor,
    gates: Tensor | None = None,
) -> Tensor:
    """Write each expert's sum into ``out`` and return it.

    Args:
        values: ``[R, N]`` in expert order; with gates ``[T, N]`` in token order. Any strides.
        permutation: whose rows these are.
        schedules: of the permutation's rows.
        out: ``[E, N]``, any strides and float dtype; 0 for an expert without rows.
        gates: ``[T, K]`` fp32, contiguous: gather each row's token and weight it.

    Example:
        values [[1], [2], [4]], offsets [0, 2, 2, 3]: [[3], [0], [4]].
    """
    num_cols = values.shape[1]
    schedule = schedules.of(BLOCK_ROWS_SUMMED)
    partials = torch.empty(len(schedule), num_cols, dtype=torch.float32, device=values.device)
    num_col_tiles = triton.cdiv(num_cols, BLOCK_N)
    launch(
        _sum_tiles_kernel,
        (len(schedule), num_col_tiles),
        values.device,
        partials_ptr=partials,
        values_ptr=values,
        gates_ptr=gates,
        row_to_slot_ptr=permutation.row_to_slot,
        schedule_ptr=schedule,
        expert_offsets_ptr=permutation.expert_offsets,
        num_cols=num_cols,
        top_k=permutation.top_k,
        stride_values_r=values.stride(0),
        stride_values_c=values.stride(1),
        HAS_GATES=gates is not None,
        BLOCK_M=BLOCK_ROWS_SUMMED,
        BLOCK_N=BLOCK_N,
        # four spill where each element of fp16 has an address of its own
        num_warps=8,
    )
    launch(
        _sum_experts_kernel,
        (permutation.num_experts, num_col_tiles),
        values.device,
        out_ptr=out,
        partials_ptr=partials,
        tile_offsets_ptr=schedules.offsets_of(BLOCK_ROWS_SUMMED),
        num_cols=num_cols,
        stride_out_e=out.stride(0),
        stride_out_n=out.stride(1),
        TILES=TILES_PER_STEP,
        BLOCK_N=BLOCK_N,
    )
    return out
