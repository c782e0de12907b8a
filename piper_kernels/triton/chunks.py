"""chunks: long experts are cut, and their partial weight gradients added in ascending order.

::

    for each expert e with more than chunk_rows rows, in n chunks:
        out[e] = partials[e, 0] + partials[e, 1] + ... + partials[e, n - 1]

Letters: R num_rows, E num_experts.
"""

from dataclasses import dataclass
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from piper_kernels.cost.ragged import max_chunks
from piper_kernels.triton.launch import launch
from piper_kernels.triton.tile_schedule import chunk_schedule

BLOCK_M = 32
BLOCK_N = 128


@triton.jit
def store_sum(ptrs, acc, mask, ACCUMULATES: tl.constexpr):
    """Store a tile, on top of what is there if asked."""
    if ACCUMULATES:
        acc += tl.load(ptrs, mask=mask, other=0.0).to(tl.float32)
    tl.store(ptrs, acc.to(ptrs.dtype.element_ty), mask=mask)


@triton.jit
def _add_chunks_kernel(
    out_ptr, partials_ptr, chunk_offsets_ptr, out_size, in_size,
    stride_out_e, stride_out_n, stride_out_k,
    ACCUMULATES: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
):  # fmt: skip
    """Program (e, i, j) adds the partial sums of one tile of a long expert in ascending order.

    Example: partials [[1]], [[2]] of expert 0: out [[3]].
    """
    expert = tl.program_id(0)
    first = tl.load(chunk_offsets_ptr + expert)
    end = tl.load(chunk_offsets_ptr + expert + 1)
    if first == end:
        return
    out_cols = (tl.program_id(1) * BLOCK_M + tl.arange(0, BLOCK_M)).to(tl.int64)[:, None]
    in_cols = (tl.program_id(2) * BLOCK_N + tl.arange(0, BLOCK_N)).to(tl.int64)[None, :]
    mask = (out_cols < out_size) & (in_cols < in_size)
    acc = tl.zeros((BLOCK_M, BLOCK_N), tl.float32)
    matrix_size = tl.full((), 1, tl.int64) * out_size * in_size
    ptrs = partials_ptr + first * matrix_size + out_cols * in_size + in_cols
    for _ in range(first, end):
        acc += tl.load(ptrs, mask=mask, other=0.0)
        ptrs += matrix_size
    out_ptr += expert.to(tl.int64) * stride_out_e
    store_sum(out_ptr + out_cols * stride_out_n + in_cols * stride_out_k, acc, mask, ACCUMULATES)


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class Chunks:
    """How the long experts are cut; empty when nothing is cut."""

    num_chunks: int = 0
    chunk_rows: int = 0
    entries: Tensor | None = None
    offsets: Tensor | None = None
    partials: Tensor | None = None


def make_chunks(
    expert_offsets: Tensor, num_rows: int, out: Tensor, split_rows: int | None
) -> Chunks:
    """Schedule and workspace for experts of more than ``split_rows`` rows, if there can be any."""
    if split_rows is None or max_chunks(num_rows, split_rows) == 0:
        return Chunks()
    entries, offsets = chunk_schedule(expert_offsets, num_rows, split_rows)
    partials = out.new_empty(len(entries), *out.shape[1:], dtype=torch.float32)
    return Chunks(
        num_chunks=len(entries),
        chunk_rows=split_rows,
        entries=entries,
        offsets=offsets,
        partials=partials,
    )


def add_chunks(chunks: Chunks, num_experts: int, target: dict[str, Any]) -> None:
    """Add the partial sums of every long expert.

    Args:
        chunks: of the launch that wrote the partial sums.
        num_experts: E.
        target: the output's arguments of that launch: pointers, sizes, strides, ``ACCUMULATES``.
    """
    if chunks.partials is None:
        return
    num_row_tiles = triton.cdiv(target["out_size"], BLOCK_M)
    launch(
        _add_chunks_kernel,
        (num_experts, num_row_tiles, triton.cdiv(target["in_size"], BLOCK_N)),
        chunks.partials.device,
        **target,
        chunk_offsets_ptr=chunks.offsets,
        BLOCK_M=BLOCK_M,
        BLOCK_N=BLOCK_N,
    )
