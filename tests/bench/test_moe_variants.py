"""Contestants agree with the oracle and leave no trace in one another; roofs count right."""

from dataclasses import replace

import pytest
import torch

from bench.gate import check_outputs
from bench.moe_problem import build_problem
from bench.moe_variants import (
    MAX_ROOF_ROWS,
    PIPER,
    batched_mm_bytes,
    dense_gemm_variant,
    implementation_variant,
    read_weights_variant,
    register_implementations,
)
from bench.oracle import expected_outputs
from bench.shapes import Shape

TINY = Shape(name="tiny", H=32, I=40, E=16, K=2, family="mixtral", source="tests/config.json")


@pytest.fixture(autouse=True)
def _registered() -> None:
    register_implementations()


@pytest.mark.parametrize("dtype", ["fp32", "bf16"])
@pytest.mark.parametrize("family", ["mixtral", "olmoe", "gpt_oss"])
def test_implementation_variant_piper_agrees_with_the_oracle(family: str, dtype: str) -> None:
    problem = build_problem("experts", replace(TINY, family=family), 33, dtype, "skewed")
    expected = expected_outputs(problem, has_gradients=True)
    variant = implementation_variant(problem, "forward_backward", PIPER)
    assert variant.outputs is not None
    outputs = variant.outputs()
    check_outputs(PIPER, outputs, expected, problem.x.dtype)
    assert outputs["grad_gates"].dtype == problem.gates.dtype


def test_implementation_variant_forward_needs_no_gradient() -> None:
    problem = build_problem("experts", TINY, 5, "fp32", "uniform")
    variant = implementation_variant(problem, "forward", PIPER)
    variant.prepare()
    y = variant.run()
    assert isinstance(y, torch.Tensor)
    assert not y.requires_grad
    assert variant.outputs is not None
    assert set(variant.outputs()) == {"y"}


def test_implementation_variant_prepares_alike_for_every_run() -> None:
    problem = build_problem("experts", TINY, 5, "fp32", "uniform")
    eager = implementation_variant(problem, "forward_backward", "eager", max_rounds=1)
    piper = implementation_variant(problem, "forward_backward", PIPER)
    assert eager.max_rounds == 1
    for variant in (piper, eager, piper):
        variant.prepare()
        variant.run()
    # gradients of one run, not the sum of three
    once = problem.module.down_proj.grad.clone()
    piper.prepare()
    piper.run()
    assert torch.equal(problem.module.down_proj.grad, once)


@pytest.mark.parametrize("family", ["mixtral", "gpt_oss"])
@pytest.mark.parametrize("num_tokens", [3, MAX_ROOF_ROWS])
def test_dense_gemm_variant_counts_its_own_flops(family: str, num_tokens: int) -> None:
    problem = build_problem("experts", replace(TINY, family=family), num_tokens, "fp32", "uniform")
    variant, flops = dense_gemm_variant(problem)
    from torch.utils.flop_counter import FlopCounterMode

    with FlopCounterMode(display=False) as counter:
        variant.run()
    assert flops == counter.get_total_flops()
    assert flops == 2 * min(num_tokens * 2, MAX_ROOF_ROWS) * 3 * 32 * 40
    assert variant.outputs is None, "a roof is no contestant"


def test_read_weights_variant_reads_the_experts_that_are_hit() -> None:
    problem = build_problem("experts", TINY, 1, "bf16", "uniform")
    variant, num_bytes = read_weights_variant(problem)
    # one token, K = 2: two experts of three matrices in bf16
    assert num_bytes == 2 * 3 * 32 * 40 * 2
    assert variant.run().item() == 1


def test_batched_mm_bytes_counts_an_expert_for_each_row() -> None:
    problem = build_problem("experts", TINY, 7, "fp32", "uniform")
    assert batched_mm_bytes(problem) == 7 * 2 * 3 * 32 * 40 * 4
