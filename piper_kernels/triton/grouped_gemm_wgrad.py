"""grouped_gemm_wgrad: the weight gradient of a grouped GEMM, one contraction over rows per expert.

::

    for each expert e:
        grad_weight[e] = sum over its rows r of outer(grad_out[r], rows[r])    0 if it has none

Either operand may be gathered through an index while loading. An expert with more than
``tiles.split_rows`` rows is cut into chunks whose fp32 partial sums are added in ascending order,
so one hot expert does not serialise the kernel and equal inputs give equal bits.
Letters: R num_rows, E num_experts, C num_chunks.
"""

from dataclasses import dataclass, replace
from typing import Any

import triton
import triton.language as tl
from torch import Tensor

from piper_kernels.errors import check_dtype, check_shape
from piper_kernels.triton.chunks import add_chunks, make_chunks, store_sum
from piper_kernels.triton.launch import (
    FLOAT_DTYPES,
    check_operands,
    dot_arguments,
    is_hip,
    launch,
)
from piper_kernels.triton.ragged import grouped_order
from piper_kernels.triton.tiles import TileConfig, default_split_rows, default_tiles


@dataclass(frozen=True, slots=True, eq=False)
class RowSource:
    """Row r is ``values[r]``, or ``values[row_to_index[r]]`` if there is an index."""

    values: Tensor
    row_to_index: Tensor | None = None


@triton.jit
def _places(index_ptr, rows, end, HAS_INDEX: tl.constexpr):
    """Where each row lies, gathered if there is an index; place 0 from row ``end`` on."""
    if HAS_INDEX:
        return tl.load(index_ptr + rows, mask=rows < end, other=0).to(tl.int64)
    return tl.where(rows < end, rows, 0).to(tl.int64)


@triton.jit(do_not_specialize=["num_chunks", "chunk_rows"])
def _wgrad_kernel(
    out_ptr, partials_ptr, grad_ptr, rows_ptr, grad_index_ptr, rows_index_ptr,
    chunks_ptr, expert_offsets_ptr, num_chunks, chunk_rows, out_size, in_size,
    stride_grad_r, stride_grad_c, stride_rows_r, stride_rows_c,
    stride_out_e, stride_out_n, stride_out_k,
    GRAD_HAS_INDEX: tl.constexpr, ROWS_HAVE_INDEX: tl.constexpr,
    HAS_CHUNKS: tl.constexpr, ACCUMULATES: tl.constexpr,
    EVEN_M: tl.constexpr, EVEN_N: tl.constexpr,
    USE_UPCAST: tl.constexpr, PRECISION: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr,
    GROUP_M: tl.constexpr, NUM_XCDS: tl.constexpr,
):  # fmt: skip
    """One program sums one output tile over the rows of one expert, or of one chunk of a long one.

    Example: rows [[1, 2]], grad_out [[3]] for expert 0 of 2: out [[[3, 6]], [[0, 0]]].
    """
    # which tile am I; chunks of long experts come first, since they take longest
    num_row_tiles = tl.cdiv(out_size, BLOCK_M)
    num_col_tiles = tl.cdiv(in_size, BLOCK_N)
    pid = tl.program_id(0)
    entry = pid // (num_row_tiles * num_col_tiles)
    row_tile, col_tile = grouped_order(
        pid % (num_row_tiles * num_col_tiles), num_row_tiles, num_col_tiles, GROUP_M
    )

    # which rows
    expert = entry - num_chunks
    is_chunk = expert < 0
    if HAS_CHUNKS:
        chunk_ptr = chunks_ptr + 2 * tl.minimum(entry, num_chunks - 1)
        expert = tl.where(is_chunk, tl.load(chunk_ptr), expert)
        if expert < 0:
            return
    first = tl.load(expert_offsets_ptr + expert)
    end = tl.load(expert_offsets_ptr + expert + 1)
    if HAS_CHUNKS:
        if (end - first > chunk_rows) & (entry >= num_chunks):
            return
        first = tl.where(is_chunk, tl.load(chunk_ptr + 1), first)
        end = tl.where(is_chunk, tl.minimum(end, first + chunk_rows), end)

    out_cols = row_tile * BLOCK_M + tl.arange(0, BLOCK_M)
    in_cols = col_tile * BLOCK_N + tl.arange(0, BLOCK_N)
    is_out_col = (out_cols < out_size)[:, None]
    is_in_col = (in_cols < in_size)[None, :]
    out_cols = out_cols.to(tl.int64)[:, None]
    in_cols = in_cols.to(tl.int64)[None, :]
    grad_cols = grad_ptr + out_cols * stride_grad_c
    rows_cols = rows_ptr + in_cols * stride_rows_c

    # a is loaded transposed rather than transposed by tl.trans, which sm_80 would not pipeline
    acc = tl.zeros((BLOCK_M, BLOCK_N), tl.float32)
    for start in range(first, end, BLOCK_K):
        rows = start + tl.arange(0, BLOCK_K)
        is_row = rows < end
        a_mask = is_row[None, :] if EVEN_M else is_row[None, :] & is_out_col
        b_mask = is_row[:, None] if EVEN_N else is_row[:, None] & is_in_col
        grad_places = _places(grad_index_ptr, rows, end, GRAD_HAS_INDEX)
        rows_places = _places(rows_index_ptr, rows, end, ROWS_HAVE_INDEX)
        a = tl.load(grad_cols + grad_places[None, :] * stride_grad_r, mask=a_mask, other=0.0)
        b = tl.load(rows_cols + rows_places[:, None] * stride_rows_r, mask=b_mask, other=0.0)
        if USE_UPCAST:
            a = a.to(tl.float32)
            b = b.to(tl.float32)
        acc = tl.dot(a, b, acc, input_precision=PRECISION)

    # write back
    mask = is_out_col & is_in_col
    if HAS_CHUNKS:
        partial_rows = entry.to(tl.int64) * out_size + out_cols
        partial_mask = (out_cols < tl.where(is_chunk, out_size, 0)) & is_in_col
        tl.store(partials_ptr + partial_rows * in_size + in_cols, acc, mask=partial_mask)
        mask = (out_cols < tl.where(is_chunk, 0, out_size)) & is_in_col
    out_ptr += expert.to(tl.int64) * stride_out_e
    store_sum(out_ptr + out_cols * stride_out_n + in_cols * stride_out_k, acc, mask, ACCUMULATES)


def weight_grad(
    grad: RowSource,
    rows: RowSource,
    expert_offsets: Tensor,
    num_rows: int,
    *,
    out: Tensor,
    is_transposed: bool,
    accumulate: bool,
    tiles: TileConfig,
) -> Tensor:
    """Write, or add, every expert's weight gradient into ``out`` and return it.

    Args:
        grad: ``[R, out]`` gradient of the GEMM's output, any strides, perhaps gathered.
        rows: ``[R, in]`` input of the GEMM, likewise.
        expert_offsets: ``[E + 1]`` int32, exclusive, contiguous.
        num_rows: R.
        out: ``[E, out, in]``, or ``[E, in, out]`` if ``is_transposed``; any strides and dtype.
        is_transposed: how ``out`` is stored.
        accumulate: add to what ``out`` holds instead of replacing it.
        tiles: how to cut the work.
    """
    num_experts = out.shape[0]
    matrix = out.mT if is_transposed else out
    out_size, in_size = matrix.shape[1:]
    chunks = make_chunks(expert_offsets, num_rows, matrix, tiles.split_rows)
    num_tiles = triton.cdiv(out_size, tiles.block_m) * triton.cdiv(in_size, tiles.block_n)
    target: dict[str, Any] = {
        "out_ptr": matrix,
        "partials_ptr": chunks.partials,
        "out_size": out_size,
        "in_size": in_size,
        "stride_out_e": matrix.stride(0),
        "stride_out_n": matrix.stride(1),
        "stride_out_k": matrix.stride(2),
        "ACCUMULATES": accumulate,
    }
    launch(
        _wgrad_kernel,
        ((chunks.num_chunks + num_experts) * num_tiles,),
        out.device,
        **target,
        grad_ptr=grad.values,
        rows_ptr=rows.values,
        grad_index_ptr=grad.row_to_index,
        rows_index_ptr=rows.row_to_index,
        chunks_ptr=chunks.entries,
        expert_offsets_ptr=expert_offsets,
        num_chunks=chunks.num_chunks,
        chunk_rows=chunks.chunk_rows,
        stride_grad_r=grad.values.stride(0),
        stride_grad_c=grad.values.stride(1),
        stride_rows_r=rows.values.stride(0),
        stride_rows_c=rows.values.stride(1),
        GRAD_HAS_INDEX=grad.row_to_index is not None,
        ROWS_HAVE_INDEX=rows.row_to_index is not None,
        HAS_CHUNKS=chunks.num_chunks > 0,
        EVEN_M=out_size % tiles.block_m == 0,
        EVEN_N=in_size % tiles.block_n == 0,
        **dot_arguments(_wgrad_kernel, grad.values, tiles),
    )
    add_chunks(chunks, num_experts, target)
    return out


def grouped_gemm_wgrad(
    grad_out: Tensor,
    rows: Tensor,
    expert_offsets: Tensor,
    *,
    is_transposed: bool = False,
    out: Tensor | None = None,
    accumulate: bool = False,
    tiles: TileConfig | None = None,
) -> Tensor:
    """``grad_weight[e] = grad_out[rows of e].T @ rows[rows of e]``; exact zeros for empty experts.

    Args:
        grad_out: ``[R, out]``, any strides.
        rows: ``[R, in]``, any strides.
        expert_offsets: ``[E + 1]`` int32, exclusive.
        is_transposed: return ``[E, in, out]`` instead of ``[E, out, in]``.
        out: where to write, in any float dtype; ``None`` allocates in the dtype of ``rows``.
        accumulate: add to ``out`` (which must be given) instead of replacing it.
        tiles: how to cut the work; ``None`` lets :func:`default_tiles` choose.

    Returns:
        ``out``.

    Raises:
        ShapeError: ``out`` has the wrong shape.
        DtypeError: the operands are not all bf16, all fp16 or all fp32.

    Example:
        grad_out [[3]], rows [[1, 2]], offsets [0, 1, 1]: [[[3, 6]], [[0, 0]]].
    """
    name = "grouped_gemm_wgrad"
    check_operands(name, grad_out=grad_out, rows=rows)
    num_experts = expert_offsets.shape[0] - 1
    num_rows, out_size, in_size = rows.shape[0], grad_out.shape[1], rows.shape[1]
    shape = (num_experts, *((in_size, out_size) if is_transposed else (out_size, in_size)))
    if out is None:
        assert not accumulate, "accumulate needs out"
        out = rows.new_empty(shape)
    names = ("E", "in", "out") if is_transposed else ("E", "out", "in")
    check_shape(name, "out", out, names, shape, "Is is_transposed right?")
    check_dtype(name, "out", out, FLOAT_DTYPES)
    if tiles is None:
        tiles = default_tiles(
            "wgrad",
            num_rows=num_rows,
            num_experts=num_experts,
            element_bytes=rows.element_size(),
            is_hip=is_hip(),
        )
        num_tiles = triton.cdiv(out_size, tiles.block_m) * triton.cdiv(in_size, tiles.block_n)
        tiles = replace(tiles, split_rows=default_split_rows(num_rows, num_tiles))
    return weight_grad(
        RowSource(grad_out),
        RowSource(rows),
        expert_offsets.contiguous(),
        num_rows,
        out=out,
        is_transposed=is_transposed,
        accumulate=accumulate,
        tiles=tiles,
    )
