"""FLOPs and compulsory bytes of every op as pure functions of its sizes.

Letters: T num_tokens, H hidden_size, I intermediate_size, E num_experts, K top_k, R = T*K num_rows.

*Compulsory* bytes are the distinct addresses that a launch reads and writes, each counted once: no
implementation of that launch can move less. FLOPs are those of matrix products and weighted sums, 2
per multiply-add; element-wise work is not counted, since no machine is bound by it.

Example:
    The forward of one layer of Qwen3-30B-A3B on 32768 tokens in bf16, kept for training:

    >>> sizes = ExpertsSizes(
    ...     num_tokens=32768, hidden_size=2048, intermediate_size=768, num_experts=128, top_k=8
    ... )
    >>> cost = experts_forward_cost(sizes, keeps_preact=True)
    >>> f"{cost.flops / 1e12:.2f} TFLOP, {cost.bytes / 1e9:.2f} GB"
    '2.47 TFLOP, 5.24 GB'
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


def permute_cost(sizes: ExpertsSizes) -> Cost:
    """Copy each token to its K rows: T*H in, R*H out, and the row map."""
    moved = (sizes.num_tokens + sizes.num_rows) * sizes.hidden_size * sizes.element_bytes
    return Cost(0, moved + sizes.num_rows * INDEX_BYTES)


def unpermute_cost(sizes: ExpertsSizes) -> Cost:
    """Gate-weighted sum of each token's K rows: R*H in, T*H out, slot map and gates."""
    moved = (sizes.num_tokens + sizes.num_rows) * sizes.hidden_size * sizes.element_bytes
    maps = sizes.num_rows * (INDEX_BYTES + GATE_BYTES)
    return Cost(2 * sizes.num_rows * sizes.hidden_size, moved + maps)


def route_cost(sizes: ExpertsSizes) -> Cost:
    """Router logits and top-k: x and the router's weight in; fp32 logits, ids and gates out."""
    tokens, experts = sizes.num_tokens, sizes.num_experts
    read = (tokens + experts) * sizes.hidden_size * sizes.element_bytes
    written = tokens * experts * GATE_BYTES + sizes.num_rows * (EXPERT_ID_BYTES + GATE_BYTES)
    return Cost(2 * tokens * experts * sizes.hidden_size, read + written)


def grouped_gemm_cost(
    num_rows: int, in_size: int, out_size: int, num_hit_experts: int, element_bytes: int = 2
) -> Cost:
    """``[R, in] x [E, out, in] -> [R, out]``: rows, the weights of experts hit, and the result.

    Example:
        >>> grouped_gemm_cost(num_rows=4, in_size=8, out_size=2, num_hit_experts=3)
        Cost(flops=128, bytes=176)
    """
    elements = num_rows * (in_size + out_size) + num_hit_experts * in_size * out_size
    return Cost(2 * num_rows * in_size * out_size, elements * element_bytes)


def grouped_gemm_wgrad_cost(
    num_rows: int, in_size: int, out_size: int, num_experts: int, element_bytes: int = 2
) -> Cost:
    """``[R, out] x [R, in] -> [E, out, in]``: all E gradients are written, empty ones as zeros."""
    elements = num_rows * (in_size + out_size) + num_experts * in_size * out_size
    return Cost(2 * num_rows * in_size * out_size, elements * element_bytes)


def _gate_up_cost(sizes: ExpertsSizes, *, keeps_preact: bool, writes_act: bool) -> Cost:
    """The first projection with its rows gathered on load and the activation in its epilogue."""
    tokens, rows = sizes.num_tokens, sizes.num_rows
    hidden, width = sizes.hidden_size, sizes.preact_size
    elements = tokens * hidden + sizes.hit_experts * width * hidden
    elements += rows * width * keeps_preact + rows * sizes.intermediate_size * writes_act
    return Cost(2 * rows * width * hidden, elements * sizes.element_bytes + rows * INDEX_BYTES)


def experts_forward_launches(sizes: ExpertsSizes, *, keeps_preact: bool) -> dict[str, Cost]:
    """The fused forward, launch by launch (facts of the plan: gather on load, no R*H input copy).

    Args:
        sizes: T, H, I, E, K, dtype width.
        keeps_preact: training with ``save="preact"``; inference and ``save="x"`` write none.

    Returns:
        ``gate_up`` (gather, GEMM, activation), ``down`` (GEMM), ``combine`` (weighted sum over K).
    """
    return {
        "gate_up": _gate_up_cost(sizes, keeps_preact=keeps_preact, writes_act=True),
        "down": grouped_gemm_cost(
            sizes.num_rows,
            sizes.intermediate_size,
            sizes.hidden_size,
            sizes.hit_experts,
            sizes.element_bytes,
        ),
        "combine": unpermute_cost(sizes),
    }


def experts_backward_launches(
    sizes: ExpertsSizes,
    *,
    has_preact: bool = True,
    needs_x: bool = True,
    needs_weights: bool = True,
) -> dict[str, Cost]:
    """The fused backward, launch by launch; the gates' gradient costs no launch of its own.

    Args:
        sizes: T, H, I, E, K, dtype width.
        has_preact: ``False`` (``save="x"``) computes the pre-activation anew first.
        needs_x: whether x wants a gradient.
        needs_weights: whether the expert weights want one; ``False`` for frozen experts.

    Returns:
        ``gate_up`` if recomputed, ``grad_preact``, then ``grad_down``, ``grad_gate_up`` (weights),
        ``grad_rows`` and ``grad_x``, as far as they are needed.
    """
    tokens, rows, element = sizes.num_tokens, sizes.num_rows, sizes.element_bytes
    hidden, inter, width = sizes.hidden_size, sizes.intermediate_size, sizes.preact_size
    launches: dict[str, Cost] = {}
    if not has_preact:
        launches["gate_up"] = _gate_up_cost(sizes, keeps_preact=True, writes_act=False)
    # grad_y and W_down in, pre-activation in and its gradient out; the weighted activation, which
    # grad_down needs, is written on the way
    elements = tokens * hidden + sizes.hit_experts * hidden * inter
    elements += rows * (2 * width + inter * needs_weights)
    maps = rows * (INDEX_BYTES + 2 * GATE_BYTES)
    launches["grad_preact"] = Cost(2 * rows * hidden * inter, elements * element + maps)
    if needs_weights:
        launches["grad_down"] = _gathered_wgrad_cost(sizes, gathered=hidden, dense=inter)
        launches["grad_gate_up"] = _gathered_wgrad_cost(sizes, gathered=hidden, dense=width)
    if needs_x:
        launches["grad_rows"] = grouped_gemm_cost(rows, width, hidden, sizes.hit_experts, element)
        moved = (rows + tokens) * hidden * element
        launches["grad_x"] = Cost(rows * hidden, moved + rows * INDEX_BYTES)
    return launches


def _gathered_wgrad_cost(sizes: ExpertsSizes, *, gathered: int, dense: int) -> Cost:
    """A weight gradient one operand of which is gathered by token: that one is T rows, not R."""
    elements = sizes.num_tokens * gathered + sizes.num_rows * dense
    elements += sizes.num_experts * gathered * dense
    moved = elements * sizes.element_bytes + sizes.num_rows * INDEX_BYTES
    return Cost(2 * sizes.num_rows * gathered * dense, moved)


def experts_forward_cost(sizes: ExpertsSizes, *, keeps_preact: bool) -> Cost:
    """Sum of :func:`experts_forward_launches`."""
    return sum(experts_forward_launches(sizes, keeps_preact=keeps_preact).values(), Cost(0, 0))


def experts_backward_cost(
    sizes: ExpertsSizes,
    *,
    has_preact: bool = True,
    needs_x: bool = True,
    needs_weights: bool = True,
) -> Cost:
    """Sum of :func:`experts_backward_launches`.

    Example:
        >>> sizes = ExpertsSizes(
        ...     num_tokens=32768, hidden_size=2048, intermediate_size=768, num_experts=128, top_k=8
        ... )
        >>> f"{experts_backward_cost(sizes).bytes / 1e9:.2f} GB"
        '9.13 GB'
    """
    launches = experts_backward_launches(
        sizes, has_preact=has_preact, needs_x=needs_x, needs_weights=needs_weights
    )
    return sum(launches.values(), Cost(0, 0))
