"""Problems are Hugging Face's own modules with the sizes that were asked for."""

from dataclasses import replace

import pytest
import torch

from bench.moe_problem import FAMILIES, build_problem
from bench.shapes import SHAPES, Shape
from piper_kernels.errors import ConfigError

TINY = Shape(name="tiny", H=32, I=8, E=16, K=2, family="mixtral", source="tests/config.json")


def tiny(family: str) -> Shape:
    has_shared = family in {"deepseek_v2", "deepseek_v3", "qwen2_moe"}
    return replace(TINY, family=family, shared_I=16 if has_shared else 0)


@pytest.mark.parametrize("family", FAMILIES)
def test_build_problem_builds_the_familys_experts(family: str) -> None:
    problem = build_problem("experts", tiny(family), 5, "bf16", "uniform")
    up, down = FAMILIES[family].layout.weight_shapes(16, 32, 8)
    assert type(problem.module).__name__ == FAMILIES[family].experts_class
    assert problem.experts.gate_up_proj.shape == up
    assert problem.experts.down_proj.shape == down
    assert problem.experts.gate_up_proj.dtype == torch.bfloat16
    assert problem.x.shape == problem.grad_y.shape == (5, 32)
    assert problem.expert_ids.shape == problem.gates.shape == (5, 2)
    wide = torch.float32 if FAMILIES[family].has_wide_gates else torch.bfloat16
    assert problem.gates.dtype == wide
    assert all(bool(p.isfinite().all()) for p in problem.module.parameters())


@pytest.mark.parametrize("family", FAMILIES)
def test_build_problem_takes_a_blocks_gates_from_its_router(family: str) -> None:
    problem = build_problem("block", tiny(family), 5, "bf16", "router")
    assert type(problem.module).__name__ == FAMILIES[family].block_class
    # the flag that the experts problem uses is the dtype that the router really gives
    wide = torch.float32 if FAMILIES[family].has_wide_gates else torch.bfloat16
    assert problem.gates.dtype == wide
    assert problem.expert_ids.shape == (5, 2)
    problem.switch("eager")
    y = problem.forward()
    assert y.shape == (5, 32)
    assert bool(y.isfinite().all())


@pytest.mark.parametrize(("family", "expected"), [("deepseek_v3", 16), ("qwen2_moe", 16)])
def test_build_problem_gives_a_block_its_shared_experts(family: str, expected: int) -> None:
    module = build_problem("block", tiny(family), 1, "fp32", "router").module
    shared = getattr(module, "shared_experts", None) or module.shared_expert
    assert shared.up_proj.weight.shape == (expected, 32)


def test_build_problem_is_the_same_for_the_same_seed() -> None:
    first = build_problem("experts", TINY, 4, "fp32", "skewed", seed=3)
    second = build_problem("experts", TINY, 4, "fp32", "skewed", seed=3)
    assert torch.equal(first.module.gate_up_proj, second.module.gate_up_proj)
    assert torch.equal(first.x, second.x)
    assert torch.equal(first.expert_ids, second.expert_ids)


def test_switch_selects_an_implementation_and_drops_gradients() -> None:
    problem = build_problem("experts", TINY, 4, "fp32", "uniform")
    problem.switch("eager")
    eager = problem.forward_backward().detach()
    grads = [problem.x.grad, problem.gates.grad, problem.module.down_proj.grad]
    assert all(grad is not None and grad.abs().sum() > 0 for grad in grads)
    problem.switch("grouped_mm")
    assert problem.x.grad is problem.module.down_proj.grad is None
    assert problem.module.config._experts_implementation == "grouped_mm"
    torch.testing.assert_close(problem.forward().detach(), eager)


def test_build_problem_refuses_an_unknown_family() -> None:
    unknown = replace(SHAPES["olmoe_1b_7b"], family="olmo")
    with pytest.raises(ConfigError, match=r"shape.family must be known, got 'olmo'\. .*'olmoe'"):
        build_problem("experts", unknown, 1, "fp32", "uniform")
