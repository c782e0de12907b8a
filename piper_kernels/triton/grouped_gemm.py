"""grouped_gemm: one GEMM per expert over that expert's rows.

::

    for each expert e, for each of its rows r:
        out[r] = weight[e] @ rows[r] (+ bias[e])

The contraction may run over either dim of the weight, so the same kernel computes the down
projection and the gradient of the gate/up projection's input.
Letters: R num_rows, E num_experts.
"""

import triton
import triton.language as tl
from torch import Tensor

from piper_kernels.errors import ShapeError, check_shape, require
from piper_kernels.triton.grouped_gemm_wgrad import grouped_gemm_wgrad
from piper_kernels.triton.launch import check_operands, dot_arguments, is_hip, launch
from piper_kernels.triton.ragged import dot_loop, find_tile
from piper_kernels.triton.tile_schedule import TileSchedules, tile_schedules
from piper_kernels.triton.tiles import TileConfig, are_rows_aligned, default_tiles
from piper_kernels.triton.weight_source import weight_source

# functional/ looks up both products of a grouped GEMM here
__all__ = ["grouped_gemm", "grouped_gemm_forward", "grouped_gemm_wgrad"]


@triton.jit(do_not_specialize=["num_tiles"])
def _grouped_gemm_kernel(
    out_ptr, rows_ptr, weight, bias_ptr, schedule_ptr, expert_offsets_ptr,
    num_tiles, out_size, in_size,
    stride_rows_r, stride_rows_k, stride_w_e, stride_w_n, stride_w_k, stride_bias_e, stride_bias_n,
    HAS_BIAS: tl.constexpr, SOURCE: tl.constexpr, EVEN_N: tl.constexpr, EVEN_K: tl.constexpr,
    USE_UPCAST: tl.constexpr, PRECISION: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr,
    GROUP_M: tl.constexpr, NUM_XCDS: tl.constexpr,
):  # fmt: skip
    """One program computes a ``[BLOCK_M, BLOCK_N]`` tile of one expert's output.

    Example: rows [[1, 2], [3, 4]], one row each for experts with weights [[1, 1]] and [[1, -1]]:
    out [[3], [-1]].
    """
    # which tile am I
    num_col_tiles = tl.cdiv(out_size, BLOCK_N)
    expert, first_row, col_tile = find_tile(
        schedule_ptr, num_tiles, num_col_tiles, GROUP_M, NUM_XCDS
    )
    if expert < 0:
        return

    # which rows and columns; rows past the end repeat the last one and are not stored
    rows = first_row + tl.arange(0, BLOCK_M)
    end = tl.load(expert_offsets_ptr + expert + 1)
    is_row = rows < end
    read_rows = tl.minimum(rows, end - 1).to(tl.int64)
    cols = (col_tile * BLOCK_N + tl.arange(0, BLOCK_N)).to(tl.int64)
    is_col = cols < out_size

    ks = tl.arange(0, BLOCK_K).to(tl.int64)
    a_ptrs = rows_ptr + read_rows[:, None] * stride_rows_r + ks[None, :] * stride_rows_k
    acc = dot_loop(
        a_ptrs, stride_rows_k, weight, stride_w_e, stride_w_n, stride_w_k,
        in_size, expert, cols, is_col, col_tile * BLOCK_N, SOURCE,
        BLOCK_M, BLOCK_N, BLOCK_K, EVEN_N, EVEN_K, USE_UPCAST, PRECISION,
    )  # fmt: skip
    if HAS_BIAS:
        bias_ptrs = bias_ptr + expert.to(tl.int64) * stride_bias_e + cols * stride_bias_n
        acc += tl.load(bias_ptrs, mask=is_col, other=0.0).to(tl.float32)[None, :]

    # write back
    out_ptrs = out_ptr + rows.to(tl.int64)[:, None] * out_size + cols[None, :]
    tl.store(out_ptrs, acc.to(out_ptr.dtype.element_ty), mask=is_row[:, None] & is_col[None, :])


def grouped_gemm_forward(
    rows: Tensor,
    weight: Tensor,
    expert_offsets: Tensor,
    schedules: TileSchedules,
    *,
    bias: Tensor | None,
    is_transposed: bool,
    tiles: TileConfig,
) -> Tensor:
    """:func:`grouped_gemm` with given schedules; rows beyond the last expert's stay unwritten."""
    num_rows, in_size = rows.shape
    matrix = weight.mT if is_transposed else weight
    out_size = matrix.shape[1]
    source = weight_source(matrix, tiles.block_n, tiles.block_k)
    out = rows.new_empty(num_rows, out_size)
    schedule = schedules.of(tiles.block_m)
    launch(
        _grouped_gemm_kernel,
        (len(schedule) * triton.cdiv(out_size, tiles.block_n),),
        rows.device,
        out_ptr=out,
        rows_ptr=rows,
        weight=source.weight,
        bias_ptr=bias,
        schedule_ptr=schedule,
        expert_offsets_ptr=expert_offsets,
        num_tiles=len(schedule),
        out_size=out_size,
        in_size=in_size,
        stride_rows_r=rows.stride(0),
        stride_rows_k=rows.stride(1),
        stride_w_e=matrix.stride(0),
        stride_w_n=matrix.stride(1),
        stride_w_k=matrix.stride(2),
        stride_bias_e=0 if bias is None else bias.stride(0),
        stride_bias_n=0 if bias is None else bias.stride(1),
        HAS_BIAS=bias is not None,
        SOURCE=source.kind,
        EVEN_N=out_size % tiles.block_n == 0,
        EVEN_K=in_size % tiles.block_k == 0,
        **dot_arguments(_grouped_gemm_kernel, rows, tiles),
    )
    return out


@triton.jit(do_not_specialize=["num_rows"])
def _zero_tail_kernel(
    out_ptr, expert_offsets_ptr, num_rows, num_experts, out_size,
    BLOCK_R: tl.constexpr, BLOCK_N: tl.constexpr,
):  # fmt: skip
    """Program (i, j) zeroes its tile's rows from ``expert_offsets[E]`` on.

    Example: offsets [0, 2] of three rows: row 2 becomes 0.
    """
    rows = tl.program_id(0) * BLOCK_R + tl.arange(0, BLOCK_R)
    cols = tl.program_id(1) * BLOCK_N + tl.arange(0, BLOCK_N)
    is_tail = (rows >= tl.load(expert_offsets_ptr + num_experts)) & (rows < num_rows)
    ptrs = out_ptr + rows.to(tl.int64)[:, None] * out_size + cols[None, :]
    zeros = tl.zeros((BLOCK_R, BLOCK_N), out_ptr.dtype.element_ty)
    tl.store(ptrs, zeros, mask=is_tail[:, None] & (cols < out_size)[None, :])


def grouped_gemm(
    rows: Tensor,
    weight: Tensor,
    expert_offsets: Tensor,
    *,
    bias: Tensor | None = None,
    is_transposed: bool = False,
    tiles: TileConfig | None = None,
) -> Tensor:
    """``out[r] = rows[r] @ weight[e].T (+ bias[e])`` for every row r of expert e.

    Args:
        rows: ``[R, in]`` in expert-sorted order, any strides.
        weight: ``[E, out, in]``, or ``[E, in, out]`` if ``is_transposed``; any strides.
        expert_offsets: ``[E + 1]`` int32, exclusive.
        bias: ``[E, out]`` or ``None``.
        is_transposed: how ``weight`` is stored.
        tiles: how to cut the work; ``None`` lets :func:`default_tiles` choose.

    Returns:
        ``[R, out]`` in the dtype of ``rows``; rows from ``expert_offsets[E]`` on are 0.

    Raises:
        ShapeError: ``expert_offsets`` is not ``[E + 1]``, or the contracted sizes differ.
        DtypeError: the operands are not all bf16, all fp16 or all fp32.

    Example:
        rows [[1, 2], [3, 4]], weights [[1, 1]] and [[1, -1]], offsets [0, 1, 2]: [[3], [-1]].
    """
    name = "grouped_gemm"
    num_experts = weight.shape[0]
    check_operands(name, rows=rows, weight=weight, bias=bias)
    remedy = "Did you pass expert_counts? Build it with Permutation.from_expert_ids."
    check_shape(name, "expert_offsets", expert_offsets, ("E + 1",), (num_experts + 1,), remedy)
    in_size = weight.shape[1 if is_transposed else 2]
    require(
        rows.shape[1] == in_size,
        name,
        "rows",
        f"have {in_size} columns, the input size of weight",
        rows.shape[1],
        "Is is_transposed right?",
        error=ShapeError,
    )
    num_rows = rows.shape[0]
    tiles = tiles or default_tiles(
        "down",
        num_rows=num_rows,
        num_experts=num_experts,
        element_bytes=rows.element_size(),
        is_hip=is_hip(),
        is_lean=not are_rows_aligned(*weight.shape[1:], element_bytes=rows.element_size()),
    )
    expert_offsets = expert_offsets.contiguous()
    out = grouped_gemm_forward(
        rows,
        weight,
        expert_offsets,
        tile_schedules(expert_offsets, num_rows),
        bias=bias,
        is_transposed=is_transposed,
        tiles=tiles,
    )
    launch(
        _zero_tail_kernel,
        (triton.cdiv(num_rows, 32), triton.cdiv(out.shape[1], 128)),
        out.device,
        out_ptr=out,
        expert_offsets_ptr=expert_offsets,
        num_rows=num_rows,
        num_experts=num_experts,
        out_size=out.shape[1],
        BLOCK_R=32,
        BLOCK_N=128,
    )
    return out
