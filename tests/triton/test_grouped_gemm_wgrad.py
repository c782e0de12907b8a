"""grouped_gemm_wgrad equals the oracle, split or not, added or not; empty experts get zeros."""

import pytest
import torch
from torch import Tensor
from triton.runtime.interpreter import GridExecutor

from piper_kernels.errors import DtypeError, ShapeError
from piper_kernels.reference.grouped_gemm import grouped_gemm_wgrad as reference
from piper_kernels.testing import assert_close_to_baseline, guard_with_nan
from piper_kernels.triton.grouped_gemm_wgrad import grouped_gemm_wgrad
from piper_kernels.triton.tiles import TileConfig

DTYPES = [torch.float32, torch.float16, torch.bfloat16]
TILES = {
    "default": None,
    "whole": TileConfig(block_m=32, block_n=32, block_k=16),
    "split": TileConfig(block_m=32, block_n=64, block_k=16, split_rows=24),
    "split_large": TileConfig(block_m=64, block_n=32, block_k=32, split_rows=50, group_m=1),
}


def offsets_of(*counts: int) -> Tensor:
    return torch.tensor([0, *counts]).cumsum(0).to(torch.int32)


OFFSETS = offsets_of(0, 70, 24, 0, 25, 0)


@pytest.mark.parametrize("tiles", TILES)
@pytest.mark.parametrize("is_transposed", [False, True])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_wgrad_ragged(dtype: torch.dtype, is_transposed: bool, tiles: str) -> None:
    grad_out, rows = torch.randn(125, 40).to(dtype), torch.randn(125, 17).to(dtype)
    out = grouped_gemm_wgrad(
        guard_with_nan(grad_out),
        guard_with_nan(rows),
        OFFSETS,
        is_transposed=is_transposed,
        tiles=TILES[tiles],
    )

    def expected(dtype: torch.dtype) -> Tensor:
        return reference(grad_out.to(dtype), rows.to(dtype), OFFSETS, is_transposed=is_transposed)

    assert out.dtype == dtype
    slack = 8.0 if dtype == torch.bfloat16 else 4.0  # the interpreter truncates to bf16
    assert_close_to_baseline("out", out, expected(dtype), expected(torch.float64), slack=slack)
    assert (out[[0, 3, 5]] == 0).all()


@pytest.mark.parametrize("tiles", ["whole", "split"])
def test_wgrad_accumulates_into_fp32(tiles: str) -> None:
    grad_out, rows = torch.randn(119, 20).half(), torch.randn(119, 24).half()
    before = torch.randn(6, 20, 24)
    out = before.clone()
    result = grouped_gemm_wgrad(
        grad_out, rows, OFFSETS, out=out, accumulate=True, tiles=TILES[tiles]
    )
    assert result is out
    truth = before.double() + reference(grad_out.double(), rows.double(), OFFSETS)
    baseline = before + reference(grad_out.float(), rows.float(), OFFSETS)
    assert_close_to_baseline("out", out, baseline, truth)
    assert torch.equal(out[[0, 3, 5]], before[[0, 3, 5]])


def test_wgrad_writes_only_its_part_of_a_packed_gradient() -> None:
    packed = torch.full((6, 44, 24), 7.0)
    grad_out, rows = torch.randn(119, 20), torch.randn(119, 24)
    grouped_gemm_wgrad(grad_out, rows, OFFSETS, out=packed[:, 20:40])
    assert (packed[:, :20] == 7).all()
    assert (packed[:, 40:] == 7).all()
    assert torch.equal(packed[:, 20:40], grouped_gemm_wgrad(grad_out, rows, OFFSETS))


# A11: the stride fits 32 bits, two times the stride does not
def test_wgrad_offsets_past_int32(monkeypatch: pytest.MonkeyPatch) -> None:
    # the interpreter copies storages back onto themselves, which would touch every page
    monkeypatch.setattr(GridExecutor, "_restore_args_dev", lambda *_: None)
    stride = 2**30 + 64
    torch.use_deterministic_algorithms(False)  # do not fill the gaps with NaN
    storage = torch.empty(2 * stride + 48, dtype=torch.float16)
    torch.use_deterministic_algorithms(True)
    out = storage.as_strided((3, 6, 8), (stride, 8, 1))
    grad_out, rows = torch.randn(9, 6).half(), torch.randn(9, 8).half()
    offsets = offsets_of(4, 0, 5)
    expected = grouped_gemm_wgrad(grad_out, rows, offsets)
    assert torch.equal(grouped_gemm_wgrad(grad_out, rows, offsets, out=out), expected)


def test_wgrad_split_runs_give_equal_bits() -> None:
    grad_out, rows = torch.randn(119, 20), torch.randn(119, 24)
    outs = [grouped_gemm_wgrad(grad_out, rows, OFFSETS, tiles=TILES["split"]) for _ in range(2)]
    assert torch.equal(*outs)


def test_wgrad_of_no_rows_is_zero() -> None:
    out = grouped_gemm_wgrad(torch.empty(0, 3), torch.empty(0, 5), offsets_of(0, 0))
    assert torch.equal(out, torch.zeros(2, 3, 5))


def test_wgrad_example() -> None:
    grad_out, rows = torch.tensor([[3.0]]), torch.tensor([[1.0, 2.0]])
    out = grouped_gemm_wgrad(grad_out, rows, offsets_of(1, 0))
    assert out.tolist() == [[[3.0, 6.0]], [[0.0, 0.0]]]


def test_wgrad_refuses_what_does_not_fit() -> None:
    grad_out, rows = torch.randn(4, 3), torch.randn(4, 5)
    with pytest.raises(ShapeError, match=r"out must have shape \(E, out, in\) = \(2, 3, 5\)"):
        grouped_gemm_wgrad(grad_out, rows, offsets_of(2, 2), out=torch.empty(2, 5, 3))
    with pytest.raises(DtypeError, match="rows must be one of float32, got float16"):
        grouped_gemm_wgrad(grad_out, rows.half(), offsets_of(2, 2))
