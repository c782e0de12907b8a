"""Traffic of the weight gradients: one contraction over each expert's rows, long ones in chunks."""

import math
from dataclasses import dataclass
from itertools import pairwise

import numpy as np

from piper_kernels.cost.moves import schedule_traffic
from piper_kernels.cost.ragged import (
    RaggedRows,
    Tiles,
    max_chunks,
    num_tiles,
    num_tiles_of,
    program_order,
)
from piper_kernels.cost.sizes import INDEX_BYTES
from piper_kernels.cost.traffic import NOTHING_LOST, CacheModel, Memory, Traffic, plain, waves

PARTIAL_BYTES = 4
# tiles of the kernel that adds partial sums
ADD_BLOCK_M = 32
ADD_BLOCK_N = 128


@dataclass(frozen=True, slots=True)
class Operand:
    """One side of the contraction: its width, and whether a row is a token's, read by an index."""

    size: int
    is_gathered: bool = False


def _entries(rows: RaggedRows, chunk_rows: int | None) -> tuple[list[tuple[int, int]], int]:
    """``(row ranges in launch order, how many of them are chunks)``; chunks come first."""
    offsets = rows.expert_offsets.tolist()
    spans = list(pairwise(offsets))
    if chunk_rows is None:
        return spans, 0
    chunks = [
        (start, min(start + chunk_rows, end))
        for first, end in spans
        if end - first > chunk_rows
        for start in range(first, end, chunk_rows)
    ]
    short = [span for span in spans if span[1] - span[0] <= chunk_rows]
    return chunks + short, len(chunks)


def _rereads(
    rows: RaggedRows,
    grad: Operand,
    x: Operand,
    tiles: Tiles,
    memory: Memory,
    *,
    chunk_rows: int | None,
    element_bytes: int,
    out_bytes: int,
) -> int:
    """Bytes of the two operands that come from DRAM again."""
    if math.isinf(memory.cache_bytes):
        return 0
    num_row_tiles, num_col_tiles = (
        num_tiles(grad.size, tiles.block_m),
        num_tiles(x.size, tiles.block_n),
    )
    per_entry = num_row_tiles * num_col_tiles
    spans, _ = _entries(rows, chunk_rows)
    row_order, col_order = program_order(num_row_tiles, num_col_tiles, group_m=tiles.group_m)
    keys = {
        operand: rows.row_to_token if operand.is_gathered else np.arange(rows.num_valid)
        for operand in (grad, x)
    }
    num_keys = max(rows.num_tokens, rows.num_valid)
    cache = CacheModel(
        cache_bytes=memory.cache_bytes,
        num_keys={"grad": num_keys * num_row_tiles, "x": num_keys * num_col_tiles},
    )
    grad_bytes = grad.size * element_bytes / num_row_tiles
    x_bytes = x.size * element_bytes / num_col_tiles
    for wave in waves(len(spans) * per_entry, memory.num_programs):
        pids = np.arange(wave.start, min(wave.stop, len(spans) * per_entry))
        for entry in np.unique(pids // per_entry):
            first, end = spans[entry]
            places = pids[pids // per_entry == entry] % per_entry
            for tile in np.unique(row_order[places]):
                cache.touch("grad", keys[grad][first:end] * num_row_tiles + tile, grad_bytes)
            for tile in np.unique(col_order[places]):
                cache.touch("x", keys[x][first:end] * num_col_tiles + tile, x_bytes)
        cache.write(len(pids) * grad.size * x.size * out_bytes / per_entry)
        cache.end_wave()
    return cache.reread_bytes


def wgrad_traffic(
    rows: RaggedRows,
    grad: Operand,
    x: Operand,
    tiles: Tiles,
    *,
    element_bytes: int = 2,
    out_bytes: int | None = None,
    accumulates: bool = False,
    memory: Memory = NOTHING_LOST,
) -> Traffic:
    """``out[e] = grad[rows of e].T @ x[rows of e]``, partial sums of long experts in fp32.

    Args:
        rows: which rows each expert has, from which tokens.
        grad: the gradient of the GEMM's output.
        x: the GEMM's input.
        tiles: how the output is cut, and long experts.
        element_bytes: of both operands.
        out_bytes: of one element of the output; the same if not given.
        accumulates: add to what the output holds, so it is read too.
        memory: the cache.
    """
    out_bytes = element_bytes if out_bytes is None else out_bytes
    num_row_tiles, num_col_tiles = (
        num_tiles(grad.size, tiles.block_m),
        num_tiles(x.size, tiles.block_n),
    )
    per_entry, matrix = num_row_tiles * num_col_tiles, grad.size * x.size
    chunk_rows = tiles.split_rows
    most_chunks = 0 if chunk_rows is None else max_chunks(rows.num_rows, chunk_rows)
    if most_chunks == 0:
        chunk_rows = None
    spans, num_chunks = _entries(rows, chunk_rows)
    num_experts, num_short = rows.num_experts, len(spans) - num_chunks
    num_indices = grad.is_gathered + x.is_gathered

    def num_distinct(operand: Operand) -> int:
        return rows.num_hit_tokens if operand.is_gathered else rows.num_valid

    stored = matrix * (num_short * out_bytes * (1 + accumulates) + num_chunks * PARTIAL_BYTES)
    issued = per_entry * 2 * (num_chunks + num_experts) * INDEX_BYTES
    compulsory = (num_experts + 1) * INDEX_BYTES
    if most_chunks:
        # expert of the chunk in every program; first row where there are rows to sum
        issued += per_entry * (most_chunks + num_experts + len(spans)) * INDEX_BYTES
        # short experts look at the last chunk's first row, and discard it
        is_padding_read = num_short > 0 and num_chunks < most_chunks
        compulsory += (most_chunks + num_chunks + is_padding_read) * INDEX_BYTES
    loaded = num_col_tiles * grad.size + num_row_tiles * x.size
    issued += rows.num_valid * (loaded * element_bytes + per_entry * num_indices * INDEX_BYTES)
    compulsory += (
        num_distinct(grad) * grad.size + num_distinct(x) * x.size
    ) * element_bytes + rows.num_valid * min(num_indices, 1) * INDEX_BYTES
    traffic = Traffic(
        flops=2 * rows.num_valid * matrix,
        issued=issued + stored,
        compulsory=compulsory + stored,
        reread=_rereads(
            rows,
            grad,
            x,
            tiles,
            memory,
            chunk_rows=chunk_rows,
            element_bytes=element_bytes,
            out_bytes=out_bytes,
        ),
    )
    return traffic + _chunks_traffic(rows, grad.size, x.size, chunk_rows, out_bytes, accumulates)


def _chunks_traffic(
    rows: RaggedRows,
    out_size: int,
    in_size: int,
    chunk_rows: int | None,
    out_bytes: int,
    accumulates: bool,
) -> Traffic:
    """The schedule of long experts' chunks, and their partial sums added in order."""
    if chunk_rows is None:
        return Traffic()
    is_long = rows.expert_counts > chunk_rows
    num_chunks = int(num_tiles_of(rows.expert_counts[is_long], chunk_rows).sum())
    schedule = schedule_traffic(
        rows,
        num_entries=max_chunks(rows.num_rows, chunk_rows),
        num_sizes=1,
        num_tiles_found=num_chunks,
    )
    num_programs = num_tiles(out_size, ADD_BLOCK_M) * num_tiles(in_size, ADD_BLOCK_N)
    num_written = int(is_long.sum()) * (1 + accumulates)
    moved = out_size * in_size * (num_chunks * PARTIAL_BYTES + num_written * out_bytes)
    return schedule + plain(
        rows.num_experts * num_programs * 2 * INDEX_BYTES + moved,
        (rows.num_experts + 1) * INDEX_BYTES + moved,
        flops=num_chunks * out_size * in_size,
    )
