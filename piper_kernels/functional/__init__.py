"""Differentiable ops. Each picks triton, cpu or reference and can say why.

An op's name here is the function: ``from piper_kernels.functional import experts``.
"""

from piper_kernels.functional.composed import composed_experts
from piper_kernels.functional.experts import experts
from piper_kernels.functional.explain import explain_experts
from piper_kernels.functional.grouped_gemm import grouped_gemm, grouped_gemm_wgrad
from piper_kernels.functional.permute import permute
from piper_kernels.functional.unpermute import unpermute

__all__ = [
    "composed_experts",
    "experts",
    "explain_experts",
    "grouped_gemm",
    "grouped_gemm_wgrad",
    "permute",
    "unpermute",
]
