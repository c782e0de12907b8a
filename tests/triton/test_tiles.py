"""Tiles are validated data; the heuristic is pure and depends on R / E, not on R."""

from typing import get_args

import pytest

from piper_kernels.errors import ConfigError
from piper_kernels.triton.tiles import (
    Op,
    TileConfig,
    default_experts_tiles,
    default_split_rows,
    default_tiles,
)


@pytest.mark.parametrize("op", get_args(Op))
@pytest.mark.parametrize("is_hip", [False, True])
def test_default_tiles_depend_on_rows_per_expert(op: Op, is_hip: bool) -> None:
    def choose(num_rows: int, num_experts: int) -> TileConfig:
        return default_tiles(
            op, num_rows=num_rows, num_experts=num_experts, element_bytes=2, is_hip=is_hip
        )

    assert choose(1000, 100) == choose(10, 1)
    if op != "wgrad":
        blocks = [choose(rows, 1).block_m for rows in (1, 16, 17, 32, 33, 96, 97, 100_000)]
        assert blocks == [16, 16, 32, 32, 64, 64, 128, 128]


def test_default_tiles_few_rows_take_column_tiles_first() -> None:
    assert default_tiles("down", num_rows=8, num_experts=8, element_bytes=2).group_m == 1


def test_default_experts_tiles_split_only_small_gradients() -> None:
    small = default_experts_tiles(
        num_rows=1 << 18, num_experts=8, sizes=(256, 128, 256), element_bytes=2
    )
    assert small.grad_gate_up.split_rows == 1 << 14
    qwen3 = default_experts_tiles(
        num_rows=1 << 18, num_experts=128, sizes=(2048, 768, 1536), element_bytes=2
    )
    assert qwen3.grad_gate_up.split_rows is None
    assert qwen3.grad_down.split_rows == 1 << 14


def test_default_split_rows_example() -> None:
    assert default_split_rows(1 << 20, 64) == 65536
    assert default_split_rows(1 << 20, 192) is None
    assert default_split_rows(4096, 1) is None


def test_tile_config_refuses_what_cannot_run() -> None:
    with pytest.raises(
        ConfigError, match=r"block_m must be one of \(16, 32, 64, 128, 256\), got 8"
    ):
        TileConfig(block_m=8, block_n=16, block_k=16)
    with pytest.raises(ConfigError, match="block_n must be a power of two >= 16, got 48"):
        TileConfig(block_m=16, block_n=48, block_k=16)
    with pytest.raises(ConfigError, match="num_stages must be >= 1, got 0"):
        TileConfig(block_m=16, block_n=16, block_k=16, num_stages=0)
    with pytest.raises(ConfigError, match="split_rows must be at least block_k, or None, got 8"):
        TileConfig(block_m=16, block_n=16, block_k=16, split_rows=8)


def test_default_tiles_are_lean_for_unaligned_rows_and_for_clamps() -> None:
    common = {"num_rows": 4096, "num_experts": 8, "element_bytes": 2}
    lean = default_tiles("grad_act", num_rows=512, num_experts=1, element_bytes=2, is_lean=True)
    assert (lean.block_m, lean.block_n, lean.block_k, lean.num_warps) == (64, 64, 32, 8)
    plain = default_experts_tiles(**common, sizes=(64, 48, 96))
    odd = default_experts_tiles(**common, sizes=(64, 47, 94))
    clamped = default_experts_tiles(**common, sizes=(64, 48, 96), has_clamp=True)
    assert odd.gate_up == odd.down == odd.grad_act == odd.grad_x == clamped.grad_act == lean
    assert clamped.gate_up == plain.gate_up != lean
    assert plain.grad_act != lean
    assert odd.grad_down.block_k == plain.grad_down.block_k
