"""Traffic of the GEMMs over expert-sorted rows: gate_up, down, grad_act, grad_x.

Every formula is exact: it gives what `piper_kernels.triton` loads and stores, which the tests count
under the interpreter. Letters: H hidden_size, I intermediate_size, P width of the pre-activation.
"""

import math

import numpy as np

from piper_kernels.cost.ragged import RaggedRows, Tiles, num_tiles, program_order
from piper_kernels.cost.sizes import GATE_BYTES, INDEX_BYTES, ExpertsSizes
from piper_kernels.cost.traffic import NOTHING_LOST, CacheModel, Memory, Traffic, plain, waves

# a schedule entry is an expert and a first row
ENTRY_BYTES = 2 * INDEX_BYTES


def _ragged_rereads(
    rows: RaggedRows,
    tiles: Tiles,
    num_col_tiles: int,
    memory: Memory,
    *,
    row_bytes: int,
    weight_bytes: int,
    epilogue_bytes: int,
    is_gathered: bool,
) -> int:
    """Bytes of rows and weights that come from DRAM again.

    Args:
        rows: which rows each expert has.
        tiles: how they are cut.
        num_col_tiles: column tiles of the output.
        memory: the cache.
        row_bytes: of one row of the left operand, over the whole contraction.
        weight_bytes: of one expert's weight.
        epilogue_bytes: read or written once per row, over all columns.
        is_gathered: the left operand's rows are tokens, which several experts share.
    """
    if math.isinf(memory.cache_bytes):
        return 0
    experts, firsts, ends = rows.tiles(tiles.block_m)
    order = program_order(
        rows.schedule_length(tiles.block_m),
        num_col_tiles,
        group_m=tiles.group_m,
        num_xcds=tiles.num_xcds,
    )
    num_panels = rows.num_experts * num_col_tiles
    cache = CacheModel(
        cache_bytes=memory.cache_bytes,
        num_keys={"rows": max(rows.num_tokens, rows.num_valid), "weight": num_panels},
    )
    row_keys = rows.row_to_token if is_gathered else np.arange(rows.num_valid)
    for wave in waves(len(order[0]), memory.num_programs):
        row_tiles, col_tiles = (tile[wave] for tile in order)
        is_tile = row_tiles < len(experts)
        row_tiles, col_tiles = row_tiles[is_tile], col_tiles[is_tile]
        panels = np.unique(experts[row_tiles] * num_col_tiles + col_tiles)
        cache.touch("weight", panels, weight_bytes / num_col_tiles)
        for tile in np.unique(row_tiles):
            cache.touch("rows", row_keys[firsts[tile] : ends[tile]], row_bytes)
        num_rows = int((ends[row_tiles] - firsts[row_tiles]).sum())
        cache.write(num_rows * epilogue_bytes / num_col_tiles)
        cache.end_wave()
    return cache.reread_bytes


def gate_up_traffic(
    sizes: ExpertsSizes,
    rows: RaggedRows,
    tiles: Tiles,
    *,
    keeps_preact: bool,
    writes_act: bool = True,
    bias_bytes: int = 0,
    memory: Memory = NOTHING_LOST,
) -> Traffic:
    """The first projection: gather on load, activation in the epilogue.

    Args:
        sizes: H, I, dtype width, layout.
        rows: which rows each expert has, from which tokens.
        tiles: how they are cut.
        keeps_preact: also store the pre-activation.
        writes_act: store the activation.
        bias_bytes: bytes of one element of the bias, 0 without.
        memory: the cache.
    """
    hidden, width, element = sizes.hidden_size, sizes.preact_size, sizes.element_bytes
    num_act_cols = tiles.block_n // 2 if sizes.layout.is_gated else tiles.block_n
    cols = num_tiles(sizes.intermediate_size, num_act_cols)
    row_tiles, entries = rows.num_tiles(tiles.block_m), rows.schedule_length(tiles.block_m)
    stored = width * keeps_preact + sizes.intermediate_size * writes_act
    weight_and_bias = width * (hidden * element + bias_bytes)
    per_program = INDEX_BYTES + tiles.block_m * (INDEX_BYTES + hidden * element)
    hit = rows.num_hit_experts
    return Traffic(
        flops=2 * rows.num_valid * width * hidden,
        issued=entries * cols * ENTRY_BYTES
        + row_tiles * (cols * per_program + weight_and_bias)
        + rows.num_valid * stored * element,
        compulsory=entries * ENTRY_BYTES
        + hit * (INDEX_BYTES + weight_and_bias)
        + rows.num_hit_tokens * hidden * element
        + rows.num_valid * (INDEX_BYTES + stored * element),
        reread=_ragged_rereads(
            rows,
            tiles,
            cols,
            memory,
            row_bytes=hidden * element,
            weight_bytes=weight_and_bias,
            epilogue_bytes=stored * element,
            is_gathered=True,
        ),
    )


def grouped_gemm_traffic(
    rows: RaggedRows,
    tiles: Tiles,
    *,
    in_size: int,
    out_size: int,
    element_bytes: int = 2,
    bias_bytes: int = 0,
    memory: Memory = NOTHING_LOST,
) -> Traffic:
    """``out[r] = weight[e] @ rows[r]``: the down projection, and the gradient of gate_up's rows.

    Args:
        rows: which rows each expert has.
        tiles: how they are cut.
        in_size: the contraction.
        out_size: columns of the result.
        element_bytes: of rows, weight and result.
        bias_bytes: bytes of one element of the bias, 0 without.
        memory: the cache.
    """
    cols = num_tiles(out_size, tiles.block_n)
    row_tiles, entries = rows.num_tiles(tiles.block_m), rows.schedule_length(tiles.block_m)
    weight_and_bias = out_size * (in_size * element_bytes + bias_bytes)
    per_program = INDEX_BYTES + tiles.block_m * in_size * element_bytes
    return Traffic(
        flops=2 * rows.num_valid * in_size * out_size,
        issued=entries * cols * ENTRY_BYTES
        + row_tiles * (cols * per_program + weight_and_bias)
        + rows.num_valid * out_size * element_bytes,
        compulsory=entries * ENTRY_BYTES
        + rows.num_hit_experts * (INDEX_BYTES + weight_and_bias)
        + rows.num_valid * (in_size + out_size) * element_bytes,
        reread=_ragged_rereads(
            rows,
            tiles,
            cols,
            memory,
            row_bytes=in_size * element_bytes,
            weight_bytes=weight_and_bias,
            epilogue_bytes=out_size * element_bytes,
            is_gathered=False,
        ),
    )


def grad_act_traffic(
    sizes: ExpertsSizes,
    rows: RaggedRows,
    tiles: Tiles,
    *,
    needs_preact_grad: bool = True,
    needs_scaled_act: bool = True,
    needs_gates: bool = True,
    memory: Memory = NOTHING_LOST,
) -> Traffic:
    """Back through the down projection and the activation, with the gates' gradient in shares.

    Args:
        sizes: H, I, dtype width, layout.
        rows: which rows each expert has, from which tokens.
        tiles: how they are cut.
        needs_preact_grad: store the pre-activation's gradient; it is loaded a second time for that.
        needs_scaled_act: store the activation times the gate.
        needs_gates: store each column tile's share of the gates' gradient.
        memory: the cache.
    """
    hidden, inter, width = sizes.hidden_size, sizes.intermediate_size, sizes.preact_size
    element, valid = sizes.element_bytes, rows.num_valid
    cols = num_tiles(inter, tiles.block_n)
    row_tiles, entries = rows.num_tiles(tiles.block_m), rows.schedule_length(tiles.block_m)
    weight = hidden * inter * element
    stored = (width * needs_preact_grad + inter * needs_scaled_act) * element
    stored += cols * GATE_BYTES * needs_gates
    # slot and gate of each row, then its token's gradient
    per_row = INDEX_BYTES + GATE_BYTES + hidden * element
    return Traffic(
        flops=2 * valid * hidden * inter,
        issued=entries * cols * ENTRY_BYTES
        + row_tiles * (cols * (INDEX_BYTES + tiles.block_m * per_row) + weight)
        + valid * (width * (1 + needs_preact_grad) * element + stored),
        compulsory=entries * ENTRY_BYTES
        + rows.num_hit_experts * (INDEX_BYTES + weight)
        + rows.num_hit_tokens * hidden * element
        + valid * (INDEX_BYTES + GATE_BYTES + width * element + stored),
        reread=_ragged_rereads(
            rows,
            tiles,
            cols,
            memory,
            row_bytes=hidden * element,
            weight_bytes=weight,
            epilogue_bytes=width * element + stored,
            is_gathered=True,
        ),
    )


def add_shares_traffic(
    sizes: ExpertsSizes,
    rows: RaggedRows,
    block_rows: int,
    num_shares: int,
    *,
    bias_bytes: int = 0,
) -> Traffic:
    """The gates' gradients: the shares of :func:`grad_act_traffic` added in order.

    Args:
        sizes: H and dtype width.
        rows: which rows each expert has, from which tokens.
        block_rows: rows of a tile.
        num_shares: column tiles that left one.
        bias_bytes: bytes of one element of the down projection's bias, 0 without.
    """
    hidden, element, valid = sizes.hidden_size, sizes.element_bytes, rows.num_valid
    row_tiles = rows.num_tiles(block_rows)
    has_bias = bias_bytes > 0
    entries = rows.schedule_length(block_rows) * INDEX_BYTES + row_tiles * INDEX_BYTES
    per_row = INDEX_BYTES + (num_shares + 1) * GATE_BYTES
    grad_y = hidden * element * has_bias
    bias = hidden * bias_bytes
    return plain(
        entries + row_tiles * (INDEX_BYTES + bias) + valid * (per_row + grad_y),
        entries
        + rows.num_hit_experts * (INDEX_BYTES + bias)
        + valid * per_row
        + rows.num_hit_tokens * grad_y,
        flops=valid * num_shares + 2 * valid * hidden * has_bias,
    )
