"""grad_act: back through the down projection and the activation, in one kernel.

::

    for each expert e, for each of its rows r, with s = gates[slot], d = grad_y[token]:
        p = weight[e].T @ d
        grad_gates[slot] = p . act(preact[r]) (+ d . bias[e])
        grad_preact[r] = s * p * act'(preact[r])
        scaled_act[r] = s * act(preact[r])              the down projection's gradient needs it

Each column tile leaves its share of a gate's gradient in fp32; a second kernel adds the shares in
ascending order. Letters: T num_tokens, H hidden_size, I intermediate_size, K top_k, R num_rows.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from piper_kernels.contracts import ExpertsWeights
from piper_kernels.permutation import Permutation
from piper_kernels.triton.activation import (
    activation_arguments,
    apply_function,
    function_grad,
    gated_grads,
    gated_value,
)
from piper_kernels.triton.launch import dot_arguments, launch
from piper_kernels.triton.ragged import (
    dot_loop,
    find_tile,
    join_pairs,
    split_pairs,
)
from piper_kernels.triton.tile_schedule import TileSchedules
from piper_kernels.triton.tiles import TileConfig
from piper_kernels.triton.weight_source import weight_source


@triton.jit
def load_gate_up(
    preact_ptr, half_offsets, pair_offsets, mask, pair_mask, intermediate,
    IS_GATED: tl.constexpr, IS_INTERLEAVED: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
):  # fmt: skip
    """fp32 ``(gate, up)`` tiles of the pre-activation; both are ``up`` when ungated."""
    if IS_INTERLEAVED:
        both = tl.load(preact_ptr + pair_offsets, mask=pair_mask, other=0.0)
        gate, up = split_pairs(both, BLOCK_M, BLOCK_N)
    else:
        gate = tl.load(preact_ptr + half_offsets, mask=mask, other=0.0)
        up = gate
        if IS_GATED:
            up = tl.load(preact_ptr + half_offsets + intermediate, mask=mask, other=0.0)
    return gate.to(tl.float32), up.to(tl.float32)


@triton.jit(do_not_specialize=["num_tiles", "num_rows"])
def _grad_act_kernel(
    grad_preact_ptr, scaled_act_ptr, shares_ptr, grad_y_ptr, weight, preact_ptr, gates_ptr,
    row_to_slot_ptr, schedule_ptr, expert_offsets_ptr,
    num_tiles, num_rows, hidden, intermediate, top_k,
    stride_gy_t, stride_gy_h, stride_w_e, stride_w_h, stride_w_i,
    FUNCTION: tl.constexpr, ALPHA: tl.constexpr, LIMIT: tl.constexpr, UP_OFFSET: tl.constexpr,
    IS_GATED: tl.constexpr, IS_INTERLEAVED: tl.constexpr,
    NEEDS_PREACT_GRAD: tl.constexpr, NEEDS_SCALED_ACT: tl.constexpr, NEEDS_GATES: tl.constexpr,
    SOURCE: tl.constexpr, EVEN_N: tl.constexpr, EVEN_K: tl.constexpr,
    USE_UPCAST: tl.constexpr, PRECISION: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr,
    GROUP_M: tl.constexpr, NUM_XCDS: tl.constexpr,
):  # fmt: skip
    """One program computes BLOCK_M rows by BLOCK_N columns of the intermediate size.

    Example: ungated identity, preact [2], weight [[3]], gate 0.5, grad_y [1]: p = 3,
    grad_gates 6, grad_preact [1.5], scaled_act [1].
    """
    # which tile am I
    num_col_tiles = tl.cdiv(intermediate, BLOCK_N)
    expert, first_row, col_tile = find_tile(
        schedule_ptr, num_tiles, num_col_tiles, GROUP_M, NUM_XCDS
    )
    if expert < 0:
        return

    # which rows and columns; rows past the end repeat the last one and are not stored
    rows = first_row + tl.arange(0, BLOCK_M)
    end = tl.load(expert_offsets_ptr + expert + 1)
    is_row = rows < end
    slots = tl.load(row_to_slot_ptr + tl.minimum(rows, end - 1))
    tokens = (slots // top_k).to(tl.int64)
    cols = col_tile * BLOCK_N + tl.arange(0, BLOCK_N)
    is_col = cols < intermediate

    ks = tl.arange(0, BLOCK_K).to(tl.int64)
    a_ptrs = grad_y_ptr + tokens[:, None] * stride_gy_t + ks[None, :] * stride_gy_h
    p = dot_loop(
        a_ptrs, stride_gy_h, weight, stride_w_e, stride_w_i, stride_w_h,
        hidden, expert, cols, is_col, col_tile * BLOCK_N, SOURCE,
        BLOCK_M, BLOCK_N, BLOCK_K, EVEN_N, EVEN_K, USE_UPCAST, PRECISION,
    )  # fmt: skip

    # back through the activation; the tile's first row is an int64 offset, and inside the tile
    # 32 bits are enough and spare registers
    width = 2 * intermediate if IS_GATED else intermediate
    preact_ptr += first_row.to(tl.int64) * width
    local_rows = tl.arange(0, BLOCK_M)[:, None]
    mask = is_row[:, None] & is_col[None, :]
    pairs = col_tile * (2 * BLOCK_N) + tl.arange(0, 2 * BLOCK_N)
    pair_offsets = local_rows * width + pairs[None, :]
    pair_mask = is_row[:, None] & (pairs < width)[None, :]
    half_offsets = local_rows * width + cols[None, :]
    dtype = preact_ptr.dtype.element_ty
    gate, up = load_gate_up(
        preact_ptr, half_offsets, pair_offsets, mask, pair_mask, intermediate, IS_GATED,
        IS_INTERLEAVED, BLOCK_M, BLOCK_N,
    )  # fmt: skip
    if IS_GATED:
        act = gated_value(gate, up, FUNCTION, ALPHA, LIMIT, UP_OFFSET)
    else:
        act = apply_function(up, FUNCTION, ALPHA)
    if NEEDS_GATES:
        # columns past the end carry act(0), which a clamped or shifted activation makes non-zero
        share = tl.sum(tl.where(is_col[None, :], p * act, 0.0), 1)
        tl.store(shares_ptr + col_tile.to(tl.int64) * num_rows + rows, share, mask=is_row)

    # write back, weighted by the row's gate
    weight_of_row = tl.load(gates_ptr + slots)[:, None]
    if NEEDS_SCALED_ACT:
        scaled_act_ptr += first_row.to(tl.int64) * intermediate
        act_ptrs = scaled_act_ptr + local_rows * intermediate + cols[None, :]
        tl.store(act_ptrs, (weight_of_row * act).to(dtype), mask=mask)
    if NEEDS_PREACT_GRAD:
        # read again (from L1): two live tiles less, or 128 rows would spill registers
        gate, up = load_gate_up(
            preact_ptr, half_offsets, pair_offsets, mask, pair_mask, intermediate, IS_GATED,
            IS_INTERLEAVED, BLOCK_M, BLOCK_N,
        )  # fmt: skip
        p *= weight_of_row
        grad_preact_ptr += first_row.to(tl.int64) * width
        if not IS_GATED:
            grad_up = p * function_grad(up, FUNCTION, ALPHA)
            tl.store(grad_preact_ptr + half_offsets, grad_up.to(dtype), mask=mask)
        else:
            grad_gate, grad_up = gated_grads(gate, up, p, FUNCTION, ALPHA, LIMIT, UP_OFFSET)
            if IS_INTERLEAVED:
                both = join_pairs(grad_gate.to(dtype), grad_up.to(dtype), BLOCK_M, BLOCK_N)
                tl.store(grad_preact_ptr + pair_offsets, both, mask=pair_mask)
            else:
                tl.store(grad_preact_ptr + half_offsets, grad_gate.to(dtype), mask=mask)
                up_ptrs = grad_preact_ptr + half_offsets + intermediate
                tl.store(up_ptrs, grad_up.to(dtype), mask=mask)


@triton.jit(do_not_specialize=["num_rows", "num_shares"])
def _add_shares_kernel(
    grad_gates_ptr, shares_ptr, grad_y_ptr, bias_ptr,
    row_to_slot_ptr, schedule_ptr, expert_offsets_ptr,
    num_rows, num_shares, hidden, top_k,
    stride_gy_t, stride_gy_h, stride_bias_e, stride_bias_h,
    HAS_BIAS: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_H: tl.constexpr,
):  # fmt: skip
    """Program i adds the shares of the rows of tile i. Example: shares [1], [2], d . bias 4: 7."""
    tile = tl.program_id(0)
    expert = tl.load(schedule_ptr + 2 * tile)
    if expert < 0:
        return
    rows = tl.load(schedule_ptr + 2 * tile + 1) + tl.arange(0, BLOCK_M)
    is_row = rows < tl.load(expert_offsets_ptr + expert + 1)
    slots = tl.load(row_to_slot_ptr + rows, mask=is_row, other=0)
    total = tl.zeros((BLOCK_M,), tl.float32)
    share_ptrs = shares_ptr + rows
    for _ in range(num_shares):
        total += tl.load(share_ptrs, mask=is_row, other=0.0)
        share_ptrs += num_rows
    if HAS_BIAS:
        grad_y_ptrs = grad_y_ptr + (slots // top_k).to(tl.int64)[:, None] * stride_gy_t
        bias_ptr += expert.to(tl.int64) * stride_bias_e
        for start in range(0, hidden, BLOCK_H):
            cols = (start + tl.arange(0, BLOCK_H)).to(tl.int64)
            is_col = cols < hidden
            bias = tl.load(bias_ptr + cols * stride_bias_h, mask=is_col, other=0.0)
            mask = is_row[:, None] & is_col[None, :]
            d = tl.load(grad_y_ptrs + cols[None, :] * stride_gy_h, mask=mask, other=0.0)
            total += tl.sum(d.to(tl.float32) * bias.to(tl.float32)[None, :], 1)
    tl.store(grad_gates_ptr + slots, total, mask=is_row)


def grad_act_backward(
    grad_y: Tensor,
    preact: Tensor,
    gates: Tensor,
    permutation: Permutation,
    schedules: TileSchedules,
    weights: ExpertsWeights,
    *,
    needs_preact_grad: bool,
    needs_scaled_act: bool,
    needs_gates: bool,
    tiles: TileConfig,
) -> tuple[Tensor | None, Tensor | None, Tensor | None]:
    """Gradients of the pre-activation and of the gates, and the activation times the gate.

    Args:
        grad_y: ``[T, H]``, any strides (0 too).
        preact: ``[R, 2I]`` (``[R, I]`` ungated), contiguous.
        gates: ``[T, K]`` fp32, contiguous.
        permutation: of the forward.
        schedules: of its rows.
        weights: of the layer.
        needs_preact_grad: whether to compute the first result.
        needs_scaled_act: whether to compute the second.
        needs_gates: whether to compute the third.
        tiles: how to cut the work.

    Returns:
        ``(grad_preact like preact, scaled_act [R, I], grad_gates [T, K] fp32)``, ``None`` where not
        needed. Sentinel rows are not written; their gates' gradients are 0.
    """
    num_rows, intermediate = permutation.num_rows, weights.intermediate_size
    hidden = grad_y.shape[1]
    weight = weights.down_proj.mT if weights.layout.is_transposed else weights.down_proj
    source = weight_source(weight.mT, tiles.block_n, tiles.block_k)
    num_col_tiles = triton.cdiv(intermediate, tiles.block_n)
    grad_preact = torch.empty_like(preact) if needs_preact_grad else None
    scaled_act = preact.new_empty(num_rows, intermediate) if needs_scaled_act else None
    shares = gates.new_empty(num_col_tiles, num_rows) if needs_gates else None
    schedule = schedules.of(tiles.block_m)
    common = {
        "shares_ptr": shares,
        "grad_y_ptr": grad_y,
        "row_to_slot_ptr": permutation.row_to_slot,
        "schedule_ptr": schedule,
        "expert_offsets_ptr": permutation.expert_offsets,
        "num_rows": num_rows,
        "hidden": hidden,
        "top_k": permutation.top_k,
        "stride_gy_t": grad_y.stride(0),
        "stride_gy_h": grad_y.stride(1),
    }
    launch(
        _grad_act_kernel,
        (len(schedule) * num_col_tiles,),
        grad_y.device,
        **common,
        grad_preact_ptr=grad_preact,
        scaled_act_ptr=scaled_act,
        weight=source.weight,
        preact_ptr=preact,
        gates_ptr=gates,
        num_tiles=len(schedule),
        intermediate=intermediate,
        stride_w_e=weight.stride(0),
        stride_w_h=weight.stride(1),
        stride_w_i=weight.stride(2),
        **activation_arguments(weights.activation, weights.layout),
        NEEDS_PREACT_GRAD=needs_preact_grad,
        NEEDS_SCALED_ACT=needs_scaled_act,
        NEEDS_GATES=needs_gates,
        SOURCE=source.kind,
        EVEN_N=intermediate % tiles.block_n == 0,
        EVEN_K=hidden % tiles.block_k == 0,
        **dot_arguments(_grad_act_kernel, grad_y, tiles),
    )
    if not needs_gates:
        return grad_preact, scaled_act, None
    bias = weights.down_bias
    grad_gates = torch.zeros_like(gates)
    launch(
        _add_shares_kernel,
        (len(schedule),),
        grad_y.device,
        **common,
        grad_gates_ptr=grad_gates,
        bias_ptr=bias,
        num_shares=num_col_tiles,
        stride_bias_e=0 if bias is None else bias.stride(0),
        stride_bias_h=0 if bias is None else bias.stride(1),
        HAS_BIAS=bias is not None,
        BLOCK_M=tiles.block_m,
        BLOCK_H=64,
    )
    return grad_preact, scaled_act, grad_gates
