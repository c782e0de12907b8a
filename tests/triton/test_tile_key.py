"""Keys depend on rows per expert by bucket, and on the activation only where it is computed."""

from dataclasses import replace

import pytest

from piper_kernels.config import WeightLayout
from piper_kernels.triton.tile_key import BUCKET_EDGES, GEMMS, LayerKey, op_of, rows_bucket
from piper_kernels.triton.tiles import default_tiles

KEY = LayerKey(
    dtype="bfloat16",
    num_experts=128,
    hidden_size=2048,
    intermediate_size=768,
    top_k=8,
    layout=WeightLayout(),
    activation="silu",
    rows_per_expert=256,
)


@pytest.mark.parametrize("num_experts", [1, 8, 60])
def test_rows_bucket_rounds_up(num_experts: int) -> None:
    for edge, next_edge in zip(BUCKET_EDGES, (*BUCKET_EDGES[1:], 8192), strict=True):
        assert rows_bucket(edge * num_experts, num_experts) == edge
        assert rows_bucket(edge * num_experts + 1, num_experts) == next_edge
    assert rows_bucket(0, num_experts) == 16


def test_rows_bucket_has_one_default() -> None:
    # or cached and default tiles would change at different numbers of tokens
    for gemm in GEMMS:
        by_bucket: dict[int, set[object]] = {}
        for num_rows in range(1, 600):
            tiles = default_tiles(op_of(gemm), num_rows=num_rows, num_experts=2, element_bytes=2)
            by_bucket.setdefault(rows_bucket(num_rows, 2), set()).add(tiles)
        assert all(len(tiles) == 1 for tiles in by_bucket.values())


def test_text_tells_layers_apart() -> None:
    changes = [
        {"dtype": "float16"},
        {"num_experts": 64},
        {"hidden_size": 1024},
        {"intermediate_size": 512},
        {"top_k": 4},
        {"layout": WeightLayout(is_transposed=True)},
        {"layout": WeightLayout(is_interleaved=True)},
        {"layout": WeightLayout(is_gated=False)},
        {"rows_per_expert": 512},
    ]
    for gemm in GEMMS:
        texts = {replace(KEY, **change).text(gemm) for change in changes} | {KEY.text(gemm)}
        assert len(texts) == len(changes) + 1
    assert len({KEY.text(gemm) for gemm in GEMMS}) == len(GEMMS)


def test_text_names_the_activation_where_it_is_computed() -> None:
    other = replace(KEY, activation="gelu")
    assert [gemm for gemm in GEMMS if KEY.text(gemm) != other.text(gemm)] == ["gate_up", "grad_act"]
