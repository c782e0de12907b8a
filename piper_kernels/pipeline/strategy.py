"""A strategy: a plan without its prediction, light enough to make by the thousand.

Pure: no torch, no process group.
"""

from dataclasses import dataclass

from piper_kernels.config import Save
from piper_kernels.pipeline.memory_settings import Checkpointing, OptimizerKind
from piper_kernels.pipeline.plan import (
    Exchange,
    Mesh,
    Optimizer,
    Plan,
    Predicted,
)
from piper_kernels.pipeline.schedule import Schedule, ScheduleName, make_schedule, stage_owners


@dataclass(frozen=True, kw_only=True, slots=True)
class Strategy:
    """How a model runs on a number of GPUs; fields as in :class:`Plan`.

    Attributes:
        pp: pipeline ranks.
        dp: replicas of the experts.
        ep: ranks of an expert group.
        tp: ranks that share each token.
        schedule: of the pipeline.
        num_microbatches: M, per replica and step.
        microbatch_size: sequences in a microbatch.
        seq_len: tokens in a sequence.
        layers_per_stage: ``[num_stages]``.
        checkpointing: which activations are recomputed.
        experts_save: what the experts op keeps.
        optimizer: its kind.
        is_optimizer_sharded: whether replicas share its state.
        is_attention_fused: whether attention keeps its square on the chip.
        is_sequence_parallel: whether tensor parallelism also cuts element-wise work.
    """

    pp: int
    dp: int = 1
    ep: int = 1
    tp: int = 1
    schedule: ScheduleName = "1f1b"
    num_microbatches: int = 1
    microbatch_size: int = 1
    seq_len: int
    layers_per_stage: tuple[int, ...]
    checkpointing: Checkpointing = "none"
    experts_save: Save = "preact"
    optimizer: OptimizerKind = "adamw"
    is_optimizer_sharded: bool = False
    is_attention_fused: bool = True
    is_sequence_parallel: bool = True

    @property
    def world_size(self) -> int:
        """GPUs."""
        return self.pp * self.stage_width

    @property
    def stage_width(self) -> int:
        """Ranks of one stage."""
        return self.dp * self.ep * self.tp

    @property
    def tokens_per_step(self) -> int:
        """Tokens of one optimizer step."""
        microbatch = self.microbatch_size * self.seq_len
        return self.num_microbatches * microbatch * self.dp * self.ep

    @property
    def actions(self) -> Schedule:
        """The schedule's action lists."""
        local = len(self.layers_per_stage) // self.pp
        return make_schedule(self.schedule, self.pp, self.num_microbatches, local)

    @property
    def owners(self) -> tuple[int, ...]:
        """``[num_stages]`` the pipeline rank of each stage."""
        return stage_owners(self.schedule, self.pp, len(self.layers_per_stage) // self.pp)

    @property
    def name(self) -> str:
        """For people: ``pp 4, dp 1, ep 8, tp 1, 1f1b, 16 x 1, none``."""
        batch = f"{self.num_microbatches} x {self.microbatch_size}"
        mesh = f"pp {self.pp}, dp {self.dp}, ep {self.ep}, tp {self.tp}"
        return f"{mesh}, {self.schedule}, {batch}, {self.checkpointing}"

    def to_plan(
        self, model_digest: str, exchange: Exchange, predicted: Predicted | None = None
    ) -> Plan:
        """The plan file's content, checked.

        Raises:
            ConfigError: the strategy contradicts itself.
        """
        return Plan(
            model_digest=model_digest,
            world_size=self.world_size,
            mesh=Mesh(pp=self.pp, dp=self.dp, ep=self.ep, tp=self.tp),
            layers_per_stage=self.layers_per_stage,
            schedule=self.schedule,
            num_microbatches=self.num_microbatches,
            microbatch_size=self.microbatch_size,
            seq_len=self.seq_len,
            checkpointing=self.checkpointing,
            experts_save=self.experts_save,
            exchange=exchange,
            optimizer=Optimizer(kind=self.optimizer, is_sharded=self.is_optimizer_sharded),
            predicted=predicted,
        )
