"""The tiles that Piper ships: all that tuning may choose from. Pure.

A tile is here only if it compiles without register spills for bf16 and fp16 on every supported
target whose shared memory it fits (``piper inspect`` proves it). Left out because they spill:
gate_up 128x256x64, grad_act 128x128x64 and, on sm_100, grad_act 64x64x64, all with 8 warps.
"""

from piper_kernels.triton.tiles import BLOCK_ROWS, Op, TileConfig, default_tiles

# shared memory that one program may use (CUDA C programming guide, table of compute capabilities;
# AMD CDNA instruction set guides: local data share)
SHARED_MEMORY_BYTES = {
    "sm_80": 163 * 1024,
    "sm_90": 227 * 1024,
    "sm_100": 227 * 1024,
    "gfx90a": 64 * 1024,
    "gfx942": 64 * 1024,
    "gfx950": 160 * 1024,
}
# room for index tiles and for barriers
_SPARE_BYTES = 2048

# block_m -> (block_n, block_k, num_warps) of 2-byte operands
_FEW_ROWS = ((64, 128, 4), (64, 64, 4), (128, 64, 4))
_ROW_SHAPES: dict[int, tuple[tuple[int, int, int], ...]] = {
    16: _FEW_ROWS,
    32: _FEW_ROWS,
    64: ((64, 64, 4), (128, 64, 4), (128, 64, 8)),
    128: ((64, 64, 8), (128, 32, 8), (128, 64, 8)),
}
# each column tile of grad_act holds three values an element: narrow tiles only
_GRAD_ACT_SHAPES: dict[int, tuple[tuple[int, int, int], ...]] = {
    16: ((64, 128, 4), (64, 64, 4)),
    32: ((64, 128, 4), (64, 64, 4)),
    64: ((64, 64, 4),),
    128: ((64, 32, 8), (64, 64, 8)),
}
_WGRAD_SHAPES = ((64, 128, 64, 4), (128, 64, 64, 4), (128, 128, 32, 8), (128, 128, 64, 8))
# fp32 is multiplied on CUDA cores, whose operands wait in registers: small tiles only
_WIDE_SHAPES: dict[int, tuple[tuple[int, int, int], ...]] = {
    16: ((64, 64, 4), (64, 32, 4)),
    32: ((64, 32, 4), (32, 32, 4), (64, 16, 4)),
    64: ((64, 32, 4), (32, 16, 4)),
}
_WIDE_WGRAD_SHAPES = ((32, 64, 32, 4), (64, 64, 32, 4))


def shared_memory_bytes(op: Op, tiles: TileConfig, *, element_bytes: int, is_hip: bool) -> int:
    """An upper estimate of the shared memory of one program.

    Args:
        op: which GEMM.
        tiles: how it is cut.
        element_bytes: of an operand.
        is_hip: AMD GPU, which keeps one buffer in registers.

    Returns:
        Bytes: one pair of operand tiles for each buffer of the software pipeline.

    Example:
        >>> tiles = TileConfig(block_m=128, block_n=128, block_k=64, num_warps=8, num_stages=3)
        >>> shared_memory_bytes("down", tiles, element_bytes=2, is_hip=False)
        100352
    """
    num_buffers = tiles.num_stages
    if op == "wgrad" and not is_hip:
        # a load through an index takes two stages
        num_buffers = (tiles.num_stages + 1) // 2
    pair_bytes = (tiles.block_m + tiles.block_n) * tiles.block_k * element_bytes
    return max(1, num_buffers - is_hip) * pair_bytes + _SPARE_BYTES


def _shapes(op: Op, block_m: int, is_wide: bool) -> list[tuple[int, int, int, int]]:
    """``(block_m, block_n, block_k, num_warps)`` of what is shipped for these rows."""
    if op == "wgrad":
        return list(_WIDE_WGRAD_SHAPES if is_wide else _WGRAD_SHAPES)
    table = _WIDE_SHAPES if is_wide else _GRAD_ACT_SHAPES if op == "grad_act" else _ROW_SHAPES
    return [(block_m, *shape) for shape in table[block_m]]


def _num_stages(op: Op, is_wide: bool, is_hip: bool) -> tuple[int, ...]:
    """Depths of the software pipeline; the weight gradient's index takes part in it."""
    if is_hip:
        return (2,)
    if op == "wgrad":
        return (3,) if is_wide else (3, 5)
    return (3, 4)


def candidate_tiles(
    op: Op,
    *,
    num_rows: int,
    num_experts: int,
    element_bytes: int,
    is_hip: bool = False,
    memory_bytes: int | None = None,
) -> tuple[TileConfig, ...]:
    """What may be the fastest way to cut one GEMM; the default comes first.

    Args:
        op: which GEMM.
        num_rows: R; only R / E matters, and only in four steps.
        num_experts: E.
        element_bytes: 2 for bf16 and fp16, 4 for fp32.
        is_hip: AMD GPU.
        memory_bytes: shared memory that a program may use; ``None``: of the smallest target.

    Returns:
        Distinct tiles that fit the memory: those of the default's row tile and of half of it.

    Example:
        >>> tiles = candidate_tiles("grad_x", num_rows=8, num_experts=8, element_bytes=2)
        >>> len(tiles), {tile.block_m for tile in tiles}
        (6, {16})
    """
    default = default_tiles(
        op, num_rows=num_rows, num_experts=num_experts, element_bytes=element_bytes, is_hip=is_hip
    )
    if memory_bytes is None:
        memory_bytes = SHARED_MEMORY_BYTES["gfx942" if is_hip else "sm_80"]
    stages = _num_stages(op, element_bytes == 4, is_hip)
    row_tiles = [rows for rows in (default.block_m, default.block_m // 2) if rows >= 16]
    found = {default: None}
    for block_m in row_tiles:
        for rows, cols, depth, warps in _shapes(op, block_m, element_bytes == 4):
            for num_stages in stages:
                tiles = TileConfig(
                    block_m=rows,
                    block_n=cols,
                    block_k=depth,
                    num_warps=warps,
                    num_stages=num_stages,
                    group_m=default.group_m,
                    num_xcds=default.num_xcds,
                )
                need = shared_memory_bytes(op, tiles, element_bytes=element_bytes, is_hip=is_hip)
                if need <= memory_bytes:
                    found[tiles] = None
    return tuple(found)


def shipped_tiles(op: Op, *, element_bytes: int, target: str) -> tuple[TileConfig, ...]:
    """Every tile that :func:`candidate_tiles` can give on a target, whatever the sizes.

    Args:
        op: which GEMM.
        element_bytes: 2 or 4.
        target: a name of ``SHARED_MEMORY_BYTES``.

    Returns:
        Distinct tiles, few rows first.

    Example:
        >>> len(shipped_tiles("wgrad", element_bytes=4, target="sm_90"))
        2
    """
    found: dict[TileConfig, None] = {}
    for average_rows in BLOCK_ROWS:
        tiles = candidate_tiles(
            op,
            num_rows=average_rows,
            num_experts=1,
            element_bytes=element_bytes,
            is_hip=target.startswith("gfx"),
            memory_bytes=SHARED_MEMORY_BYTES[target],
        )
        found |= dict.fromkeys(tiles)
    return tuple(found)
