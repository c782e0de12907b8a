"""Shipped tiles are distinct, fit the memory, and always hold the default."""

from itertools import product
from typing import get_args

import pytest

from piper_kernels.triton.candidates import (
    SHARED_MEMORY_BYTES,
    candidate_tiles,
    shared_memory_bytes,
    shipped_tiles,
)
from piper_kernels.triton.tiles import Op, TileConfig, default_tiles

OPS = get_args(Op)
ROWS = (1, 17, 40, 100_000)


@pytest.mark.parametrize("op", OPS)
@pytest.mark.parametrize("element_bytes", [2, 4])
@pytest.mark.parametrize("target", SHARED_MEMORY_BYTES)
def test_candidate_tiles_hold_the_default_and_fit(op: Op, element_bytes: int, target: str) -> None:
    is_hip, limit = target.startswith("gfx"), SHARED_MEMORY_BYTES[target]
    shipped = shipped_tiles(op, element_bytes=element_bytes, target=target)
    assert len(set(shipped)) == len(shipped)
    for num_rows in ROWS:
        sizes = {"num_rows": num_rows, "num_experts": 1, "element_bytes": element_bytes}
        found = candidate_tiles(op, **sizes, is_hip=is_hip, memory_bytes=limit)
        assert found[0] == default_tiles(op, **sizes, is_hip=is_hip)
        assert len(set(found)) == len(found) >= 2
        assert set(found) <= set(shipped)
        for tiles in found:
            need = shared_memory_bytes(op, tiles, element_bytes=element_bytes, is_hip=is_hip)
            assert need <= limit


def test_candidate_tiles_depend_on_rows_per_expert() -> None:
    for op, rows in product(OPS, ROWS):
        few = candidate_tiles(op, num_rows=rows, num_experts=1, element_bytes=2)
        assert few == candidate_tiles(op, num_rows=7 * rows, num_experts=7, element_bytes=2)


def test_candidate_tiles_without_known_spills() -> None:
    def shapes(op: Op) -> set[tuple[int, int, int]]:
        tiles = shipped_tiles(op, element_bytes=2, target="sm_90")
        return {(tile.block_m, tile.block_n, tile.block_k) for tile in tiles}

    assert (128, 128, 64) in shapes("gate_up") & shapes("down")
    assert (128, 256, 64) not in shapes("gate_up")
    assert (128, 128, 64) not in shapes("grad_act")
    assert (128, 64, 64) in shapes("grad_act")


def test_candidate_tiles_are_pruned_by_memory() -> None:
    sizes = {"num_rows": 1000, "num_experts": 1, "element_bytes": 2}
    few = candidate_tiles("down", **sizes, memory_bytes=100 * 1024)
    most = candidate_tiles("down", **sizes)
    dropped = {(tile.block_m, tile.block_n, tile.num_stages) for tile in set(most) - set(few)}
    assert dropped == {(128, 128, 4)}


# measured: smem of the kernels compiled by Triton 3.9 (facts/kernels.md section 8 and out6)
@pytest.mark.parametrize(
    ("op", "shape", "num_stages", "is_hip", "compiled_bytes"),
    [
        ("gate_up", (128, 128, 64), 3, False, 98304),
        ("grad_act", (128, 64, 64), 3, False, 73728),
        ("gate_up", (16, 64, 128), 3, False, 40960),
        ("wgrad", (128, 128, 64), 5, False, 98816),
        ("grad_act", (16, 64, 128), 2, True, 20480),
    ],
)
def test_shared_memory_bytes_bound_what_was_compiled(
    op: Op, shape: tuple[int, int, int], num_stages: int, is_hip: bool, compiled_bytes: int
) -> None:
    block_m, block_n, block_k = shape
    tiles = TileConfig(block_m=block_m, block_n=block_n, block_k=block_k, num_stages=num_stages)
    estimate = shared_memory_bytes(op, tiles, element_bytes=2, is_hip=is_hip)
    assert compiled_bytes <= estimate
