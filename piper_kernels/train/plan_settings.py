"""The settings of a run that follows a plan: what the plan fixes, the user need not say."""

from collections.abc import Mapping
from typing import Any

from piper_kernels.errors import PlanError, require
from piper_kernels.pipeline.plan import Plan


def settings_with_plan(stated: Mapping[str, Any], plan: Plan) -> dict[str, Any]:
    """What the user asked for, with what the plan says of batches and recomputation.

    Args:
        stated: settings by name, as flags and file give them.
        plan: to be followed.

    Raises:
        PlanError: a setting says otherwise than the plan; both numbers are named.

    Example:
        >>> from piper_kernels.pipeline.plan import Mesh
        >>> plan = Plan(model_digest="0" * 32, world_size=2, mesh=Mesh(pp=2),
        ...     layers_per_stage=(1, 1), schedule="1f1b", num_microbatches=4, microbatch_size=2,
        ...     seq_len=64)
        >>> settings_with_plan({"steps": 5}, plan)["batch_size"]
        8
    """
    m, size, replicas = plan.num_microbatches, plan.microbatch_size, plan.mesh.num_replicas
    product = f"{m} microbatches * {size} sequences * {replicas} replicas"
    fixed: dict[str, tuple[Any, str]] = {
        "batch_size": (plan.global_batch, f"be the plan's {product} = {plan.global_batch}"),
        "accumulate": (m * replicas, f"be the plan's {m} microbatches * {replicas} replicas"),
        "sequence_length": (plan.seq_len, f"be the plan's seq_len = {plan.seq_len}"),
        "checkpoint_activations": (
            plan.checkpointing == "full",
            f"follow the plan's checkpointing = {plan.checkpointing}",
        ),
    }
    for name, (value, requirement) in fixed.items():
        given = stated.get(name, value)
        remedy = f"Leave --{name.replace('_', '-')} out, or plan again."
        require(given == value, "train", name, requirement, given, remedy, error=PlanError)
    return {**stated, **{name: value for name, (value, _) in fixed.items()}}
