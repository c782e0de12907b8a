"""gate_up: the first expert projection; gathers its rows while loading, activates in its epilogue.

::

    for each expert e, for each of its rows r:
        preact[r] = weight[e] @ x[row_to_token[r]] (+ bias[e])     kept only for a backward
        act[r] = activation(preact[r])

One dot feeds both the gate and the up columns of a tile, and a register split separates them. They
alternate inside the tile, whatever the layout; only a descriptor of halves puts all gates left.
Sentinel rows are neither read nor written.
Letters: T num_tokens, H hidden_size, I intermediate_size, E num_experts, R num_rows.
"""

import triton
import triton.language as tl
from torch import Tensor

from piper_kernels.contracts import ExpertsWeights
from piper_kernels.permutation import Permutation
from piper_kernels.triton.activation import activation_arguments, apply_function, gated_value
from piper_kernels.triton.launch import dot_arguments, launch
from piper_kernels.triton.ragged import (
    dot_loop,
    find_tile,
    split_halves,
    split_pairs,
)
from piper_kernels.triton.tile_schedule import TileSchedules
from piper_kernels.triton.tiles import TileConfig
from piper_kernels.triton.weight_source import weight_source


@triton.jit(do_not_specialize=["num_tiles"])
def _gate_up_kernel(
    preact_ptr, act_ptr, x_ptr, weight, bias_ptr,
    row_to_token_ptr, schedule_ptr, expert_offsets_ptr,
    num_tiles, hidden, intermediate,
    stride_x_t, stride_x_h, stride_w_e, stride_w_n, stride_w_h, stride_bias_e, stride_bias_n,
    FUNCTION: tl.constexpr, ALPHA: tl.constexpr, LIMIT: tl.constexpr, UP_OFFSET: tl.constexpr,
    IS_GATED: tl.constexpr, IS_INTERLEAVED: tl.constexpr, HAS_BIAS: tl.constexpr,
    SAVES_PREACT: tl.constexpr, SAVES_ACT: tl.constexpr, SOURCE: tl.constexpr,
    EVEN_N: tl.constexpr, EVEN_K: tl.constexpr,
    USE_UPCAST: tl.constexpr, PRECISION: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr,
    GROUP_M: tl.constexpr, NUM_XCDS: tl.constexpr,
):  # fmt: skip
    """One program computes a ``[BLOCK_M, BLOCK_N]`` tile of one expert's pre-activation.

    Example: halves, I = 4, BLOCK_N = 4: column tile 1 holds columns 2, 6, 3, 7 (g2, u2, g3, u3).
    """
    # which tile am I
    NUM_ACT_COLS: tl.constexpr = BLOCK_N // 2 if IS_GATED else BLOCK_N
    num_col_tiles = tl.cdiv(intermediate, NUM_ACT_COLS)
    expert, first_row, col_tile = find_tile(
        schedule_ptr, num_tiles, num_col_tiles, GROUP_M, NUM_XCDS
    )
    if expert < 0:
        return

    # which rows and columns; rows past the end repeat the last one and are not stored
    rows = first_row + tl.arange(0, BLOCK_M)
    end = tl.load(expert_offsets_ptr + expert + 1)
    tokens = tl.load(row_to_token_ptr + tl.minimum(rows, end - 1)).to(tl.int64)
    act_cols = col_tile * NUM_ACT_COLS + tl.arange(0, NUM_ACT_COLS)
    places = tl.arange(0, BLOCK_N)
    if IS_GATED and not IS_INTERLEAVED:
        if SOURCE == "halves":
            half_cols = col_tile * NUM_ACT_COLS + places % NUM_ACT_COLS
            cols = half_cols + (places // NUM_ACT_COLS) * intermediate
        else:
            half_cols = col_tile * NUM_ACT_COLS + places // 2
            cols = half_cols + (places % 2) * intermediate
        is_col = half_cols < intermediate
    else:
        cols = col_tile * BLOCK_N + places
        is_col = cols < (2 * intermediate if IS_GATED else intermediate)

    ks = tl.arange(0, BLOCK_K).to(tl.int64)
    a_ptrs = x_ptr + tokens[:, None] * stride_x_t + ks[None, :] * stride_x_h
    first_col = col_tile * (NUM_ACT_COLS if SOURCE == "halves" else BLOCK_N)
    acc = dot_loop(
        a_ptrs, stride_x_h, weight, stride_w_e, stride_w_n, stride_w_h,
        hidden, expert, cols, is_col, first_col, SOURCE,
        BLOCK_M, BLOCK_N, BLOCK_K, EVEN_N, EVEN_K, USE_UPCAST, PRECISION,
    )  # fmt: skip
    if HAS_BIAS:
        bias_ptrs = bias_ptr + expert.to(tl.int64) * stride_bias_e
        bias_ptrs += cols.to(tl.int64) * stride_bias_n
        acc += tl.load(bias_ptrs, mask=is_col, other=0.0).to(tl.float32)[None, :]

    # write back
    is_row = rows < end
    rows = rows.to(tl.int64)
    dtype = act_ptr.dtype.element_ty
    act_mask = is_row[:, None] & (act_cols < intermediate)[None, :]
    if IS_GATED:
        if SOURCE == "halves":
            gate, up = split_halves(acc, BLOCK_M, NUM_ACT_COLS)
        else:
            gate, up = split_pairs(acc, BLOCK_M, NUM_ACT_COLS)
    if SAVES_PREACT:
        if IS_GATED and not IS_INTERLEAVED:
            gate_ptrs = preact_ptr + rows[:, None] * (2 * intermediate) + act_cols[None, :]
            tl.store(gate_ptrs, gate.to(dtype), mask=act_mask)
            tl.store(gate_ptrs + intermediate, up.to(dtype), mask=act_mask)
        else:
            width = 2 * intermediate if IS_GATED else intermediate
            preact_ptrs = preact_ptr + rows[:, None] * width + cols[None, :]
            tl.store(preact_ptrs, acc.to(dtype), mask=is_row[:, None] & is_col[None, :])
    if SAVES_ACT:
        if IS_GATED:
            act = gated_value(gate, up, FUNCTION, ALPHA, LIMIT, UP_OFFSET)
        else:
            act = apply_function(acc, FUNCTION, ALPHA)
        act_ptrs = act_ptr + rows[:, None] * intermediate + act_cols[None, :]
        tl.store(act_ptrs, act.to(dtype), mask=act_mask)


def gate_up_forward(
    x: Tensor,
    permutation: Permutation,
    schedules: TileSchedules,
    weights: ExpertsWeights,
    *,
    needs_preact: bool,
    needs_act: bool,
    tiles: TileConfig,
) -> tuple[Tensor | None, Tensor | None]:
    """The first projection and the activation of all valid rows.

    Args:
        x: ``[T, H]``, any strides.
        permutation: of the tokens to the experts.
        schedules: of the permutation's rows.
        weights: of the layer; ``gate_up_proj`` may have any strides.
        needs_preact: return the pre-activation.
        needs_act: return the activation.
        tiles: how to cut the work.

    Returns:
        ``(preact [R, 2I] | None, act [R, I] | None)`` in x's dtype; sentinel rows are not written.
    """
    num_rows, intermediate = permutation.num_rows, weights.intermediate_size
    preact = x.new_empty(num_rows, weights.preact_size) if needs_preact else None
    act = x.new_empty(num_rows, intermediate) if needs_act else None
    weight, bias, layout = weights.gate_up_proj, weights.gate_up_bias, weights.layout
    schedule = schedules.of(tiles.block_m)
    num_act_cols = tiles.block_n // 2 if layout.is_gated else tiles.block_n
    matrix = weight.mT if layout.is_transposed else weight
    source = weight_source(
        matrix,
        tiles.block_n,
        tiles.block_k,
        has_halves=layout.is_gated and not layout.is_interleaved,
    )
    launch(
        _gate_up_kernel,
        (len(schedule) * triton.cdiv(intermediate, num_act_cols),),
        x.device,
        preact_ptr=preact if needs_preact else act,
        act_ptr=act if needs_act else preact,
        x_ptr=x,
        weight=source.weight,
        bias_ptr=bias,
        row_to_token_ptr=permutation.row_to_token,
        schedule_ptr=schedule,
        expert_offsets_ptr=permutation.expert_offsets,
        num_tiles=len(schedule),
        hidden=x.shape[1],
        intermediate=intermediate,
        stride_x_t=x.stride(0),
        stride_x_h=x.stride(1),
        stride_w_e=matrix.stride(0),
        stride_w_n=matrix.stride(1),
        stride_w_h=matrix.stride(2),
        stride_bias_e=0 if bias is None else bias.stride(0),
        stride_bias_n=0 if bias is None else bias.stride(1),
        **activation_arguments(weights.activation, layout),
        HAS_BIAS=bias is not None,
        SAVES_PREACT=needs_preact,
        SAVES_ACT=needs_act,
        SOURCE=source.kind,
        EVEN_N=intermediate % num_act_cols == 0,
        EVEN_K=x.shape[1] % tiles.block_k == 0,
        **dot_arguments(_gate_up_kernel, x, tiles),
    )
    return preact, act
