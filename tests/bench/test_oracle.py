"""The restricted oracle equals the full one, and a planted fault does not get past it."""

from dataclasses import replace

import pytest
import torch

from bench.gate import GateError, check_outputs
from bench.moe_problem import Problem, build_problem
from bench.moe_variants import gradients, register_implementations
from bench.oracle import expected_outputs, preact_channels, spread
from bench.shapes import Shape
from piper_kernels.config import WeightLayout
from piper_kernels.reference.experts import experts

TINY = Shape(name="tiny", H=32, I=40, E=16, K=2, family="mixtral", source="tests/config.json")


def full_oracle(problem: Problem) -> dict[str, torch.Tensor]:
    """Output and every gradient in fp64, without any restriction."""
    module = problem.experts
    bias = hasattr(module, "gate_up_proj_bias")
    leaves = {
        "x": problem.x,
        "gates": problem.gates,
        "gate_up_proj": module.gate_up_proj,
        "down_proj": module.down_proj,
        **({"gate_up_bias": module.gate_up_proj_bias} if bias else {}),
        **({"down_bias": module.down_proj_bias} if bias else {}),
    }
    wide = {name: t.detach().double().requires_grad_() for name, t in leaves.items()}
    y = experts(
        expert_ids=problem.expert_ids,
        layout=problem.family.layout,
        activation=problem.family.activation,
        **wide,
    )
    y.backward(problem.grad_y.double())
    grads = {f"grad_{name}": leaf.grad for name, leaf in wide.items()}
    return {"y": y.detach(), **{k: v for k, v in grads.items() if v is not None}}


@pytest.mark.parametrize("routing", ["uniform", "one_expert_empty", "all_to_one"])
@pytest.mark.parametrize("family", ["mixtral", "gpt_oss"])
def test_expected_outputs_equals_the_full_oracle(family: str, routing: str) -> None:
    shape = replace(TINY, family=family)
    problem = build_problem("experts", shape, 11, "fp32", routing)
    full = full_oracle(problem)
    expected = expected_outputs(problem, has_gradients=True)
    seen = set()
    for part in expected:
        torch.testing.assert_close(part.value, full[part.name][part.index], rtol=1e-9, atol=1e-12)
        seen.add(part.name)
    assert seen == set(full)


@pytest.mark.parametrize("implementation", ["eager", "grouped_mm", "batched_mm"])
@pytest.mark.parametrize("dtype", ["fp32", "bf16"])
@pytest.mark.parametrize("family", ["mixtral", "granitemoe", "gpt_oss"])
def test_expected_outputs_passes_hugging_faces_own(
    family: str, dtype: str, implementation: str
) -> None:
    problem = build_problem("experts", replace(TINY, family=family), 33, dtype, "skewed")
    expected = expected_outputs(problem, has_gradients=True)
    problem.switch(implementation)
    outputs = {"y": problem.forward_backward().detach(), **gradients(problem)}
    check_outputs(implementation, outputs, expected, problem.x.dtype)


@pytest.mark.parametrize("family", ["mixtral", "deepseek_v3", "qwen2_moe"])
def test_expected_outputs_of_a_block_adds_its_own_part(family: str) -> None:
    register_implementations()
    shape = replace(TINY, family=family, shared_I=0 if family == "mixtral" else 40)
    problem = build_problem("block", shape, 9, "fp32", "router")
    expected = expected_outputs(problem, has_gradients=True)
    problem.switch("eager")
    outputs = {"y": problem.forward_backward().detach(), **gradients(problem)}
    check_outputs("eager", outputs, expected, torch.float32)
    assert {part.name for part in expected} == {"y", "grad_gate_up_proj", "grad_down_proj"}


@pytest.mark.parametrize(
    "name", ["y", "grad_x", "grad_gates", "grad_gate_up_proj", "grad_down_proj"]
)
def test_expected_outputs_catches_a_planted_fault(name: str) -> None:
    problem = build_problem("experts", TINY, 12, "fp32", "uniform")
    expected = expected_outputs(problem, has_gradients=True)
    problem.switch("grouped_mm")
    outputs = {"y": problem.forward_backward().detach(), **gradients(problem)}
    # the last expert's last row, or the last token: among what is checked whatever the size
    outputs[name] = outputs[name].clone()
    outputs[name][-1] *= 1.01
    with pytest.raises(GateError, match=f"faulty disagrees with the oracle: {name}"):
        check_outputs("faulty", outputs, expected, torch.float32)


def test_spread_takes_both_ends() -> None:
    assert spread(100, 3).tolist() == [0, 50, 99]
    assert spread(2, 8).tolist() == [0, 1]
    assert spread(1, 8).tolist() == [0]


def test_preact_channels_finds_gate_and_up() -> None:
    channels = torch.tensor([0, 2])
    assert preact_channels(channels, 4, WeightLayout()).tolist() == [0, 2, 4, 6]
    interleaved = WeightLayout(is_interleaved=True)
    assert preact_channels(channels, 4, interleaved).tolist() == [0, 1, 4, 5]
    assert preact_channels(channels, 4, WeightLayout(is_gated=False)).tolist() == [0, 2]
