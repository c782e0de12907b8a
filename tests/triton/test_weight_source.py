"""Weights through descriptors give the bits of weights through pointers, wherever they may be."""

from collections.abc import Iterator
from dataclasses import fields, replace
from typing import Any

import pytest
import torch
from torch import Tensor

from piper_kernels.config import WeightLayout
from piper_kernels.contracts import ExpertsNeeds
from piper_kernels.testing import (
    ExpertsInputs,
    assert_experts_match_oracle,
    guard_with_nan,
    make_experts_inputs,
)
from piper_kernels.triton.device_traits import DeviceTraits, assume_traits
from piper_kernels.triton.experts import experts_backward, experts_forward
from piper_kernels.triton.grouped_gemm import grouped_gemm
from piper_kernels.triton.launch import recorded_launches
from piper_kernels.triton.tiles import ExpertsTiles, TileConfig
from piper_kernels.triton.weight_source import weight_source

GRADS = ("x", "gates", "gate_up_proj", "down_proj", "gate_up_bias", "down_bias")
NEEDS_ALL = ExpertsNeeds(**dict.fromkeys(GRADS, True))
# neither size is a multiple of a tile, both of 16 bytes
SIZES = (37, 40, 24, 5, 2)  # T, H, I, E, K
SMALL = TileConfig(block_m=32, block_n=32, block_k=16, group_m=2)
TILES = {
    "default": None,
    "small": ExpertsTiles(**{field.name: SMALL for field in fields(ExpertsTiles)}),
}
# layout -> how gate_up, down, grad_act and grad_x read their weights
LAYOUTS = {
    "halves": (WeightLayout(), ["halves", "rows", "columns", "columns"]),
    "halves_transposed": (
        WeightLayout(is_transposed=True),
        ["pointers", "columns", "rows", "rows"],
    ),
    "interleaved": (WeightLayout(is_interleaved=True), ["rows", "rows", "columns", "columns"]),
    "interleaved_transposed": (
        WeightLayout(is_interleaved=True, is_transposed=True),
        ["columns", "columns", "rows", "rows"],
    ),
    "ungated": (WeightLayout(is_gated=False), ["rows", "rows", "columns", "columns"]),
    "ungated_transposed": (
        WeightLayout(is_gated=False, is_transposed=True),
        ["columns", "columns", "rows", "rows"],
    ),
}


@pytest.fixture
def _descriptors() -> Iterator[None]:
    with assume_traits(DeviceTraits(has_descriptors=True, has_tf32=True)):
        yield


def run(inputs: ExpertsInputs, tiles: ExpertsTiles | None) -> tuple[dict[str, Tensor], list[str]]:
    """Output and gradients, and the source of each GEMM that reads weights, in launch order."""
    guarded = inputs.map(lambda name, t: t if name == "gates" else guard_with_nan(t))
    args = guarded.x, guarded.gates, guarded.permutation, guarded.weights
    with recorded_launches() as launches:
        y, preact = experts_forward(*args, needs_preact=True, tiles=tiles)
        grads = experts_backward(guarded.grad_y, *args, preact, needs=NEEDS_ALL, tiles=tiles)
    sources = [one.arguments["SOURCE"] for one in launches if "SOURCE" in one.arguments]
    return {"y": y} | {name: getattr(grads, name) for name in GRADS}, sources


def make_inputs(sizes: tuple[int, int, int, int, int] = SIZES, **options: Any) -> ExpertsInputs:
    options = {"routing": "skewed", "has_gate_up_bias": True, "has_down_bias": True} | options
    return make_experts_inputs(*sizes, **options)


@pytest.mark.parametrize("tiles", TILES)
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
@pytest.mark.parametrize("layout", LAYOUTS)
def test_described_experts_every_layout(layout: str, dtype: torch.dtype, tiles: str) -> None:
    weight_layout, sources = LAYOUTS[layout]
    inputs = make_inputs(layout=weight_layout, dtype=dtype)
    by_pointers, all_pointers = run(inputs, TILES[tiles])
    with assume_traits(DeviceTraits(has_descriptors=True, has_tf32=True)):
        found, used = run(inputs, TILES[tiles])
    assert (used, all_pointers) == (sources, ["pointers"] * 4)
    slack = 8.0 if dtype == torch.bfloat16 else 4.0  # the interpreter truncates to bf16
    assert_experts_match_oracle(found, inputs, slack=slack)
    for name, value in found.items():
        assert torch.equal(value, by_pointers[name]), name


# rows of no multiple of 16 bytes, and fp32, whose operands the CUDA cores want in registers
@pytest.mark.parametrize(
    ("sizes", "dtype"),
    [((9, 33, 21, 3, 2), torch.bfloat16), (SIZES, torch.float32)],
    ids=["odd", "fp32"],
)
@pytest.mark.usefixtures("_descriptors")
def test_experts_keep_pointers_where_descriptors_cannot(
    sizes: tuple[int, int, int, int, int], dtype: torch.dtype
) -> None:
    inputs = make_inputs(sizes, dtype=dtype)
    found, used = run(inputs, None)
    assert used == ["pointers"] * 4
    assert_experts_match_oracle(found, inputs, slack=8.0 if dtype == torch.bfloat16 else 4.0)


# I is odd in 16-byte steps while H is not: each GEMM chooses for itself
@pytest.mark.usefixtures("_descriptors")
def test_experts_each_gemm_chooses_for_itself() -> None:
    inputs = make_inputs((9, 32, 20, 3, 2), dtype=torch.float16)
    found, used = run(inputs, None)
    assert used == ["halves", "pointers", "pointers", "columns"]
    assert_experts_match_oracle(found, inputs)


# experts that follow a hole in memory, and views whose first element is not aligned
@pytest.mark.usefixtures("_descriptors")
def test_described_experts_of_packed_views() -> None:
    inputs = make_inputs(dtype=torch.float16)

    def view(tensor: Tensor, skipped: int) -> Tensor:
        packed = torch.full((tensor.shape[0], tensor[0].numel() + 16), torch.nan).half()
        rows = packed[:, skipped : skipped + tensor[0].numel()]
        return rows.copy_(tensor.flatten(1)).unflatten(1, tensor.shape[1:])

    for skipped, kinds in ((8, LAYOUTS["halves"][1]), (4, ["pointers"] * 4)):
        views = {
            name: view(getattr(inputs.weights, name), skipped)
            for name in ("gate_up_proj", "down_proj")
        }
        changed = replace(inputs, **views)
        args = changed.x, changed.gates, changed.permutation, changed.weights
        with recorded_launches() as launches:
            y, preact = experts_forward(*args, needs_preact=True)
            grads = experts_backward(inputs.grad_y, *args, preact, needs=NEEDS_ALL)
        used = [one.arguments["SOURCE"] for one in launches if "SOURCE" in one.arguments]
        assert used == kinds
        found = {"y": y} | {name: getattr(grads, name) for name in GRADS}
        assert_experts_match_oracle(found, inputs)


@pytest.mark.parametrize("is_transposed", [False, True])
@pytest.mark.usefixtures("_descriptors")
def test_described_grouped_gemm(is_transposed: bool) -> None:
    offsets = torch.tensor([0, 0, 21, 22, 62], dtype=torch.int32)
    rows, weight = torch.randn(70, 72).half(), torch.randn(4, 24, 72).half() / 9
    matrix = weight.mT.contiguous() if is_transposed else weight
    tiles = TileConfig(block_m=16, block_n=64, block_k=32)
    found = [
        grouped_gemm(
            guard_with_nan(rows),
            guard_with_nan(matrix),
            offsets,
            is_transposed=is_transposed,
            tiles=tiles,
        )
    ]
    with assume_traits(DeviceTraits(has_descriptors=False, has_tf32=True)):
        found.append(grouped_gemm(rows, weight, offsets, tiles=tiles))
    assert torch.equal(found[0], found[1])


@pytest.mark.usefixtures("_descriptors")
def test_weight_source_says_when_it_cannot() -> None:
    def kind(weight: Tensor, block_n: int = 64, block_k: int = 32, **options: bool) -> str:
        return weight_source(weight, block_n, block_k, **options).kind

    def meta(*shape: int, dtype: torch.dtype = torch.bfloat16) -> Tensor:
        return torch.empty(shape, dtype=dtype, device="meta")

    assert kind(meta(3, 64, 32)) == "rows"
    assert kind(meta(3, 32, 64).mT) == "columns"
    assert kind(meta(3, 64, 32), has_halves=True) == "halves"
    pointers = {
        "halves of a row": (meta(3, 32, 64).mT, {"has_halves": True}),
        "fp32": (meta(3, 64, 32, dtype=torch.float32), {}),
        "no expert": (meta(0, 64, 32), {}),
        "an odd row": (meta(3, 64, 33), {}),
        "an odd column": (meta(3, 32, 33).mT, {}),
        "no contiguous dim": (meta(3, 64, 32, 2)[..., 0], {}),
        "one expert for all": (meta(64, 32).expand(3, 64, 32), {}),
        "a step of a terabyte": (meta(2, 64, 32).as_strided((2, 64, 32), (1 << 39, 32, 1)), {}),
    }
    assert {name: kind(weight, **options) for name, (weight, options) in pointers.items()} == (
        dict.fromkeys(pointers, "pointers")
    )
    assert kind(meta(3, 1024, 32), block_n=512) == "pointers"
    described = weight_source(meta(3, 128, 32), 64, 16, has_halves=True).weight
    assert not isinstance(described, Tensor)
    assert (described.shape, described.strides) == ([3, 2, 64, 32], [4096, 2048, 32, 1])
    assert described.block_shape == [1, 2, 32, 16]
