"""Traffic of the launches without a GEMM: permute, unpermute, sums, activation, tile schedules.

Letters: T num_tokens, H hidden_size, K top_k, R num_rows, V rows that belong to an expert.
"""

import math

import numpy as np

from piper_kernels.config import WeightLayout
from piper_kernels.cost.ragged import RaggedRows, num_tiles
from piper_kernels.cost.sizes import GATE_BYTES, INDEX_BYTES
from piper_kernels.cost.traffic import NOTHING_LOST, CacheModel, Memory, Traffic, plain, waves

# how the kernels without a GEMM cut their work; tests hold them to the launchers' own
BLOCK_ROWS_MOVED = 16
BLOCK_TOKENS_SUMMED = 8
MOST_COLS_MOVED = 256
BLOCK_ROWS_SUMMED = 128
BLOCK_COLS_SUMMED = 64
ELEMENTS_ACTIVATED = 2048
SCHEDULED_BLOCK_ROWS = (16, 32, 64, 128, 256)
ENTRIES_PER_PROGRAM = 128
PARTIAL_BYTES = 4


def _block_cols(num_cols: int) -> int:
    return min(MOST_COLS_MOVED, 1 << (num_cols - 1).bit_length())


def gather_rereads(rows: RaggedRows, *, row_bytes: int, written_bytes: int, memory: Memory) -> int:
    """Bytes of tokens read again by a copy that walks over the rows, waves of 16 rows a program."""
    if math.isinf(memory.cache_bytes):
        return 0
    cache = CacheModel(cache_bytes=memory.cache_bytes, num_keys={"tokens": rows.num_tokens})
    for wave in waves(rows.num_valid, memory.num_programs * BLOCK_ROWS_MOVED):
        tokens = rows.row_to_token[wave]
        cache.touch("tokens", np.unique(tokens), row_bytes)
        cache.write(len(tokens) * written_bytes)
        cache.end_wave()
    return cache.reread_bytes


def permute_traffic(
    rows: RaggedRows, *, hidden_size: int, element_bytes: int = 2, memory: Memory = NOTHING_LOST
) -> Traffic:
    """``rows[r] = x[row_to_token[r]]``; sentinel rows are written as zeros."""
    row_bytes = hidden_size * element_bytes
    num_cols = num_tiles(hidden_size, _block_cols(hidden_size))
    num_programs = num_tiles(rows.num_rows, BLOCK_ROWS_MOVED) * num_cols
    written = rows.num_rows * row_bytes
    maps = rows.num_valid * INDEX_BYTES
    return Traffic(
        issued=num_programs * INDEX_BYTES + num_cols * maps + rows.num_valid * row_bytes + written,
        compulsory=INDEX_BYTES + maps + rows.num_hit_tokens * row_bytes + written,
        reread=gather_rereads(rows, row_bytes=row_bytes, written_bytes=row_bytes, memory=memory),
    )


def sum_over_rows_traffic(
    rows: RaggedRows, *, hidden_size: int, has_gates: bool, element_bytes: int = 2
) -> Traffic:
    """The sum of each token's K rows: unpermute with gates, permute's backward without."""
    row_bytes = hidden_size * element_bytes
    num_cols = num_tiles(hidden_size, _block_cols(hidden_size))
    num_programs = num_tiles(rows.num_tokens, BLOCK_TOKENS_SUMMED) * num_cols
    maps = rows.num_rows * INDEX_BYTES + rows.num_valid * GATE_BYTES * has_gates
    moved = (rows.num_valid + rows.num_tokens) * row_bytes
    return plain(
        num_programs * INDEX_BYTES + num_cols * maps + moved,
        INDEX_BYTES + maps + moved,
        flops=(1 + has_gates) * rows.num_valid * hidden_size,
    )


def unpermute_backward_traffic(
    rows: RaggedRows, *, hidden_size: int, element_bytes: int = 2, memory: Memory = NOTHING_LOST
) -> Traffic:
    """Gradients of unpermute: of its rows, and of the gates."""
    row_bytes = hidden_size * element_bytes
    num_programs = num_tiles(rows.num_rows, BLOCK_ROWS_MOVED)
    maps = rows.num_rows * (INDEX_BYTES + GATE_BYTES) + rows.num_valid * GATE_BYTES
    moved = (rows.num_valid + rows.num_rows) * row_bytes
    return Traffic(
        flops=3 * rows.num_valid * hidden_size,
        issued=num_programs * INDEX_BYTES + maps + moved + rows.num_valid * row_bytes,
        compulsory=INDEX_BYTES + maps + moved + rows.num_hit_tokens * row_bytes,
        reread=gather_rereads(
            rows, row_bytes=row_bytes, written_bytes=2 * row_bytes, memory=memory
        ),
    )


def activation_traffic(
    rows: RaggedRows,
    *,
    intermediate_size: int,
    layout: WeightLayout,
    has_gates: bool,
    element_bytes: int = 2,
) -> Traffic:
    """The activation alone, times the gate if there is one: what a frozen backward runs."""
    block_cols = _block_cols(intermediate_size)
    num_cols = num_tiles(intermediate_size, block_cols)
    num_programs = num_tiles(rows.num_rows, ELEMENTS_ACTIVATED // block_cols) * num_cols
    width = layout.preact_size(intermediate_size) + intermediate_size
    moved = rows.num_valid * width * element_bytes
    maps = rows.num_valid * (INDEX_BYTES + GATE_BYTES) * has_gates
    return plain(num_programs * INDEX_BYTES + num_cols * maps + moved, INDEX_BYTES + maps + moved)


def grouped_sum_traffic(
    rows: RaggedRows,
    *,
    num_cols: int,
    is_gathered: bool,
    element_bytes: int = 2,
    out_bytes: int | None = None,
) -> Traffic:
    """Each expert's sum of rows, which is a bias' gradient: tiles first, then experts.

    Args:
        rows: which rows each expert has, from which tokens.
        num_cols: of what is summed.
        is_gathered: rows are tokens, weighted by their gates.
        element_bytes: of what is summed.
        out_bytes: of the sums; the same if not given.
    """
    out_bytes = element_bytes if out_bytes is None else out_bytes
    entries = rows.schedule_length(BLOCK_ROWS_SUMMED)
    row_tiles, valid = rows.num_tiles(BLOCK_ROWS_SUMMED), rows.num_valid
    col_tiles = num_tiles(num_cols, BLOCK_COLS_SUMMED)
    maps = valid * (INDEX_BYTES + GATE_BYTES) * is_gathered
    partials = row_tiles * num_cols * PARTIAL_BYTES
    num_distinct = rows.num_hit_tokens if is_gathered else valid
    sum_tiles = plain(
        col_tiles * (entries * INDEX_BYTES + row_tiles * 2 * INDEX_BYTES + maps)
        + valid * num_cols * element_bytes
        + partials,
        (entries + row_tiles + rows.num_hit_experts) * INDEX_BYTES
        + maps
        + num_distinct * num_cols * element_bytes
        + partials,
        flops=(1 + is_gathered) * valid * num_cols,
    )
    moved = partials + rows.num_experts * num_cols * out_bytes
    sum_experts = plain(
        rows.num_experts * col_tiles * 2 * INDEX_BYTES + moved,
        (rows.num_experts + 1) * INDEX_BYTES + moved,
        flops=row_tiles * num_cols,
    )
    return sum_tiles + sum_experts


def schedule_traffic(
    rows: RaggedRows, *, num_entries: int, num_sizes: int, num_tiles_found: int
) -> Traffic:
    """One launch that writes ``num_sizes`` schedules of ``num_entries`` entries each."""
    programs = max(1, num_tiles(num_entries, ENTRIES_PER_PROGRAM)) * num_sizes
    num_experts = rows.num_experts
    written = num_sizes * (2 * num_entries + num_experts + 1) * INDEX_BYTES
    read = (programs * 2 * num_experts + num_tiles_found) * INDEX_BYTES
    return plain(read + written, (num_experts + 1) * INDEX_BYTES + written)


def tile_schedule_traffic(rows: RaggedRows) -> Traffic:
    """Schedules of all block sizes in one launch."""
    return schedule_traffic(
        rows,
        num_entries=rows.schedule_length(SCHEDULED_BLOCK_ROWS[0]),
        num_sizes=len(SCHEDULED_BLOCK_ROWS),
        num_tiles_found=sum(rows.num_tiles(block) for block in SCHEDULED_BLOCK_ROWS),
    )
