"""What a layer is, as frozen data: sizes, weight layout, activation, router. Validation only.

Letters: H hidden_size, I intermediate_size, E num_experts, K top_k (docs/glossary.md).
"""

import math
from dataclasses import dataclass, field, replace
from typing import Literal, get_args

from piper_kernels.errors import ConfigError, did_you_mean, instruction, require

ActivationFunction = Literal["silu", "gelu", "gelu_tanh", "relu", "relu2", "identity"]
RouterKind = Literal["softmax_topk", "topk_softmax", "sigmoid_topk"]
GroupScore = Literal["max", "top2_sum"]
NonFinite = Literal["raise", "contain"]
Save = Literal["preact", "x"]
Backend = Literal["auto", "triton", "cpu", "reference"]


def check_choice(function: str, argument: str, value: object, choices: object) -> None:
    """Raise unless ``value`` is one of a ``Literal``'s values.

    Raises:
        ConfigError: naming the choices and the nearest one.
    """
    known = get_args(choices)
    if value not in known:
        remedy = did_you_mean(str(value), known)
        raise ConfigError(
            instruction(function, argument, f"be one of {', '.join(known)}", repr(value), remedy)
        )


def _require_positive(function: str, **sizes: int) -> None:
    for name, size in sizes.items():
        is_int = isinstance(size, int) and not isinstance(size, bool)
        # repr tells '8' from 8; a traced size has none
        given = size if is_int else repr(size)
        require(is_int and size >= 1, function, name, "be an integer >= 1", given)


def _require_finite(function: str, **values: float) -> None:
    for name, value in values.items():
        require(-math.inf < value < math.inf, function, name, "be a finite number", value)


def require_type(function: str, argument: str, value: object, wanted: type) -> None:
    """Raise ``ConfigError`` unless ``value`` is of the type ``wanted``, or of a subclass."""
    requirement = f"be of type {wanted.__name__}"
    remedy = f"Pass e.g. {wanted.__name__}(...)." if wanted is not float else ""
    # what is a float is also an int: 1 stands for 1.0, True does not
    is_number = wanted is float and isinstance(value, int) and not isinstance(value, bool)
    if not is_number and not isinstance(value, wanted):
        raise ConfigError(instruction(function, argument, requirement, repr(value), remedy))


@dataclass(frozen=True, kw_only=True, slots=True)
class WeightLayout:
    """How the two expert weights are laid out in memory. Never guessed from shapes.

    With all flags at their default: ``gate_up_proj [E, 2I, H]`` with the gate rows first, and
    ``down_proj [E, H, I]`` (most Hugging Face models; source:
    transformers 5.24, ``integrations/moe.py``).

    Attributes:
        is_transposed: weights are stored ``[E, H, 2I]`` and ``[E, I, H]`` (gpt-oss, aria).
        is_interleaved: gate and up alternate g0, u0, g1, u1, ... (gpt-oss) instead of two halves.
        is_gated: the first projection has a gate and is 2I wide; ``False``: it is I wide
            (nemotron_h).
    """

    is_transposed: bool = False
    is_interleaved: bool = False
    is_gated: bool = True

    def __post_init__(self) -> None:
        require(
            self.is_gated or not self.is_interleaved,
            "WeightLayout",
            "is_interleaved",
            "be False for an ungated layout",
            self.is_interleaved,
            "There is nothing to interleave without a gate.",
        )

    def preact_size(self, intermediate_size: int) -> int:
        """Width of the first projection's output: 2I with a gate, I without."""
        return 2 * intermediate_size if self.is_gated else intermediate_size

    def weight_shapes(
        self, num_experts: int, hidden_size: int, intermediate_size: int
    ) -> tuple[tuple[int, int, int], tuple[int, int, int]]:
        """Shapes of ``(gate_up_proj, down_proj)``.

        Example:
            >>> WeightLayout().weight_shapes(8, 16, 24)
            ((8, 48, 16), (8, 16, 24))
        """
        width = self.preact_size(intermediate_size)
        if self.is_transposed:
            gate_up, down = (hidden_size, width), (intermediate_size, hidden_size)
        else:
            gate_up, down = (width, hidden_size), (hidden_size, intermediate_size)
        return (num_experts, *gate_up), (num_experts, *down)


@dataclass(frozen=True, kw_only=True, slots=True)
class Activation:
    """What happens between the two projections.

    Gated:    ``a = (clamp(up, -limit, limit) + up_offset) * f(clamp(gate, max=limit))``
    Ungated:  ``a = f(up)``
    where ``f`` is ``function``; ``silu`` is ``z * sigmoid(alpha * z)``.

    Attributes:
        function: silu, gelu (erf), gelu_tanh, relu, relu2 (relu squared) or identity.
        alpha: slope inside the sigmoid of ``silu``; 1.702 in gpt-oss.
        limit: clamp bound, ``None`` for no clamp; 7.0 in gpt-oss. Needs a gate.
        up_offset: added to ``up``; 1.0 in gpt-oss. Needs a gate.
    """

    function: ActivationFunction = "silu"
    alpha: float = 1.0
    limit: float | None = None
    up_offset: float = 0.0

    def __post_init__(self) -> None:
        check_choice("Activation", "function", self.function, ActivationFunction)
        require(
            self.alpha == 1.0 or self.function == "silu",
            "Activation",
            "alpha",
            "be 1.0 unless function is 'silu'",
            self.alpha,
        )
        _require_finite("Activation", alpha=self.alpha, up_offset=self.up_offset)
        require(
            self.limit is None or self.limit > 0,
            "Activation",
            "limit",
            "be > 0 or None",
            self.limit,
        )

    def check_layout(self, function: str, layout: WeightLayout) -> None:
        """Raise ``ConfigError`` if a clamp or an offset is asked for without a gate."""
        needs_gate = self.limit is not None or self.up_offset != 0.0
        require(
            layout.is_gated or not needs_gate,
            function,
            "activation",
            "have no limit and no up_offset when layout.is_gated is False",
            self,
        )


SWIGLU = Activation()
GEGLU = Activation(function="gelu")
REGLU = Activation(function="relu")
RELU2 = Activation(function="relu2")
GPT_OSS_SWIGLU = Activation(alpha=1.702, limit=7.0, up_offset=1.0)


@dataclass(frozen=True, kw_only=True, slots=True)
class RouterConfig:
    """How logits become expert ids and gates.

    Attributes:
        kind: ``softmax_topk`` (softmax over E, then choose), ``topk_softmax`` (choose, then softmax
            over the K chosen), ``sigmoid_topk`` (sigmoid per expert, then choose).
        is_normalized: divide the chosen gates by their sum. ``topk_softmax`` is normalised anyway.
        scaling_factor: multiplies the gates last, normalised or not.
        num_groups: experts are split into this many equal groups; 1 is no grouping.
        num_selected_groups: only experts of the best groups may be chosen.
        group_score: a group's score: its best expert (``max``, DeepSeek-V2) or the sum of its two
            best (``top2_sum``, DeepSeek-V3; a group of one counts its single score).
        has_bias: the router is affine (gpt-oss).
        has_correction_bias: a buffer is added to the scores for the choice only, never to gates
            (DeepSeek-V3, arXiv 2408.15664).
        jitter: in training the router's input, and nothing else, is multiplied by
            ``uniform(1 - jitter, 1 + jitter)``.
        non_finite: ``raise`` on NaN or Inf logits (on a GPU by a device-side assertion, without a
            host sync), or ``contain``: a token with such a logit gets gates 0 and no gradient.
    """

    kind: RouterKind = "softmax_topk"
    is_normalized: bool = True
    scaling_factor: float = 1.0
    num_groups: int = 1
    num_selected_groups: int = 1
    group_score: GroupScore = "max"
    has_bias: bool = False
    has_correction_bias: bool = False
    jitter: float = 0.0
    non_finite: NonFinite = "raise"

    def __post_init__(self) -> None:
        name = "RouterConfig"
        check_choice(name, "kind", self.kind, RouterKind)
        check_choice(name, "group_score", self.group_score, GroupScore)
        check_choice(name, "non_finite", self.non_finite, NonFinite)
        _require_positive(
            name, num_groups=self.num_groups, num_selected_groups=self.num_selected_groups
        )
        require(
            self.num_selected_groups <= self.num_groups,
            name,
            "num_selected_groups",
            f"be at most num_groups = {self.num_groups}",
            self.num_selected_groups,
        )
        _require_finite(name, scaling_factor=self.scaling_factor)
        require(0.0 <= self.jitter < 1.0, name, "jitter", "be in [0, 1)", self.jitter)

    def check_sizes(self, function: str, num_experts: int, top_k: int) -> None:
        """Raise ``ConfigError`` unless this router can choose K of E experts.

        Example:
            >>> RouterConfig(num_groups=8).check_sizes("route", 60, 4)
            Traceback (most recent call last):
            ...
            piper_kernels.errors.ConfigError: route: num_experts must be divisible by \
num_groups = 8, got 60.
        """
        _require_positive(function, num_experts=num_experts, top_k=top_k)
        require(
            top_k <= num_experts,
            function,
            "top_k",
            f"be at most num_experts = {num_experts}",
            top_k,
        )
        require(
            num_experts % self.num_groups == 0,
            function,
            "num_experts",
            f"be divisible by num_groups = {self.num_groups}",
            num_experts,
        )
        reachable = num_experts // self.num_groups * self.num_selected_groups
        require(
            top_k <= reachable,
            function,
            "top_k",
            f"be at most {reachable}, the experts in {self.num_selected_groups} of "
            f"{self.num_groups} groups",
            top_k,
            "Select more groups.",
        )


@dataclass(frozen=True, kw_only=True, slots=True)
class SharedExpertsConfig:
    """An expert that sees every token, added to the routed output.

    Attributes:
        intermediate_size: width of the shared expert (all shared experts of a model as one).
        is_gated_by_token: its output is multiplied by ``sigmoid(x @ w)`` (Qwen2-MoE).
    """

    intermediate_size: int
    is_gated_by_token: bool = False

    def __post_init__(self) -> None:
        _require_positive("SharedExpertsConfig", intermediate_size=self.intermediate_size)


@dataclass(frozen=True, kw_only=True, slots=True)
class MoEConfig:
    """Everything that defines one MoE layer's meaning, apart from its weights.

    Attributes:
        hidden_size: H, width of the model.
        intermediate_size: I, width inside one expert.
        num_experts: E.
        top_k: K, experts per token.
        router: how experts are chosen.
        activation: what happens between the projections.
        layout: how the weights are stored.
        has_expert_bias: both projections carry a bias per expert (gpt-oss).
        shared_experts: an expert for every token, or ``None``.
        capacity_factor: ``None`` is dropless. Else an expert takes at most
            ``ceil(capacity_factor * T * K / E)`` rows; the lowest gate is dropped first.

    Example:
        >>> MoEConfig(hidden_size=16, intermediate_size=24, num_experts=8, top_k=2).top_k
        2
    """

    hidden_size: int
    intermediate_size: int
    num_experts: int
    top_k: int
    router: RouterConfig = field(default_factory=RouterConfig)
    activation: Activation = SWIGLU
    layout: WeightLayout = field(default_factory=WeightLayout)
    has_expert_bias: bool = False
    shared_experts: SharedExpertsConfig | None = None
    capacity_factor: float | None = None

    def __post_init__(self) -> None:
        _require_positive(
            "MoEConfig",
            hidden_size=self.hidden_size,
            intermediate_size=self.intermediate_size,
            num_experts=self.num_experts,
            top_k=self.top_k,
        )
        require_type("MoEConfig", "router", self.router, RouterConfig)
        require_type("MoEConfig", "activation", self.activation, Activation)
        require_type("MoEConfig", "layout", self.layout, WeightLayout)
        if self.shared_experts is not None:
            require_type("MoEConfig", "shared_experts", self.shared_experts, SharedExpertsConfig)
        if self.capacity_factor is not None:
            require_type("MoEConfig", "capacity_factor", self.capacity_factor, float)
        self.router.check_sizes("MoEConfig", self.num_experts, self.top_k)
        self.activation.check_layout("MoEConfig", self.layout)
        require(
            self.capacity_factor is None or self.capacity_factor > 0,
            "MoEConfig",
            "capacity_factor",
            "be > 0 or None",
            self.capacity_factor,
        )

    def with_experts(self, num_experts: int) -> "MoEConfig":
        """The config of a part of the layer's experts, as one rank holds it.

        The router's settings concern all experts and are not part of it.
        """
        top_k = min(self.top_k, num_experts)
        return replace(self, num_experts=num_experts, top_k=top_k, router=RouterConfig())
