"""What memory depends on besides the model: the mesh, the microbatch, the optimizer, the kernels.

Pure: no torch, no process group.
"""

from dataclasses import dataclass, field
from typing import Literal

from piper_kernels.config import Save, check_choice
from piper_kernels.errors import require
from piper_kernels.pipeline.attention_description import require_size

# flash: a fused kernel; eager: transformers' own, softmax in fp32; math: torch's composed one, all
# in fp32; half: scores and softmax in the model's type, as Megatron-LM
AttentionKernel = Literal["flash", "eager", "math", "half"]
Checkpointing = Literal["none", "selective", "full"]
OptimizerKind = Literal["adamw", "adamw_8bit", "sgd", "sgd_momentum"]

# fp32 moments; 8-bit moments with an fp32 scale for every 256 of them (bitsandbytes' block size)
STATE_BYTES: dict[OptimizerKind, float] = {
    "adamw": 8.0,
    "adamw_8bit": 2.0 + 2 * 4 / 256,
    "sgd": 0.0,
    "sgd_momentum": 4.0,
}


@dataclass(frozen=True, kw_only=True, slots=True)
class ActivationRules:
    """How the layers are computed, as far as it decides what is kept for the backward.

    The defaults are transformers' modules as they are, with a fused attention and Piper's experts.

    Attributes:
        attention: kernel of the attention.
        has_fused_norms: a norm keeps its input and no copies in fp32.
        has_fused_activations: gate and up are one tensor and the activation is computed anew.
        has_dropout: after attention and network, and on the attention's weights; one byte each.
        is_sequence_parallel: what tensor parallelism leaves whole is cut along the sequence.
        save: the experts op's dial: the pre-activation, or the input only.
        imbalance: rows that a rank's experts hold over balanced rows: uneven routing or padding.
    """

    attention: AttentionKernel = "flash"
    has_fused_norms: bool = False
    has_fused_activations: bool = False
    has_dropout: bool = False
    is_sequence_parallel: bool = False
    save: Save = "preact"
    imbalance: float = 1.0

    def __post_init__(self) -> None:
        name = "ActivationRules"
        check_choice(name, "attention", self.attention, AttentionKernel)
        check_choice(name, "save", self.save, Save)
        fits = 1.0 <= self.imbalance < float("inf")
        require(fits, name, "imbalance", "be a finite number >= 1", self.imbalance)


@dataclass(frozen=True, kw_only=True, slots=True)
class OptimizerRules:
    """What is kept for each parameter besides itself.

    Attributes:
        kind: of the optimizer.
        is_sharded: replicas share master weights and state (ZeRO-1).
        has_master_weights: an fp32 copy of every parameter of a shorter type.
        gradient_bytes: of one gradient; ``None``: as the parameter.
    """

    kind: OptimizerKind = "adamw"
    is_sharded: bool = False
    has_master_weights: bool = True
    gradient_bytes: int | None = None

    def __post_init__(self) -> None:
        check_choice("OptimizerRules", "kind", self.kind, OptimizerKind)
        fits = self.gradient_bytes in (None, 2, 4)
        require(fits, "OptimizerRules", "gradient_bytes", "be 2, 4 or None", self.gradient_bytes)


@dataclass(frozen=True, kw_only=True, slots=True)
class MemorySettings:
    """One rank's share of the work.

    Attributes:
        seq_len: tokens in a sequence.
        microbatch_size: sequences in a microbatch of one rank.
        dp: replicas of the experts.
        ep: ranks that share the experts; each works on its own tokens.
        tp: ranks that share each token.
        checkpointing: what is recomputed: nothing, the attention's core (Korthikanti et al. 2022),
            or every layer from its input.
        activations: how the layers are computed.
        optimizer: what is kept for each parameter.
    """

    seq_len: int
    microbatch_size: int = 1
    dp: int = 1
    ep: int = 1
    tp: int = 1
    checkpointing: Checkpointing = "none"
    activations: ActivationRules = field(default_factory=ActivationRules)
    optimizer: OptimizerRules = field(default_factory=OptimizerRules)

    def __post_init__(self) -> None:
        for size in ("seq_len", "microbatch_size", "dp", "ep", "tp"):
            require_size("MemorySettings", size, getattr(self, size))
        check_choice("MemorySettings", "checkpointing", self.checkpointing, Checkpointing)

    @property
    def num_tokens(self) -> int:
        """T: tokens of a microbatch on one rank."""
        return self.seq_len * self.microbatch_size
