"""The contestants of a MoE case: Piper, Hugging Face's own implementations, and the roofs."""

from collections.abc import Callable, Mapping
from functools import partial
from typing import Literal

import torch
from torch import Tensor
from transformers.integrations.moe import ALL_EXPERTS_FUNCTIONS

from bench.moe_problem import Problem
from bench.oracle import ZERO_EXPERTS, zero_experts
from bench.timing import Variant
from piper_kernels.huggingface import EXPERTS_IMPLEMENTATION, register_experts_function

Mode = Literal["forward", "forward_backward"]

PIPER = EXPERTS_IMPLEMENTATION
DENSE_GEMM = "dense_gemm"
READ_WEIGHTS = "read_weights"
ROOFS = (DENSE_GEMM, READ_WEIGHTS)
# more rows than this change the rate of a dense GEMM no further
MAX_ROOF_ROWS = 4096
# batched_mm copies one expert's weights per row: beyond this it is no contestant
MAX_BATCHED_BYTES = 2**30
# with so few tokens memory, not arithmetic, sets the limit
MAX_DECODE_TOKENS = 16


def register_implementations() -> None:
    """Make ``"piper"``, as users select it, and the oracle's zero experts selectable."""
    register_experts_function()
    ALL_EXPERTS_FUNCTIONS.register(ZERO_EXPERTS, zero_experts)


def gradients(problem: Problem) -> dict[str, Tensor]:
    """The gradients that a backward left, by the names that the oracle uses."""
    module = problem.experts
    found = {
        "grad_x": problem.x.grad,
        "grad_gates": problem.gates.grad,
        "grad_gate_up_proj": module.gate_up_proj.grad,
        "grad_down_proj": module.down_proj.grad,
        "grad_gate_up_bias": getattr(getattr(module, "gate_up_proj_bias", None), "grad", None),
        "grad_down_bias": getattr(getattr(module, "down_proj_bias", None), "grad", None),
    }
    return {name: grad for name, grad in found.items() if grad is not None}


def _outputs(problem: Problem, mode: Mode, implementation: str) -> Mapping[str, Tensor]:
    """Run once for the gate."""
    problem.switch(implementation)
    if mode == "forward":
        with torch.no_grad():
            return {"y": problem.forward()}
    y = problem.forward_backward()
    return {"y": y.detach(), **gradients(problem)}


def implementation_variant(
    problem: Problem, mode: Mode, implementation: str, *, max_rounds: int | None = None
) -> Variant:
    """A registered experts implementation (or ``eager``) as a variant."""
    run: Callable[[], object] = problem.forward_backward
    if mode == "forward":
        run = torch.no_grad()(problem.forward)
    return Variant(
        name=implementation,
        run=run,
        prepare=partial(problem.switch, implementation),
        outputs=partial(_outputs, problem, mode, implementation),
        max_rounds=max_rounds,
    )


def batched_mm_bytes(problem: Problem) -> int:
    """What ``batched_mm`` copies: the weights of one expert for each row."""
    module = problem.experts
    per_expert = module.gate_up_proj[0].nbytes + module.down_proj[0].nbytes
    return int(problem.expert_ids.numel() * per_expert)


def dense_gemm_variant(problem: Problem) -> tuple[Variant, int]:
    """The two GEMMs of a dense layer as wide as one expert, into existing buffers; and its FLOPs.

    As many rows as the case has, up to ``MAX_ROOF_ROWS``: the rate is what is used.
    """
    module = problem.experts
    gate_up, down = module.gate_up_proj.detach()[0], module.down_proj.detach()[0]
    if not problem.family.layout.is_transposed:
        gate_up, down = gate_up.T, down.T
    num_rows = min(problem.expert_ids.numel(), MAX_ROOF_ROWS)
    x = torch.randn(num_rows, gate_up.shape[0]).to(gate_up.dtype)
    act = torch.randn(num_rows, down.shape[0]).to(gate_up.dtype)
    preact = x.new_empty(num_rows, gate_up.shape[1])
    y = x.new_empty(num_rows, down.shape[1])

    def run() -> None:
        torch.mm(x, gate_up, out=preact)
        torch.mm(act, down, out=y)

    flops = 2 * num_rows * (gate_up.numel() + down.numel())
    return Variant(name=DENSE_GEMM, run=run), flops


def read_weights_variant(problem: Problem) -> tuple[Variant, int]:
    """Read as many bytes as the experts that are hit weigh, once; and that number.

    The roof of decode. One buffer and one op, so that no implementation's overhead is part of it.
    """
    module = problem.experts
    per_expert = module.gate_up_proj[0].nbytes + module.down_proj[0].nbytes
    num_bytes = len(problem.expert_ids.unique()) * per_expert
    # int32, whatever the weights are: the reduction then runs at the speed of memory
    buffer = torch.ones(num_bytes // 4, dtype=torch.int32)
    return Variant(name=READ_WEIGHTS, run=partial(torch.amax, buffer)), buffer.nbytes
