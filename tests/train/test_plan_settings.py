"""A plan fixes the batch; whoever says otherwise is told both numbers."""

from typing import Any

import pytest

from piper_kernels.errors import PlanError
from piper_kernels.pipeline.plan import Mesh, Plan
from piper_kernels.train.plan_settings import settings_with_plan

PLAN = Plan(
    model_digest="0" * 32,
    world_size=4,
    mesh=Mesh(pp=2, ep=2),
    layers_per_stage=(1, 1),
    schedule="1f1b",
    num_microbatches=3,
    microbatch_size=2,
    seq_len=64,
    checkpointing="full",
)


def test_the_plan_fills_in() -> None:
    assert settings_with_plan({"steps": 7, "batch_size": 12}, PLAN) == {
        "steps": 7,
        "batch_size": 12,
        "accumulate": 6,
        "sequence_length": 64,
        "checkpoint_activations": True,
    }


@pytest.mark.parametrize(
    ("stated", "message"),
    [
        (
            {"batch_size": 16},
            r"be the plan's 3 microbatches \* 2 sequences \* 2 replicas = 12, got 16",
        ),
        ({"accumulate": 4}, r"be the plan's 3 microbatches \* 2 replicas, got 4. Leave --accumul"),
        ({"sequence_length": 8}, "be the plan's seq_len = 64, got 8. Leave --sequence-length out"),
        ({"checkpoint_activations": False}, "follow the plan's checkpointing = full, got False"),
    ],
)
def test_contradictions_are_refused(stated: dict[str, Any], message: str) -> None:
    with pytest.raises(PlanError, match=message):
        settings_with_plan(stated, PLAN)
