"""One GEMM, and the dtypes that it runs in."""

import torch
from torch import Tensor

# Rows of one piece of work: enough for a GEMM to reach its speed, few enough that several threads
# share one busy expert.
BLOCK_ROWS = 256

# Up to here an fp16 GEMM whose weight is stored row by row reads it once, at the speed of memory.
# Above, and for a weight stored the other way, torch has no fast fp16 kernel on a CPU without
# AVX512-FP16 (measured, Zen 4, torch 2.13: 4 and 20 times slower than by way of fp32).
_MAX_ROWS_IN_FP16 = 4


def wide_dtype(dtype: torch.dtype) -> torch.dtype:
    """The dtype of sums and of activation arithmetic: at least fp32."""
    return torch.promote_types(dtype, torch.float32)


def matmul_into(out: Tensor, left: Tensor, right: Tensor) -> None:
    """``out[...] = left @ right``, without a temporary where the CPU multiplies this dtype fast.

    Args:
        out: ``[m, n]``, any strides.
        left: ``[m, k]``, any strides, out's dtype.
        right: ``[k, n]``, any strides, out's dtype.
    """
    is_fast = left.shape[0] <= _MAX_ROWS_IN_FP16 and right.stride(0) == 1
    if out.dtype == torch.float16 and not is_fast:
        out.copy_(torch.mm(left.float(), right.float()))
    else:
        torch.mm(left, right, out=out)
