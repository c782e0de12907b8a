"""What an attention is, as frozen data: heads, projections, biases, and its exact parameters.

Pure: no torch, no process group. Letters: H hidden_size.
"""

from dataclasses import dataclass
from typing import Literal

from piper_kernels.config import check_choice
from piper_kernels.errors import require

# what a norm of queries and keys spans: nothing, one head, or all heads together
QkNorm = Literal["none", "head", "all_heads"]
# how tensor parallelism cuts a projection: its outputs, its inputs, or not at all
Cut = Literal["out", "in", "whole"]


@dataclass(frozen=True, kw_only=True, slots=True)
class Projection:
    """One linear map of the attention.

    Attributes:
        name: as Hugging Face calls it.
        in_size: of its input.
        out_size: of its output.
        has_bias: whether a bias of ``out_size`` is added.
        cut: what tensor parallelism splits; a bias follows the outputs.

    Example:
        >>> Projection(name="q_proj", in_size=8, out_size=4, has_bias=True).num_parameters
        36
    """

    name: str
    in_size: int
    out_size: int
    has_bias: bool = False
    cut: Cut = "out"

    @property
    def num_parameters(self) -> int:
        """Weight and bias."""
        return self.in_size * self.out_size + self.out_size * self.has_bias

    def parameters_per_rank(self, tp_size: int) -> float:
        """Parameters that one of ``tp_size`` ranks holds."""
        weight, bias = self.in_size * self.out_size, self.out_size * self.has_bias
        if self.cut == "whole":
            return weight + bias
        return weight / tp_size + (bias / tp_size if self.cut == "out" else bias)


@dataclass(frozen=True, kw_only=True, slots=True)
class GroupedAttention:
    """Multi-head attention whose key and value heads may be fewer (grouped or multi-query).

    Attributes:
        num_heads: query heads.
        num_kv_heads: key heads, as many value heads; divides ``num_heads``.
        head_dim: width of a head.
        has_qkv_bias: queries, keys and values have a bias.
        has_output_bias: the output projection has one.
        qk_norm: RMS norm of queries and keys over one head (Qwen3) or all heads (OLMoE).
        has_sinks: a learnt logit per head that takes part in the softmax (gpt-oss).
        has_partial_rotary: only a part of each head is rotated (GLM-4.5).

    Example:
        >>> GroupedAttention(num_heads=4, num_kv_heads=2, head_dim=8).num_parameters(32)
        3072
    """

    num_heads: int
    num_kv_heads: int
    head_dim: int
    has_qkv_bias: bool = False
    has_output_bias: bool = False
    qk_norm: QkNorm = "none"
    has_sinks: bool = False
    has_partial_rotary: bool = False

    def __post_init__(self) -> None:
        name = "GroupedAttention"
        for size in ("num_heads", "num_kv_heads", "head_dim"):
            require_size(name, size, getattr(self, size))
        fits = self.num_heads % self.num_kv_heads == 0
        requirement = f"divide num_heads = {self.num_heads}"
        require(fits, name, "num_kv_heads", requirement, self.num_kv_heads)
        check_choice(name, "qk_norm", self.qk_norm, QkNorm)

    @property
    def qk_dim(self) -> int:
        """Width of one head's query and key."""
        return self.head_dim

    @property
    def v_dim(self) -> int:
        """Width of one head's value."""
        return self.head_dim

    @property
    def rotary_dim(self) -> int:
        """Width of the rotary table."""
        return self.head_dim // 2 if self.has_partial_rotary else self.head_dim

    @property
    def q_size(self) -> int:
        """Width of all queries of a token."""
        return self.num_heads * self.head_dim

    @property
    def kv_size(self) -> int:
        """Width of all keys of a token, and of all values."""
        return self.num_kv_heads * self.head_dim

    def projections(self, hidden_size: int) -> tuple[Projection, ...]:
        """Queries, keys, values, output."""
        widths = {"q_proj": self.q_size, "k_proj": self.kv_size, "v_proj": self.kv_size}
        inputs = (
            Projection(name=name, in_size=hidden_size, out_size=width, has_bias=self.has_qkv_bias)
            for name, width in widths.items()
        )
        output = Projection(
            name="o_proj",
            in_size=self.q_size,
            out_size=hidden_size,
            has_bias=self.has_output_bias,
            cut="in",
        )
        return (*inputs, output)

    @property
    def norm_sizes(self) -> tuple[int, ...]:
        """Widths of the norms inside the attention."""
        sizes = {"none": (), "head": (self.head_dim,) * 2, "all_heads": (self.q_size, self.kv_size)}
        return sizes[self.qk_norm]

    def num_parameters(self, hidden_size: int) -> int:
        """Projections, norms and sinks."""
        projected = sum(one.num_parameters for one in self.projections(hidden_size))
        return projected + sum(self.norm_sizes) + self.num_heads * self.has_sinks


@dataclass(frozen=True, kw_only=True, slots=True)
class LatentAttention:
    """Multi-head latent attention: keys and values from one low-rank vector (DeepSeek-V2).

    Attributes:
        num_heads: heads.
        kv_lora_rank: width of the latent vector of keys and values.
        q_lora_rank: width of the latent vector of queries; ``None`` projects them directly.
        qk_nope_head_dim: part of a head's query and key without rotary position.
        qk_rope_head_dim: part with; the key's is shared by all heads.
        v_head_dim: width of one head's value.
        has_bias: the two down projections and the output projection have a bias.

    Example:
        >>> LatentAttention(num_heads=2, kv_lora_rank=4, q_lora_rank=None, qk_nope_head_dim=4,
        ...     qk_rope_head_dim=2, v_head_dim=4).num_parameters(8)
        276
    """

    num_heads: int
    kv_lora_rank: int
    q_lora_rank: int | None
    qk_nope_head_dim: int
    qk_rope_head_dim: int
    v_head_dim: int
    has_bias: bool = False

    def __post_init__(self) -> None:
        name = "LatentAttention"
        sizes = (
            "num_heads",
            "kv_lora_rank",
            "qk_nope_head_dim",
            "qk_rope_head_dim",
            "v_head_dim",
        )
        for size in sizes:
            require_size(name, size, getattr(self, size))
        if self.q_lora_rank is not None:
            require_size(name, "q_lora_rank", self.q_lora_rank)

    @property
    def qk_dim(self) -> int:
        """Width of one head's query and key."""
        return self.qk_nope_head_dim + self.qk_rope_head_dim

    @property
    def v_dim(self) -> int:
        """Width of one head's value."""
        return self.v_head_dim

    @property
    def rotary_dim(self) -> int:
        """Width of the rotary table."""
        return self.qk_rope_head_dim

    @property
    def q_size(self) -> int:
        """Width of all queries of a token."""
        return self.num_heads * self.qk_dim

    def projections(self, hidden_size: int) -> tuple[Projection, ...]:
        """Queries (down and up, or direct), keys and values (down and up), output."""
        bias, rank = self.has_bias, self.q_lora_rank
        queries: tuple[Projection, ...]
        if rank is None:
            queries = (Projection(name="q_proj", in_size=hidden_size, out_size=self.q_size),)
        else:
            down = Projection(
                name="q_a_proj", in_size=hidden_size, out_size=rank, has_bias=bias, cut="whole"
            )
            queries = (down, Projection(name="q_b_proj", in_size=rank, out_size=self.q_size))
        return (
            *queries,
            Projection(
                name="kv_a_proj_with_mqa",
                in_size=hidden_size,
                out_size=self.kv_lora_rank + self.qk_rope_head_dim,
                has_bias=bias,
                cut="whole",
            ),
            Projection(
                name="kv_b_proj",
                in_size=self.kv_lora_rank,
                out_size=self.num_heads * (self.qk_nope_head_dim + self.v_head_dim),
            ),
            Projection(
                name="o_proj",
                in_size=self.num_heads * self.v_head_dim,
                out_size=hidden_size,
                has_bias=bias,
                cut="in",
            ),
        )

    @property
    def norm_sizes(self) -> tuple[int, ...]:
        """Widths of the norms inside the attention: of the latent vectors."""
        return (self.kv_lora_rank,) + (() if self.q_lora_rank is None else (self.q_lora_rank,))

    def num_parameters(self, hidden_size: int) -> int:
        """Projections and norms."""
        projected = sum(one.num_parameters for one in self.projections(hidden_size))
        return projected + sum(self.norm_sizes)


Attention = GroupedAttention | LatentAttention


def require_size(function: str, argument: str, value: object, least: int = 1) -> None:
    """Raise unless ``value`` is an integer of at least ``least``.

    Raises:
        ConfigError: naming the argument and the value.

    Example:
        >>> require_size("Experts", "top_k", 0)
        Traceback (most recent call last):
        ...
        piper_kernels.errors.ConfigError: Experts: top_k must be an integer >= 1, got 0.
    """
    is_int = isinstance(value, int) and not isinstance(value, bool)
    fits = is_int and isinstance(value, int) and value >= least
    require(fits, function, argument, f"be an integer >= {least}", repr(value))
