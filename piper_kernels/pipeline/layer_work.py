"""What a model computes, layer by layer, as sizes: all that time depends on.

Pure: no torch, no process group. Letters: H hidden_size, E num_experts, K top_k.
"""

from dataclasses import dataclass

from piper_kernels.errors import require


@dataclass(frozen=True, kw_only=True, slots=True)
class AttentionWork:
    """One attention.

    Attributes:
        num_heads: query heads.
        qk_dim: of one head's query and key.
        v_dim: of one head's value.
        projections: ``(in, out)`` of each product that tensor parallelism cuts.
        whole_projections: ``(in, out)`` of those that every rank computes whole (the down
            projections of multi-head latent attention).
    """

    num_heads: int
    qk_dim: int
    v_dim: int
    projections: tuple[tuple[int, int], ...]
    whole_projections: tuple[tuple[int, int], ...] = ()

    @property
    def num_parameters(self) -> int:
        """Weights of all projections."""
        return sum(a * b for a, b in self.projections + self.whole_projections)


@dataclass(frozen=True, kw_only=True, slots=True)
class LayerWork:
    """One decoder layer.

    Attributes:
        hidden_size: H.
        attention: of the layer.
        num_matrices: of each feed-forward network: 3 with a gate, 2 without.
        dense_size: width of a network that every token passes; shared experts count here.
        num_experts: E, 0 without experts.
        top_k: K.
        expert_size: width of one expert.
    """

    hidden_size: int
    attention: AttentionWork
    num_matrices: int = 3
    dense_size: int = 0
    num_experts: int = 0
    top_k: int = 0
    expert_size: int = 0

    def __post_init__(self) -> None:
        name = "LayerWork"
        for field in ("dense_size", "num_experts", "top_k", "expert_size"):
            require(getattr(self, field) >= 0, name, field, "be >= 0", getattr(self, field))
        require(self.hidden_size >= 1, name, "hidden_size", "be >= 1", self.hidden_size)
        fits = self.num_matrices in (2, 3)
        require(fits, name, "num_matrices", "be 2 or 3", self.num_matrices)
        requirement = f"be in 1 .. {self.num_experts}, the experts"
        fits = self.top_k <= self.num_experts and (self.top_k > 0) == (self.num_experts > 0)
        require(fits, name, "top_k", requirement, self.top_k)
        fits = (self.expert_size > 0) == (self.num_experts > 0)
        require(fits, name, "expert_size", "be above 0 exactly with experts", self.expert_size)

    @property
    def expert_parameters(self) -> int:
        """Weights of one expert."""
        return self.num_matrices * self.hidden_size * self.expert_size

    @property
    def dense_parameters(self) -> int:
        """Weights that every rank of the expert group has: attention, dense network, router."""
        dense = self.num_matrices * self.hidden_size * self.dense_size
        return self.attention.num_parameters + dense + self.hidden_size * self.num_experts

    @property
    def active_parameters(self) -> int:
        """Weights that one token meets."""
        return self.dense_parameters + self.top_k * self.expert_parameters

    def attention_flops(self, seq_len: int) -> float:
        """Forward FLOPs of one token's scores and values, the causal half of the square."""
        attention = self.attention
        return seq_len * attention.num_heads * float(attention.qk_dim + attention.v_dim)


@dataclass(frozen=True, kw_only=True, slots=True)
class ModelWork:
    """A decoder.

    Attributes:
        name: for people.
        digest: of the description that it was made from.
        layers: in order.
        hidden_size: H.
        vocab_size: rows of the embedding and of the head.
    """

    name: str
    digest: str
    layers: tuple[LayerWork, ...]
    hidden_size: int
    vocab_size: int

    @property
    def num_experts(self) -> int:
        """Most experts of a layer."""
        return max(layer.num_experts for layer in self.layers)

    def model_flops(self, num_tokens: float, seq_len: int) -> float:
        """FLOPs of a training step on so many tokens, recomputation not counted.

        6 a token and active weight (forward 2, backward 4), the head included, the embedding not;
        plus three times the causal half of the attention square.

        Example:
            >>> attention = AttentionWork(
            ...     num_heads=2, qk_dim=4, v_dim=4, projections=((8, 24), (8, 8)))
            >>> layer = LayerWork(hidden_size=8, attention=attention, dense_size=10)
            >>> model = ModelWork(
            ...     name="tiny", digest="", layers=(layer,), hidden_size=8, vocab_size=100)
            >>> model.model_flops(1, 16) == 6 * (256 + 240 + 800) + 3 * 16 * 2 * 8
            True
        """
        weights = sum(layer.active_parameters for layer in self.layers)
        weights += self.hidden_size * self.vocab_size
        square = sum(layer.attention_flops(seq_len) for layer in self.layers)
        return num_tokens * (6.0 * weights + 3.0 * square)
