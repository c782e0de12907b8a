"""The plan file: a strategy, complete enough to launch, and what was predicted for it.

The planner writes it, ``piper train`` takes it. Everything that can contradict itself is checked
when a plan is made or read, with the numbers.

Pure: no torch, no process group.
"""

from typing import Any, Literal

from piper_kernels.config import Save
from piper_kernels.dist.halo_phases import Algorithm
from piper_kernels.errors import ConfigError, PlanError, require
from piper_kernels.pipeline.memory_settings import Checkpointing, OptimizerKind
from piper_kernels.pipeline.schedule import ScheduleName, stages_per_rank, why_impossible
from piper_kernels.strict_model import (
    Fraction,
    NonNegativeFloat,
    NonNegativeInt,
    PositiveFloat,
    PositiveInt,
    StrictModel,
)

Axis = Literal["pp", "dp", "ep", "tp"]
RANK_ORDER: tuple[Axis, ...] = ("pp", "dp", "ep", "tp")


class Mesh(StrictModel):
    """Sizes of the mesh's axes.

    Attributes:
        pp: pipeline ranks.
        dp: replicas of the experts.
        ep: ranks that share the experts of a layer; each works on its own tokens.
        tp: ranks that share each token.
    """

    pp: PositiveInt
    dp: PositiveInt = 1
    ep: PositiveInt = 1
    tp: PositiveInt = 1

    @property
    def size(self) -> int:
        """Ranks in all."""
        return self.pp * self.dp * self.ep * self.tp

    @property
    def stage_width(self) -> int:
        """Ranks of one pipeline stage."""
        return self.dp * self.ep * self.tp

    @property
    def num_replicas(self) -> int:
        """Ranks that see different tokens: attention has so many replicas."""
        return self.dp * self.ep


class Exchange(StrictModel):
    """How tokens travel to experts and back.

    Attributes:
        algorithm: ``flat``, ``halo`` or ``halo_dedup``.
        num_chunks: parts that overlap with one another and with the experts.
    """

    algorithm: Algorithm = "flat"
    num_chunks: PositiveInt = 1


class Optimizer(StrictModel):
    """Which optimizer, and whether replicas share its state."""

    kind: OptimizerKind = "adamw"
    is_sharded: bool = False


class Predicted(StrictModel):
    """What the model said of a plan. Modelled, not measured.

    Attributes:
        step_s: of one optimizer step.
        tokens_per_s: of the whole job.
        mfu: model FLOPs (no recomputation) over the peak of all GPUs.
        bubble_share: idle share of the pipeline.
        peak_bytes: ``[pp]`` peak memory of each pipeline rank.
        cost_per_million_tokens: in the currency of the platform's price; ``None`` without one.
    """

    step_s: PositiveFloat
    tokens_per_s: PositiveFloat
    mfu: Fraction
    bubble_share: Fraction
    peak_bytes: tuple[NonNegativeInt, ...]
    cost_per_million_tokens: NonNegativeFloat | None = None


class Plan(StrictModel):
    """A strategy for one model on one number of GPUs.

    Attributes:
        version: of this schema.
        model_digest: of the model description that it was made for.
        world_size: GPUs.
        mesh: its axes; their product is the world size.
        rank_order: axes from the outermost to the innermost.
        layers_per_stage: ``[num_stages]`` consecutive layers of each stage, in model order.
        schedule: of the pipeline.
        num_microbatches: M, per replica and step.
        microbatch_size: sequences in a microbatch.
        seq_len: tokens in a sequence.
        checkpointing: which activations are recomputed.
        experts_save: what the experts op keeps for its backward.
        exchange: of tokens.
        optimizer: and whether it is sharded.
        predicted: what the model said; ``None`` for a plan written by hand.

    Example:
        >>> plan = Plan(model_digest="0" * 32, world_size=8, mesh=Mesh(pp=2, ep=4),
        ...     layers_per_stage=(8, 8), schedule="1f1b", num_microbatches=8, microbatch_size=1,
        ...     seq_len=4096)
        >>> plan.global_batch, plan.tokens_per_step
        (32, 131072)
    """

    version: Literal[1] = 1
    model_digest: str
    world_size: PositiveInt
    mesh: Mesh
    rank_order: tuple[Axis, ...] = RANK_ORDER
    layers_per_stage: tuple[PositiveInt, ...]
    schedule: ScheduleName
    num_microbatches: PositiveInt
    microbatch_size: PositiveInt
    seq_len: PositiveInt
    checkpointing: Checkpointing = "none"
    experts_save: Save = "preact"
    exchange: Exchange = Exchange()
    optimizer: Optimizer = Optimizer()
    predicted: Predicted | None = None

    def model_post_init(self, _: Any) -> None:
        """Check that the numbers go together."""
        mesh = self.mesh
        product = f"pp * dp * ep * tp = {mesh.pp} * {mesh.dp} * {mesh.ep} * {mesh.tp} = {mesh.size}"
        remedy = "Change an axis of the mesh, or the number of GPUs."
        fits = self.world_size == mesh.size
        _require(fits, "world_size", f"be {product}", self.world_size, remedy)
        _require(self.rank_order == RANK_ORDER, "rank_order", f"be {RANK_ORDER}", self.rank_order)
        given = len(self.layers_per_stage)
        local, rest = stages_per_rank(self.schedule), 0
        if self.schedule == "interleaved_1f1b":
            # two stages a rank or more
            local, rest = max(given // mesh.pp, local), given % mesh.pp
        stages = f"pp = {mesh.pp} ranks of {local} under {self.schedule}"
        requirement = f"have {mesh.pp * local} entries: {stages}"
        fits = given == mesh.pp * local and not rest
        _require(fits, "layers_per_stage", requirement, given)
        reason = why_impossible(self.schedule, mesh.pp, self.num_microbatches)
        remedy = "Use more microbatches, or gpipe, which takes any number."
        if reason:
            raise ConfigError(f"Plan: {reason}. {remedy}")
        peaks = mesh.pp if self.predicted is None else len(self.predicted.peak_bytes)
        _require(peaks == mesh.pp, "predicted.peak_bytes", f"have pp = {mesh.pp} entries", peaks)

    @property
    def num_layers(self) -> int:
        """Layers of the model."""
        return sum(self.layers_per_stage)

    @property
    def global_batch(self) -> int:
        """Sequences of one optimizer step."""
        return self.num_microbatches * self.microbatch_size * self.mesh.num_replicas

    @property
    def tokens_per_step(self) -> int:
        """Tokens of one optimizer step."""
        return self.global_batch * self.seq_len

    def stage_layers(self) -> tuple[range, ...]:
        """Global indices of each stage's layers: together each layer once, in order."""
        first, ranges = 0, []
        for count in self.layers_per_stage:
            ranges.append(range(first, first + count))
            first += count
        return tuple(ranges)

    def check_model(self, digest: str, num_layers: int, num_experts: int) -> None:
        """Raise ``PlanError`` unless this plan was made for such a model.

        Args:
            digest: of the model description.
            num_layers: of the model.
            num_experts: E of its layers; 0 for a dense model.
        """
        requirement = f"be the model's {num_layers} layers in all"
        _must(self.num_layers == num_layers, "layers_per_stage", requirement, self.num_layers)
        fits = self.mesh.ep <= max(num_experts, 1)
        requirement = f"be at most the model's {num_experts} experts"
        _must(fits, "mesh.ep", requirement, self.mesh.ep)
        requirement = f"be {digest}, the model at hand"
        remedy = "Plan again for this model."
        _must(self.model_digest == digest, "model_digest", requirement, self.model_digest, remedy)


def split_layers(num_layers: int, num_stages: int) -> tuple[int, ...]:
    """As even as it goes, the longer stages in the middle: the ends have embedding and head.

    Raises:
        PlanError: fewer layers than stages.

    Example:
        >>> split_layers(10, 4), split_layers(7, 2), split_layers(3, 3)
        ((2, 3, 3, 2), (3, 4), (1, 1, 1))
    """
    requirement = f"be at least the {num_stages} stages"
    remedy = "Use fewer pipeline ranks, or a schedule with one stage a rank."
    fits = 1 <= num_stages <= num_layers
    require(fits, "split_layers", "num_layers", requirement, num_layers, remedy, error=PlanError)
    short, more = divmod(num_layers, num_stages)
    first = (num_stages - more + 1) // 2
    return tuple(short + (first <= stage < first + more) for stage in range(num_stages))


def _require(fits: bool, argument: str, requirement: str, value: object, remedy: str = "") -> None:
    require(fits, "Plan", argument, requirement, value, remedy)


def _must(fits: bool, argument: str, requirement: str, value: object, remedy: str = "") -> None:
    require(fits, "Plan.check_model", argument, requirement, value, remedy, error=PlanError)
