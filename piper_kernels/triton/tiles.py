"""Tiles are data: how a kernel cuts its work, and the heuristic choice. Pure.

Letters: R num_rows, E num_experts, H hidden_size, I intermediate_size.
"""

from dataclasses import dataclass, replace
from typing import Literal

from piper_kernels.errors import require

Op = Literal["gate_up", "down", "grad_act", "grad_x", "wgrad"]
BLOCK_ROWS = (16, 32, 64, 128, 256)
NUM_XCDS_MI300 = 8


@dataclass(frozen=True, kw_only=True, slots=True)
class TileConfig:
    """How one GEMM kernel cuts its work.

    Attributes:
        block_m: rows of a tile: expert rows; in weight gradients, columns of the incoming gradient.
            16, 32, 64, 128 or 256.
        block_n: columns of the output tile. In the gated gate/up GEMM half of them are gates.
        block_k: how much of the contracted dim one step takes; in weight gradients, expert rows.
        num_warps: warps of a program.
        num_stages: depth of the software pipeline.
        group_m: how many row tiles share a column tile before the next column tile begins, so that
            a slab of weights stays in L2. 1: column tiles first, so that each row is read once.
        num_xcds: chiplets among which consecutive programs are dealt out (8 on MI300), else 1.
        split_rows: weight gradients only: an expert with more rows is cut into chunks of so many,
            summed in order. ``None`` never cuts.
    """

    block_m: int
    block_n: int
    block_k: int
    num_warps: int = 4
    num_stages: int = 3
    group_m: int = 8
    num_xcds: int = 1
    split_rows: int | None = None

    def __post_init__(self) -> None:
        name = "TileConfig"
        require(
            self.block_m in BLOCK_ROWS, name, "block_m", f"be one of {BLOCK_ROWS}", self.block_m
        )
        for field in ("block_n", "block_k", "num_warps"):
            value = getattr(self, field)
            lowest = 1 if field == "num_warps" else 16
            is_power = value >= lowest and value & (value - 1) == 0
            require(is_power, name, field, f"be a power of two >= {lowest}", value)
        for field in ("num_stages", "group_m", "num_xcds"):
            require(getattr(self, field) >= 1, name, field, "be >= 1", getattr(self, field))
        require(
            self.split_rows is None or self.split_rows >= self.block_k,
            name,
            "split_rows",
            "be at least block_k, or None",
            self.split_rows,
        )

    def summary(self) -> str:
        """What tells these tiles from others, in a few words.

        Example:
            >>> TileConfig(block_m=64, block_n=128, block_k=32, split_rows=4096).summary()
            '64x128x32, 4 warps, 3 stages, split at 4096 rows'
        """
        split = "" if self.split_rows is None else f", split at {self.split_rows} rows"
        shape = f"{self.block_m}x{self.block_n}x{self.block_k}"
        return f"{shape}, {self.num_warps} warps, {self.num_stages} stages{split}"


@dataclass(frozen=True, kw_only=True, slots=True)
class ExpertsTiles:
    """The tiles of every GEMM of one layer, forward and backward."""

    gate_up: TileConfig
    down: TileConfig
    grad_act: TileConfig
    grad_x: TileConfig
    grad_gate_up: TileConfig
    grad_down: TileConfig


def _rows_per_tile(average_rows: float) -> int:
    """Few rows per expert: the smallest tile that holds them, since weights dominate traffic."""
    if average_rows <= 16:
        return 16
    if average_rows <= 32:
        return 32
    return 64 if average_rows <= 96 else 128


def are_rows_aligned(*sizes: int, element_bytes: int) -> bool:
    """Whether rows of all these sizes are multiples of 16 bytes, so that loads may be that wide.

    Example:
        >>> are_rows_aligned(2048, 768, element_bytes=2), are_rows_aligned(2047, element_bytes=2)
        (True, False)
    """
    return all(size * element_bytes % 16 == 0 for size in sizes)


def default_tiles(
    op: Op,
    *,
    num_rows: int,
    num_experts: int,
    element_bytes: int,
    is_hip: bool = False,
    is_lean: bool = False,
) -> TileConfig:
    """Choose tiles from sizes alone; equal sizes give equal tiles.

    Args:
        op: which GEMM.
        num_rows: R, routed rows; only R / E matters, and only in four steps.
        num_experts: E.
        element_bytes: 2 for bf16 and fp16, 4 for fp32.
        is_hip: AMD GPU.
        is_lean: leave more registers free, because each element has an address of its own (rows
            that are no multiple of 16 bytes) or because an activation is clamped in ``grad_act``.

    Returns:
        A configuration without register spills in 2 bytes on every supported target, in 4 bytes
        within the budget of its target (``piper inspect``).

    Example:
        >>> default_tiles("gate_up", num_rows=8, num_experts=128, element_bytes=2).block_m
        16
    """
    block_m = _rows_per_tile(num_rows / num_experts)
    is_wide = element_bytes == 4
    common = {"num_stages": 2 if is_hip else 3, "num_xcds": NUM_XCDS_MI300 if is_hip else 1}
    if op == "wgrad":
        # loading through an index takes two stages a buffer: five stages are three buffers; on
        # sm_80 three buffers of fp32 cost 8 bytes of stack
        common["num_stages"] = 2 if is_hip else 3 if is_wide else 5
        return TileConfig(
            block_m=64 if is_wide else 128,
            block_n=64 if is_wide else 128,
            block_k=32 if is_wide or is_hip else 64,
            num_warps=4 if is_wide else 8,
            **common,
        )
    if is_lean and is_wide:
        return TileConfig(block_m=min(block_m, 32), block_n=32, block_k=32, group_m=4, **common)
    if is_lean:
        block_m, num_warps = min(block_m, 64), 4 if block_m <= 32 else 8
        return TileConfig(
            block_m=block_m, block_n=64, block_k=32, num_warps=num_warps, group_m=4, **common
        )
    if block_m <= 32:
        # fp32 operands wait in registers for the CUDA cores: 32x64x64 spills
        block_k = (64 if block_m == 16 else 32) if is_wide else 128
        return TileConfig(block_m=block_m, block_n=64, block_k=block_k, group_m=1, **common)
    if is_wide:
        return TileConfig(block_m=64, block_n=64, block_k=32, num_warps=4, **common)
    block_n = 64 if op == "grad_act" or block_m == 64 else 128
    return TileConfig(
        block_m=block_m,
        block_n=block_n,
        block_k=64,
        num_warps=8 if block_m == 128 else 4,
        group_m=4 if is_hip else 8,
        **common,
    )


# an expert whose output has this many tiles fills a GPU by itself
TILES_THAT_FILL_A_GPU = 128
MIN_SPLIT_ROWS = 4096
MAX_CHUNKS = 16


def default_split_rows(num_rows: int, num_output_tiles: int) -> int | None:
    """Rows of a chunk of a long expert's weight gradient, or ``None`` if cutting cannot help.

    Args:
        num_rows: R.
        num_output_tiles: tiles of one expert's gradient.

    Example:
        >>> default_split_rows(1 << 20, 64), default_split_rows(1 << 20, 192)
        (65536, None)
    """
    if num_output_tiles >= TILES_THAT_FILL_A_GPU or num_rows <= MIN_SPLIT_ROWS:
        return None
    return max(MIN_SPLIT_ROWS, 1 << (num_rows // MAX_CHUNKS - 1).bit_length())


def default_experts_tiles(
    *,
    num_rows: int,
    num_experts: int,
    sizes: tuple[int, int, int],
    element_bytes: int,
    is_hip: bool = False,
    has_clamp: bool = False,
) -> ExpertsTiles:
    """Tiles for every GEMM of a layer.

    Args:
        num_rows: R.
        num_experts: E.
        sizes: ``(H, I, width of the pre-activation)``.
        element_bytes: 2 or 4.
        is_hip: AMD GPU.
        has_clamp: the activation has a limit.
    """
    hidden_size, intermediate_size, preact_size = sizes
    is_aligned = are_rows_aligned(hidden_size, intermediate_size, element_bytes=element_bytes)

    def choose(op: Op) -> TileConfig:
        return default_tiles(
            op,
            num_rows=num_rows,
            num_experts=num_experts,
            element_bytes=element_bytes,
            is_hip=is_hip,
            is_lean=not is_aligned or (has_clamp and op == "grad_act"),
        )

    def choose_wgrad(out_size: int, in_size: int) -> TileConfig:
        tiles = choose("wgrad")
        num_tiles = -(-out_size // tiles.block_m) * -(-in_size // tiles.block_n)
        return replace(tiles, split_rows=default_split_rows(num_rows, num_tiles))

    return ExpertsTiles(
        gate_up=choose("gate_up"),
        down=choose("down"),
        grad_act=choose("grad_act"),
        grad_x=choose("grad_x"),
        grad_gate_up=choose_wgrad(preact_size, hidden_size),
        grad_down=choose_wgrad(hidden_size, intermediate_size),
    )
