"""Device functions shared by the GEMMs over expert-sorted rows: find my tile, run the dot loop."""

import triton
import triton.language as tl


@triton.jit
def deal_to_xcds(pid, num_programs, NUM_XCDS: tl.constexpr):
    """Give each chiplet a consecutive run of tiles; the hardware deals programs out in turn.

    Example: 8 programs on 2 chiplets: programs 0, 2, 4, 6 (chiplet 0) take tiles 0, 1, 2, 3.
    """
    share = num_programs // NUM_XCDS
    num_longer = num_programs % NUM_XCDS
    xcd = pid % NUM_XCDS
    return xcd * share + tl.minimum(xcd, num_longer) + pid // NUM_XCDS


@triton.jit
def grouped_order(pid, num_row_tiles, num_col_tiles, GROUP_M: tl.constexpr):
    """``(row tile, column tile)`` of a program: GROUP_M row tiles share a column tile in turn.

    Example: 3 row tiles, 2 column tiles, GROUP_M = 2: (0,0) (1,0) (0,1) (1,1) (2,0) (2,1).
    """
    group_size = GROUP_M * num_col_tiles
    first_tile = pid // group_size * GROUP_M
    num_in_group = tl.minimum(num_row_tiles - first_tile, GROUP_M)
    place = pid % group_size
    return first_tile + place % num_in_group, place // num_in_group


@triton.jit
def find_tile(
    schedule_ptr, num_tiles, num_col_tiles, GROUP_M: tl.constexpr, NUM_XCDS: tl.constexpr
):
    """``(expert, first row, column tile)`` of this program; expert -1 means nothing to do."""
    pid = tl.program_id(0)
    if NUM_XCDS > 1:
        pid = deal_to_xcds(pid, tl.num_programs(0), NUM_XCDS)
    tile, col_tile = grouped_order(pid, num_tiles, num_col_tiles, GROUP_M)
    expert = tl.load(schedule_ptr + 2 * tile)
    first_row = tl.load(schedule_ptr + 2 * tile + 1)
    return expert, first_row, col_tile


@triton.jit
def dot_loop(
    a_ptrs, stride_a_k, weight, stride_w_e, stride_w_n, stride_w_k,
    k_size, expert, cols, is_col, first_col, SOURCE: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr,
    EVEN_N: tl.constexpr, EVEN_K: tl.constexpr,
    USE_UPCAST: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """fp32 ``a @ b``: ``[BLOCK_M, k]`` by the ``[k, BLOCK_N]`` columns of an expert's weight.

    Every row of a must be readable. SOURCE is the kind of a ``WeightSource``. Pointers read
    ``cols`` where ``is_col``. A descriptor reads from ``first_col`` on, and 0 outside of the
    weight; in ``"halves"`` the left half of the tile comes from the first half of N.
    """
    ks = tl.arange(0, BLOCK_K)
    a_step = tl.full((), BLOCK_K, tl.int64) * stride_a_k
    if SOURCE == "pointers":
        b_ptrs = weight + expert.to(tl.int64) * stride_w_e
        b_ptrs += cols.to(tl.int64)[None, :] * stride_w_n + ks.to(tl.int64)[:, None] * stride_w_k
        b_step = tl.full((), BLOCK_K, tl.int64) * stride_w_k
    else:
        expert_coordinate = expert.to(tl.int32)
    acc = tl.zeros((BLOCK_M, BLOCK_N), tl.float32)
    for start in range(0, k_size, BLOCK_K):
        is_k = ks < k_size - start
        a = tl.load(a_ptrs) if EVEN_K else tl.load(a_ptrs, mask=is_k[None, :], other=0.0)
        if SOURCE == "columns":
            box = weight.load([expert_coordinate, start, first_col])
            b = tl.reshape(box, (BLOCK_K, BLOCK_N))
        elif SOURCE == "rows":
            box = weight.load([expert_coordinate, first_col, start])
            b = tl.reshape(box, (BLOCK_N, BLOCK_K)).T
        elif SOURCE == "halves":
            box = weight.load([expert_coordinate, 0, first_col, start])
            b = tl.reshape(box, (BLOCK_N, BLOCK_K)).T
        elif EVEN_K and EVEN_N:
            b = tl.load(b_ptrs)
        elif EVEN_K:
            b = tl.load(b_ptrs, mask=is_col[None, :], other=0.0)
        elif EVEN_N:
            b = tl.load(b_ptrs, mask=is_k[:, None], other=0.0)
        else:
            b = tl.load(b_ptrs, mask=is_k[:, None] & is_col[None, :], other=0.0)
        if USE_UPCAST:
            a = a.to(tl.float32)
            b = b.to(tl.float32)
        acc = tl.dot(a, b, acc, input_precision=PRECISION)
        a_ptrs += a_step
        if SOURCE == "pointers":
            b_ptrs += b_step
    return acc


@triton.jit
def split_halves(tile, BLOCK_M: tl.constexpr, HALF_N: tl.constexpr):
    """``[BLOCK_M, 2 * HALF_N]`` -> its left and its right half."""
    return tl.split(tl.permute(tl.reshape(tile, (BLOCK_M, 2, HALF_N)), (0, 2, 1)))


@triton.jit
def split_pairs(tile, BLOCK_M: tl.constexpr, HALF_N: tl.constexpr):
    """``[BLOCK_M, 2 * HALF_N]`` -> even and odd columns."""
    return tl.split(tl.reshape(tile, (BLOCK_M, HALF_N, 2)))


@triton.jit
def join_pairs(even, odd, BLOCK_M: tl.constexpr, HALF_N: tl.constexpr):
    """The inverse of :func:`split_pairs`."""
    return tl.reshape(tl.join(even, odd), (BLOCK_M, 2 * HALF_N))
