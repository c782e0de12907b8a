"""Which strategies exist for a model on a number of GPUs, and why the others do not.

Pure: no torch, no process group. Letters: E num_experts.
"""

import itertools
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field

from piper_kernels.errors import PlanError, require
from piper_kernels.pipeline.memory_settings import Checkpointing, OptimizerKind
from piper_kernels.pipeline.model_description import ModelDescription
from piper_kernels.pipeline.plan import split_layers
from piper_kernels.pipeline.platform import Platform
from piper_kernels.pipeline.schedule import (
    SCHEDULES,
    ScheduleName,
    stages_per_rank,
    why_impossible,
)
from piper_kernels.pipeline.strategy import Strategy

MICROBATCH_SIZES = (1, 2, 4, 8)
CHECKPOINTING: tuple[Checkpointing, ...] = ("none", "selective", "full")


@dataclass(frozen=True, kw_only=True, slots=True)
class SearchSpace:
    """What is searched.

    Attributes:
        num_gpus: all of them are used.
        global_batch: sequences of one optimizer step.
        seq_len: tokens in a sequence.
        microbatch_sizes: tried.
        schedules: tried.
        checkpointing: tried.
        optimizer: its kind.
        is_optimizer_sharded: whether replicas share its state.
        fixed: sizes of mesh axes that are given, e.g. ``{"pp": 4}``.
    """

    num_gpus: int
    global_batch: int
    seq_len: int
    microbatch_sizes: tuple[int, ...] = MICROBATCH_SIZES
    schedules: tuple[ScheduleName, ...] = SCHEDULES
    checkpointing: tuple[Checkpointing, ...] = CHECKPOINTING
    optimizer: OptimizerKind = "adamw"
    is_optimizer_sharded: bool = True
    fixed: dict[str, int] = field(default_factory=dict)

    def __post_init__(self) -> None:
        for name in ("num_gpus", "global_batch", "seq_len"):
            value = getattr(self, name)
            is_int = isinstance(value, int) and not isinstance(value, bool)
            fits = is_int and value >= 1
            require(fits, "plan", name, "be an integer >= 1", repr(value), error=PlanError)
        for name in ("microbatch_sizes", "schedules", "checkpointing"):
            given = getattr(self, name)
            require(bool(given), "plan", name, "name one at least", given, error=PlanError)
        for axis, size in self.fixed.items():
            requirement = f"be at least 1 and divide the {self.num_gpus} GPUs"
            fits = size >= 1 and self.num_gpus % size == 0
            remedy = f"Divisors: {', '.join(map(str, divisors(self.num_gpus)))}."
            require(fits, "plan", axis, requirement, size, remedy, error=PlanError)


def divisors(number: int) -> list[int]:
    """All divisors, rising.

    Example:
        >>> divisors(12)
        [1, 2, 3, 4, 6, 12]
    """
    small = [d for d in range(1, int(number**0.5) + 1) if number % d == 0]
    return sorted({*small, *(number // d for d in small)})


@dataclass(frozen=True, kw_only=True, slots=True)
class MeshSizes:
    """Sizes of the four axes."""

    pp: int
    dp: int
    ep: int
    tp: int


def why_not(model: ModelDescription, platform: Platform, mesh: MeshSizes) -> str:
    """Why a mesh is not tried; empty if it is.

    Source: papers.md 1.4 (EP divides E, PP <= layers, EP inside a fast domain), and what tensor
    parallelism can cut.
    """
    num_experts, per_node = model.num_experts, platform.gpus_per_node
    if mesh.pp > model.num_layers:
        return f"pp = {mesh.pp} exceeds the {model.num_layers} layers"
    if mesh.ep > max(num_experts, 1):
        return f"ep = {mesh.ep} exceeds the {num_experts} experts"
    if any(one.experts and one.experts.num_experts % mesh.ep for one in model.layers):
        return f"ep = {mesh.ep} does not divide the {num_experts} experts"
    if mesh.ep > 1 and mesh.ep * mesh.tp > platform.gpus_per_domain:
        return (
            f"ep * tp = {mesh.ep * mesh.tp} exceeds the {platform.gpus_per_domain} GPUs of a fast "
            f"domain ({platform.nodes_per_domain} nodes of {per_node})"
        )
    if mesh.tp > 1 and per_node % mesh.tp:
        return f"tp = {mesh.tp} does not divide the {per_node} GPUs of a node"
    for heads in sorted({layer.attention.num_heads for layer in model.layers}):
        if heads % mesh.tp:
            return f"tp = {mesh.tp} does not divide the {heads} heads"
    for size in sorted(_widths(model)):
        if size % mesh.tp:
            return f"tp = {mesh.tp} does not divide the width {size} of a network"
    return ""


def _widths(model: ModelDescription) -> set[int]:
    networks = [one.dense for one in model.layers if one.dense]
    networks += [one.experts.network for one in model.layers if one.experts]
    return {network.intermediate_size for network in networks}


def valid_meshes(
    model: ModelDescription, platform: Platform, space: SearchSpace, reasons: Counter[str]
) -> Iterator[MeshSizes]:
    """Every way of giving all GPUs to four axes that passes :func:`why_not`.

    Args:
        model: to train.
        platform: to run on.
        space: of the search.
        reasons: counts why meshes were left out.
    """
    num_gpus, fixed = space.num_gpus, space.fixed
    for pp in divisors(num_gpus):
        for ep in divisors(num_gpus // pp):
            for tp in divisors(num_gpus // (pp * ep)):
                mesh = MeshSizes(pp=pp, dp=num_gpus // (pp * ep * tp), ep=ep, tp=tp)
                if any(getattr(mesh, axis) != size for axis, size in fixed.items()):
                    continue
                reason = why_not(model, platform, mesh)
                if reason:
                    reasons[reason] += 1
                else:
                    yield mesh


def valid_strategies(
    model: ModelDescription, platform: Platform, space: SearchSpace, reasons: Counter[str]
) -> Iterator[Strategy]:
    """Every strategy of the space that can run at all, whether or not it fits; layers split evenly.

    Args:
        model: to train.
        platform: to run on.
        space: of the search.
        reasons: counts why meshes, batches and schedules were left out.
    """
    for mesh in valid_meshes(model, platform, space, reasons):
        replicas = mesh.dp * mesh.ep
        for size in space.microbatch_sizes:
            count, rest = divmod(space.global_batch, replicas * size)
            if rest:
                product = f"dp * ep * microbatch_size = {mesh.dp} * {mesh.ep} * {size}"
                reasons[f"global_batch = {space.global_batch} is no multiple of {product}"] += 1
                continue
            # one rank has no pipeline: all schedules are the same
            names = space.schedules
            if mesh.pp == 1:
                names = ("1f1b",) if "1f1b" in names else names[:1]
            for name, kept in itertools.product(names, space.checkpointing):
                reason = _why_no_schedule(model, name, mesh.pp, count)
                if reason:
                    reasons[reason] += 1
                    continue
                yield Strategy(
                    pp=mesh.pp,
                    dp=mesh.dp,
                    ep=mesh.ep,
                    tp=mesh.tp,
                    schedule=name,
                    num_microbatches=count,
                    microbatch_size=size,
                    seq_len=space.seq_len,
                    layers_per_stage=split_layers(
                        model.num_layers, mesh.pp * stages_per_rank(name)
                    ),
                    checkpointing=kept,
                    optimizer=space.optimizer,
                    is_optimizer_sharded=space.is_optimizer_sharded,
                )


def _why_no_schedule(model: ModelDescription, name: ScheduleName, pp: int, count: int) -> str:
    num_stages = pp * stages_per_rank(name)
    if num_stages > model.num_layers:
        return f"{name} has {num_stages} stages for {model.num_layers} layers"
    return why_impossible(name, pp, count)
