"""grouped_gemm equals the oracle for ragged rows, any layout, any tile, and huge offsets."""

import pytest
import torch
from torch import Tensor
from triton.runtime.interpreter import GridExecutor

from piper_kernels.errors import DtypeError, ShapeError
from piper_kernels.reference import grouped_gemm as reference
from piper_kernels.testing import assert_close_to_baseline, guard_with_nan
from piper_kernels.triton.grouped_gemm import grouped_gemm
from piper_kernels.triton.tiles import TileConfig

DTYPES = [torch.float32, torch.float16, torch.bfloat16]
TILES = {
    "default": None,
    "16x32x16": TileConfig(block_m=16, block_n=32, block_k=16, group_m=1),
    "64x64x32": TileConfig(block_m=64, block_n=64, block_k=32, group_m=3, num_xcds=2),
}


def offsets_of(*counts: int) -> Tensor:
    return torch.tensor([0, *counts]).cumsum(0).to(torch.int32)


@pytest.mark.parametrize("tiles", TILES)
@pytest.mark.parametrize("is_transposed", [False, True])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_grouped_gemm_ragged(dtype: torch.dtype, is_transposed: bool, tiles: str) -> None:
    offsets = offsets_of(0, 21, 1, 0, 40, 0)
    rows = torch.randn(70, 33).to(dtype)  # 8 rows belong to nobody
    weight = (torch.randn(6, 33, 20) if is_transposed else torch.randn(6, 20, 33)).to(dtype) / 6
    bias = torch.randn(6, 20).to(dtype)
    out = grouped_gemm(
        guard_with_nan(rows),
        guard_with_nan(weight),
        offsets,
        bias=guard_with_nan(bias),
        is_transposed=is_transposed,
        tiles=TILES[tiles],
    )

    def expected(*tensors: Tensor) -> Tensor:
        rows, weight, bias = tensors
        return reference.grouped_gemm(rows, weight, offsets, bias=bias, is_transposed=is_transposed)

    truth = expected(rows.double(), weight.double(), bias.double())
    slack = 8.0 if dtype == torch.bfloat16 else 4.0  # the interpreter truncates to bf16
    assert_close_to_baseline("out", out, expected(rows, weight, bias), truth, slack=slack)
    assert (out[62:] == 0).all()


@pytest.mark.parametrize("counts", [(0,), (1,), (0, 0), (3, 0), (0, 130)], ids=str)
def test_grouped_gemm_few_and_many_rows(counts: tuple[int, ...]) -> None:
    offsets = offsets_of(*counts)
    rows, weight = torch.randn(sum(counts), 16), torch.randn(len(counts), 8, 16)
    out = grouped_gemm(rows, weight, offsets)
    truth = reference.grouped_gemm(rows.double(), weight.double(), offsets)
    assert_close_to_baseline("out", out, reference.grouped_gemm(rows, weight, offsets), truth)


# the contraction dim ends inside a block and NaN lies right behind it (A09): equal bits each run
@pytest.mark.parametrize("in_size", [8, 48, 72])
def test_grouped_gemm_contraction_tail_is_masked(in_size: int) -> None:
    offsets = offsets_of(5, 4)
    rows, weight = torch.randn(9, in_size), torch.randn(2, 24, in_size)
    outs = [grouped_gemm(guard_with_nan(rows), guard_with_nan(weight), offsets) for _ in range(3)]
    assert all(torch.equal(out, outs[0]) for out in outs)
    assert torch.equal(outs[0], grouped_gemm(rows, weight, offsets))


def huge(rows: int, stride: int, *tail: int, dtype: torch.dtype) -> Tensor:
    """``[rows, *tail]`` with ``stride`` elements between rows; the gaps take no memory."""
    torch.use_deterministic_algorithms(False)  # do not fill it with NaN
    storage = torch.empty((rows - 1) * stride + torch.Size(tail).numel(), dtype=dtype)
    torch.use_deterministic_algorithms(True)
    return storage.as_strided((rows, *tail), (stride, *torch.empty(tail).stride()))


# A10, A11: the stride fits 32 bits, two times the stride does not
def test_grouped_gemm_offsets_past_int32(monkeypatch: pytest.MonkeyPatch) -> None:
    # the interpreter copies storages back onto themselves, which would touch every page
    monkeypatch.setattr(GridExecutor, "_restore_args_dev", lambda *_: None)
    stride = 2**30 + 64
    offsets = offsets_of(1, 0, 2)
    rows = huge(3, stride, 16, dtype=torch.float16)
    weight = huge(3, stride, 8, 16, dtype=torch.float16)
    small_rows, small_weight = torch.randn(3, 16).half(), torch.randn(3, 8, 16).half()
    rows.copy_(small_rows)
    weight.copy_(small_weight)
    expected = grouped_gemm(small_rows, small_weight, offsets)
    assert torch.equal(grouped_gemm(rows, weight, offsets), expected)


def test_grouped_gemm_example() -> None:
    rows = torch.tensor([[1.0, 2.0], [3.0, 4.0]])
    weight = torch.tensor([[[1.0, 1.0]], [[1.0, -1.0]]])
    assert grouped_gemm(rows, weight, offsets_of(1, 1)).tolist() == [[3.0], [-1.0]]


def test_grouped_gemm_refuses_what_does_not_fit() -> None:
    rows, weight = torch.randn(4, 8), torch.randn(2, 6, 8)
    with pytest.raises(ShapeError, match="Did you pass expert_counts"):
        grouped_gemm(rows, weight, torch.tensor([2, 2], dtype=torch.int32))
    with pytest.raises(ShapeError, match="rows must have 6 columns"):
        grouped_gemm(rows, weight, offsets_of(2, 2), is_transposed=True)
    with pytest.raises(DtypeError, match="weight must be one of float32, got float16"):
        grouped_gemm(rows, weight.half(), offsets_of(2, 2))
