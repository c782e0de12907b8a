"""What an op costs, and the sizes that decide it.

Letters: T num_tokens, H hidden_size, I intermediate_size, E num_experts, K top_k, R = T*K num_rows.
"""

from dataclasses import dataclass, field

from piper_kernels.config import WeightLayout
from piper_kernels.errors import require

# row and slot maps are int32, expert ids int64, gates and their gradients fp32
INDEX_BYTES = 4
EXPERT_ID_BYTES = 8
GATE_BYTES = 4


@dataclass(frozen=True, slots=True)
class Cost:
    """What an op does at least: ``flops`` floating point operations, ``bytes`` to and from memory.

    Example:
        >>> Cost(10, 4) + Cost(2, 6)
        Cost(flops=12, bytes=10)
    """

    flops: int
    bytes: int

    def __add__(self, other: "Cost") -> "Cost":
        return Cost(self.flops + other.flops, self.bytes + other.bytes)

    def roof_s(self, flops_per_s: float, bytes_per_s: float) -> float:
        """Seconds below which a machine with these two rates cannot go (the roofline).

        Example:
            >>> Cost(flops=100, bytes=10).roof_s(flops_per_s=50.0, bytes_per_s=1.0)
            10.0
        """
        return max(self.flops / flops_per_s, self.bytes / bytes_per_s)


@dataclass(frozen=True, kw_only=True, slots=True)
class ExpertsSizes:
    """The sizes that decide what an experts op costs.

    Attributes:
        num_tokens: T, may be 0.
        hidden_size: H.
        intermediate_size: I.
        num_experts: E.
        top_k: K.
        element_bytes: bytes of one element of x, the weights and the output; 2 for bf16.
        layout: says whether the first projection is 2I wide (gated) or I.
        num_hit_experts: experts with at least one row; ``None`` counts as many as there can be,
            ``min(E, R)``. :func:`expected_hit_experts` gives the mean under uniform routing.
    """

    num_tokens: int
    hidden_size: int
    intermediate_size: int
    num_experts: int
    top_k: int
    element_bytes: int = 2
    layout: WeightLayout = field(default_factory=WeightLayout)
    num_hit_experts: int | None = None

    def __post_init__(self) -> None:
        name = "ExpertsSizes"
        require(self.num_tokens >= 0, name, "num_tokens", "be >= 0", self.num_tokens)
        for size in ("hidden_size", "intermediate_size", "num_experts", "top_k", "element_bytes"):
            require(getattr(self, size) >= 1, name, size, "be >= 1", getattr(self, size))
        most = min(self.num_experts, self.num_rows)
        hit = self.num_hit_experts
        requirement = f"be between 0 and min(E, T * K) = {most}"
        require(hit is None or 0 <= hit <= most, name, "num_hit_experts", requirement, hit)

    @property
    def num_rows(self) -> int:
        """R = T * K."""
        return self.num_tokens * self.top_k

    @property
    def hit_experts(self) -> int:
        """Experts whose weights have to be read."""
        most = min(self.num_experts, self.num_rows)
        return most if self.num_hit_experts is None else self.num_hit_experts

    @property
    def preact_size(self) -> int:
        """2I with a gate, I without."""
        return self.layout.preact_size(self.intermediate_size)


def expected_hit_experts(num_experts: int, top_k: int, num_tokens: int) -> float:
    """Mean number of experts with a row when each token draws K different ones uniformly.

    ``E * (1 - (1 - K/E)^T)``: what a decode step has to read.

    Example:
        >>> expected_hit_experts(num_experts=4, top_k=2, num_tokens=2)
        3.0
    """
    return num_experts * (1.0 - (1.0 - top_k / num_experts) ** num_tokens)
