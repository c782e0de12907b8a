"""From a plan to stages: what is refused, and what a rank holds."""

import pytest

from piper_kernels.errors import PlanError
from piper_kernels.huggingface.expert_counts import expert_modules, local_expert_ids
from piper_kernels.pipeline.launch import build_runtime, check_executable
from piper_kernels.pipeline.plan import Mesh, Optimizer, Plan
from piper_kernels.testing import run_ranks
from piper_kernels.testing.training import TrainingCase

PLAN = TrainingCase(pp=2, schedule="1f1b", layers=(1, 3)).plan()


def test_check_executable_takes_what_fits() -> None:
    check_executable(PLAN, num_layers=4, num_experts=8, world_size=2)


@pytest.mark.parametrize(
    ("plan", "message"),
    [
        (PLAN.replace(world_size=4, mesh=Mesh(pp=2, dp=2)), "be the 2 ranks .*, got 4. Start 4"),
        (PLAN.replace(layers_per_stage=(1, 1)), r"be the model's 4 layers in all, got 2 in \(1, 1"),
        (PLAN.replace(optimizer=Optimizer(kind="adamw_8bit")), "8-bit moments are not executable"),
    ],
)
def test_check_executable_refuses_with_the_numbers(plan: Plan, message: str) -> None:
    with pytest.raises(PlanError, match=message):
        check_executable(plan, num_layers=4, num_experts=8, world_size=2)


def what_is_held() -> tuple[list[int], list[tuple[int, ...]], int, bool]:
    case = TrainingCase(pp=2, ep=2, schedule="1f1b", layers=(1, 3))
    plan = case.plan().replace(experts_save="x")
    runtime = build_runtime(plan, case.build_config(), seed=0)
    modules = [m for s in runtime.stages for _, m in expert_modules(s.model).values()]
    layers = [n for stage in runtime.stages for n in expert_modules(stage.model)]
    size = sum(p.numel() for module in modules for p in module.parameters())
    is_saved_so = all(module.experts_save == "x" for module in modules)
    runtime.close()
    return layers, [local_expert_ids(module) for module in modules], size, is_saved_so


def test_a_rank_holds_its_layers_and_experts_only() -> None:
    found = run_ranks(what_is_held, 4)
    one_expert = 32 * 24 * 3
    for rank, (layers, experts, size, is_saved_so) in enumerate(found):
        assert layers == ([0] if rank < 2 else [1, 2, 3])
        local = (0, 1, 2, 3) if rank % 2 == 0 else (4, 5, 6, 7)
        assert experts == [local] * len(layers)
        assert size == len(layers) * 4 * one_expert
        assert is_saved_so
