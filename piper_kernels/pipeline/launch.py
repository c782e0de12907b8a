"""From a plan and a model's configuration to a runtime: meshes, stages, experts, recomputation."""

from typing import Any

import torch
from torch import nn

from piper_kernels.dist.exchange_group import ExchangeGroup
from piper_kernels.dist.expert_parallel import ExpertParallel
from piper_kernels.dist.mesh import build_mesh
from piper_kernels.dist.mesh_layout import MeshLayout
from piper_kernels.dist.recompute import checkpoint_contexts
from piper_kernels.dist.topology import Topology
from piper_kernels.errors import PlanError, require
from piper_kernels.huggingface.expert_counts import expert_modules
from piper_kernels.pipeline.plan import Plan
from piper_kernels.pipeline.runtime import LossRules, Runtime
from piper_kernels.pipeline.schedule import stage_owners, why_impossible
from piper_kernels.pipeline.stage import StagePlace
from piper_kernels.pipeline.stage_build import build_stage

_NAME = "check_executable"


def check_executable(plan: Plan, *, num_layers: int, num_experts: int, world_size: int) -> None:
    """Raise ``PlanError`` unless this runtime can carry the plan out with these ranks.

    Pure: every rank finds the same, before anything is built.

    Args:
        plan: to be carried out.
        num_layers: of the model.
        num_experts: E.
        world_size: ranks that were started.
    """
    mesh, stages = plan.mesh, len(plan.layers_per_stage)
    remedy = f"Start {plan.world_size} processes, or plan for {world_size}."
    requirement = f"be the {world_size} ranks that were started"
    _must(plan.world_size == world_size, "world_size", requirement, plan.world_size, remedy)
    requirement = f"be at least the plan's {stages} stages"
    remedy = "Plan with fewer pipeline ranks."
    _must(num_layers >= stages, "the model's layers", requirement, num_layers, remedy)
    requirement = f"be the model's {num_layers} layers in all"
    value = f"{plan.num_layers} in {plan.layers_per_stage}"
    remedy = "Plan again for this model."
    _must(plan.num_layers == num_layers, "layers_per_stage", requirement, value, remedy)
    requirement = f"be at most the model's {num_experts} experts"
    _must(mesh.ep <= num_experts, "mesh.ep", requirement, mesh.ep, "Plan with smaller groups.")
    requirement = "be 1: tensor parallelism can be planned, but is not executable here"
    _must(mesh.tp == 1, "mesh.tp", requirement, mesh.tp, "Plan with tp = 1.")
    kind = plan.optimizer.kind
    requirement = "be adamw, sgd or sgd_momentum: 8-bit moments are not executable here"
    _must(kind != "adamw_8bit", "optimizer.kind", requirement, kind, "Plan with adamw.")
    reason = why_impossible(plan.schedule, mesh.pp, plan.num_microbatches)
    if reason:
        raise PlanError(f"{_NAME}: {reason}. Use more microbatches, or gpipe.")


def build_runtime(
    plan: Plan,
    config: Any,
    *,
    seed: int,
    rules: LossRules | None = None,
    experts: str = "piper",
    dtype: torch.dtype = torch.float32,
    device: torch.device | str = "cpu",
    topology: Topology | None = None,
    timeout_s: float | None = None,
) -> Runtime:
    """This rank's stages, with weights drawn from ``seed``, ready to train.

    Every rank of the default process group calls it. Equal seeds give equal weights whatever the
    plan is, and no rank ever holds a layer or an expert that is not its own.

    Args:
        plan: checked by :func:`check_executable`.
        config: of a Hugging Face causal language model.
        seed: of the weights.
        rules: of the loss.
        experts: the experts implementation.
        dtype: of the parameters.
        device: of this rank.
        topology: of all ranks: expert groups stay inside what they fit in, and exchanges other than
            flat know nodes. ``None``: ranks are taken in order, as on one node.
        timeout_s: for one message of an exchange, in seconds.

    Raises:
        PlanError: the plan is for other ranks or another model.
        ConfigError: the model cannot be cut into stages.
    """
    mesh = build_mesh(_layout(plan, topology), torch.device(device).type)
    ep = None
    if plan.mesh.ep > 1:
        group = ExchangeGroup(mesh.ep_group, topology, timeout_s=timeout_s)
        ep = ExpertParallel(group, exchange=plan.exchange.algorithm)
    owners = stage_owners(plan.schedule, plan.mesh.pp, len(plan.layers_per_stage) // plan.mesh.pp)
    stages = []
    for index, layers in enumerate(plan.stage_layers()):
        if owners[index] != mesh.coordinates["pp"]:
            continue
        place = StagePlace(index=index, num_stages=len(plan.layers_per_stage), layers=layers)
        stage = build_stage(
            config, place, seed=seed, experts=experts, dtype=dtype, device=device, ep=ep
        )
        _set_memory_dials(stage.model, plan)
        stages.append(stage)
    return Runtime(plan=plan, mesh=mesh, stages=tuple(stages), rules=rules or LossRules())


def _layout(plan: Plan, topology: Topology | None) -> MeshLayout:
    mesh = plan.mesh
    sizes = {"pp": mesh.pp, "dp": mesh.dp, "ep": mesh.ep, "tp": mesh.tp}
    return MeshLayout(**sizes) if topology is None else MeshLayout.near(topology, **sizes)


def _set_memory_dials(model: nn.Module, plan: Plan) -> None:
    """What is kept and what is computed anew.

    ``selective`` needs nothing: transformers' fused attention recomputes its core by itself.
    """
    for _, module in expert_modules(model).values():
        module.experts_save = plan.experts_save
    if plan.checkpointing == "full":
        # its name before transformers 5.24 was gradient_checkpointing_enable
        old = "gradient_checkpointing_enable"
        enable: Any = getattr(model, "activation_checkpointing_enable", getattr(model, old))
        enable({"use_reentrant": False, "context_fn": checkpoint_contexts})


def _must(fits: bool, argument: str, requirement: str, value: object, remedy: str) -> None:
    require(fits, _NAME, argument, requirement, value, remedy, error=PlanError)
