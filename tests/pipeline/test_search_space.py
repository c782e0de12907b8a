"""Valid meshes: Frontier's published sets, numbers that do not divide, and reasons."""

from collections import Counter
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from piper_kernels.errors import PlanError
from piper_kernels.pipeline.attention_description import GroupedAttention
from piper_kernels.pipeline.model_description import Experts, FeedForward, Layer, ModelDescription
from piper_kernels.pipeline.platform_presets import load_platform
from piper_kernels.pipeline.schedule import SCHEDULES
from piper_kernels.pipeline.search_space import (
    SearchSpace,
    divisors,
    valid_meshes,
    valid_strategies,
)

FRONTIER, H100 = load_platform("frontier"), load_platform("h100")


def family(num_experts: int) -> ModelDescription:
    """The paper's weak-scaling family (papers.md 1.10), 2-matrix experts."""
    network = FeedForward(intermediate_size=20480, num_matrices=2)
    layer = Layer(
        attention=GroupedAttention(num_heads=40, num_kv_heads=40, head_dim=128),
        experts=Experts(num_experts=num_experts, top_k=2, network=network),
    )
    return ModelDescription(
        name="f", family="piper", vocab_size=32000, hidden_size=5120, layers=(layer,) * 32
    )


def meshes(model: ModelDescription, gpus: int, **fixed: int) -> tuple[list, Counter[str]]:
    reasons: Counter[str] = Counter()
    space = SearchSpace(num_gpus=gpus, global_batch=gpus, seq_len=4096, fixed=fixed)
    return list(valid_meshes(model, FRONTIER, space, reasons)), reasons


@pytest.mark.parametrize(
    ("num_experts", "gpus", "expected"),
    [
        (256, 1024, {(32, 32)}),
        (128, 512, {(32, 16), (16, 32)}),
        (16, 64, {(32, 2), (16, 4), (8, 8), (4, 16)}),
    ],
)
def test_valid_meshes_are_pipers_on_frontier(
    num_experts: int, gpus: int, expected: set[tuple[int, int]]
) -> None:
    # papers.md 1.10: the strategy is forced under EP <= 8 * 4, PP <= L, EP | E, dp = tp = 1
    found, _ = meshes(family(num_experts), gpus, dp=1, tp=1)
    assert {(mesh.pp, mesh.ep) for mesh in found} == expected


def test_valid_meshes_say_why_not() -> None:
    _, reasons = meshes(family(16), 64, dp=1, tp=1)
    assert reasons["pp = 64 exceeds the 32 layers"] == 1
    assert reasons["ep = 32 exceeds the 16 experts"] == 1
    _, reasons = meshes(family(256), 64)
    assert any("exceeds the 32 GPUs of a fast domain (4 nodes of 8)" in r for r in reasons)
    assert any("tp = 16 does not divide the 8 GPUs of a node" in r for r in reasons)


@pytest.mark.parametrize("gpus", [6, 7, 16, 24, 60])
def test_valid_meshes_use_what_divides(gpus: int) -> None:
    # field report A87: 60 experts on 16 GPUs, GPUs that do not fill nodes
    found, _ = meshes(family(60), gpus)
    assert found
    for mesh in found:
        assert mesh.pp * mesh.dp * mesh.ep * mesh.tp == gpus
        assert 60 % mesh.ep == 0


@pytest.mark.parametrize(
    ("changes", "match"),
    [
        ({"num_gpus": 0}, "num_gpus must be an integer >= 1, got 0"),
        ({"global_batch": -4}, "global_batch must be an integer >= 1, got -4"),
        ({"seq_len": 1.5}, "seq_len must be an integer >= 1, got 1.5"),
        ({"num_gpus": True}, "num_gpus must be an integer >= 1, got True"),
        ({"schedules": ()}, "schedules must name one at least"),
        (
            {"fixed": {"pp": 3}},
            r"pp must be at least 1 and divide the 8 GPUs, got 3\. Divisors: 1, 2",
        ),
    ],
)
def test_search_space_refuses_impossible_numbers(changes: dict, match: str) -> None:
    fields = {"num_gpus": 8, "global_batch": 8, "seq_len": 128}
    with pytest.raises(PlanError, match=match):
        SearchSpace(**{**fields, **changes})


def test_valid_strategies_need_no_pipeline_schedules_on_one_rank() -> None:
    space = SearchSpace(num_gpus=8, global_batch=8, seq_len=128, fixed={"pp": 1})
    names = {s.schedule for s in valid_strategies(family(16), H100, space, Counter())}
    assert names == {"1f1b"}


def test_valid_strategies_count_batches_that_do_not_divide() -> None:
    space = SearchSpace(num_gpus=8, global_batch=4, seq_len=128, fixed={"pp": 1, "tp": 1})
    reasons: Counter[str] = Counter()
    assert not list(valid_strategies(family(16), H100, space, reasons))
    reason = "global_batch = 4 is no multiple of dp * ep * microbatch_size = 1 * 8 * 1"
    assert reasons[reason] == 1


@given(gpus=st.integers(1, 96), batch=st.integers(1, 64), layers=st.integers(1, 12))
def test_valid_strategies_are_plans(gpus: int, batch: int, layers: int) -> None:
    model = replace(family(24), layers=family(24).layers[:layers])
    space = SearchSpace(num_gpus=gpus, global_batch=batch, seq_len=64, microbatch_sizes=(1, 2))
    for strategy in valid_strategies(model, H100, space, Counter()):
        assert strategy.world_size == gpus
        assert strategy.tokens_per_step == batch * 64
        assert sum(strategy.layers_per_stage) == layers
        assert strategy.schedule in SCHEDULES
        assert strategy.actions.num_ranks == strategy.pp


@given(number=st.integers(1, 20000))
def test_divisors_are_all(number: int) -> None:
    found = divisors(number)
    assert found == sorted(set(found))
    assert all(number % d == 0 for d in found)
    assert len(found) == sum(number % d == 0 for d in range(1, number + 1))
