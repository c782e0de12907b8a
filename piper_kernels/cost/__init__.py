"""FLOPs and bytes of every op as pure functions of its sizes: no torch, no device.

`plan` says what an op has to move at least and is used wherever something is planned. The ledger
says what each launch of `piper_kernels.triton` does move: *issued*, *compulsory* and *modelled
DRAM* bytes (`traffic`), exact for a given routing (`ragged`), for the GEMMs (`gemm`, `wgrad`), the
launches without one (`moves`), a whole layer (`layer`), and the unfused layer that Piper is
compared with (`unfused`).
"""

from piper_kernels.cost.plan import (
    experts_backward_cost,
    experts_backward_launches,
    experts_forward_cost,
    experts_forward_launches,
    grouped_gemm_cost,
    grouped_gemm_wgrad_cost,
    permute_cost,
    route_cost,
    unpermute_cost,
)
from piper_kernels.cost.sizes import Cost, ExpertsSizes, expected_hit_experts

__all__ = [
    "Cost",
    "ExpertsSizes",
    "expected_hit_experts",
    "experts_backward_cost",
    "experts_backward_launches",
    "experts_forward_cost",
    "experts_forward_launches",
    "grouped_gemm_cost",
    "grouped_gemm_wgrad_cost",
    "permute_cost",
    "route_cost",
    "unpermute_cost",
]
