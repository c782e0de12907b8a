"""matmul_into in every dtype, row count and stride."""

import pytest
import torch

from piper_kernels.cpu.gemm import matmul_into, wide_dtype
from piper_kernels.testing import assert_close_to_baseline

DTYPES = [torch.float64, torch.float32, torch.bfloat16, torch.float16]


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("num_rows", [1, 4, 5, 33])
def test_matmul_into(num_rows: int, dtype: torch.dtype) -> None:
    left = torch.randn(num_rows, 17).to(dtype)
    row_major = torch.randn(17, 9).to(dtype)
    truth = left.double() @ row_major.double()
    baseline = left @ row_major
    views = {
        "contiguous": torch.full((num_rows, 9), torch.nan, dtype=dtype),
        "columns": torch.full((num_rows, 20), torch.nan, dtype=dtype)[:, 5:14],
        "transposed": torch.full((9, num_rows), torch.nan, dtype=dtype).t(),
    }
    slack = 64.0 if dtype == torch.float64 else 8.0
    for right in (row_major, row_major.t().contiguous().t()):
        for name, out in views.items():
            matmul_into(out.fill_(torch.nan), left, right)
            assert_close_to_baseline(name, out, baseline, truth, slack=slack)


def test_matmul_into_fp16_sums_in_fp32() -> None:
    # in fp16 itself the sum would stall at 2048
    ones = torch.ones(8, 5000, dtype=torch.float16)
    out = torch.empty(8, 8, dtype=torch.float16)
    matmul_into(out, ones, ones.t())
    assert out.unique().item() == 5000.0


def test_wide_dtype() -> None:
    assert [wide_dtype(dtype) for dtype in DTYPES] == [torch.float64, *[torch.float32] * 3]
