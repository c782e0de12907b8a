"""What a decoder is, as frozen data: layers, experts, embeddings, and its exact parameters.

Pure: no torch, no process group. Read one from a Hugging Face config with
:func:`piper_kernels.pipeline.model_config.load_model`, or write one by hand.
Letters: H hidden_size, I intermediate_size, E num_experts, K top_k.
"""

from dataclasses import asdict, dataclass, field
from typing import Literal

from piper_kernels.config import RouterKind, check_choice
from piper_kernels.errors import require
from piper_kernels.pipeline.attention_description import Attention, require_size
from piper_kernels.strict_model import digest_of

Dtype = Literal["bfloat16", "float16", "float32"]
ELEMENT_BYTES: dict[str, int] = {"bfloat16": 2, "float16": 2, "float32": 4}
# a scale; a scale that is applied in fp32 (gpt-oss); a scale and a shift (PhiMoE)
NormKind = Literal["rms", "rms_fp32", "layer"]
LayerKind = Literal["dense", "moe"]


@dataclass(frozen=True, kw_only=True, slots=True)
class FeedForward:
    """A feed-forward network: dense, one expert, or the shared experts of a layer as one.

    Attributes:
        intermediate_size: I.
        num_matrices: 3 with a gate, 2 without.
        has_bias: every matrix has a bias.

    Example:
        >>> FeedForward(intermediate_size=4).num_parameters(8)
        96
    """

    intermediate_size: int
    num_matrices: int = 3
    has_bias: bool = False

    def __post_init__(self) -> None:
        require_size("FeedForward", "intermediate_size", self.intermediate_size)
        fits = self.num_matrices in (2, 3)
        require(fits, "FeedForward", "num_matrices", "be 2 or 3", self.num_matrices)

    @property
    def preact_size(self) -> int:
        """Width of the first projection's output: 2I with a gate, I without."""
        return (self.num_matrices - 1) * self.intermediate_size

    def num_parameters(self, hidden_size: int) -> int:
        """Weights and biases."""
        weights = self.num_matrices * hidden_size * self.intermediate_size
        return weights + self.has_bias * (self.preact_size + hidden_size)


@dataclass(frozen=True, kw_only=True, slots=True)
class SharedExperts:
    """What every token passes besides its routed experts.

    Attributes:
        network: all shared experts of a layer as one network.
        is_gated_by_token: its output is multiplied by ``sigmoid(x @ w)`` (Qwen2-MoE).
    """

    network: FeedForward
    is_gated_by_token: bool = False

    def num_parameters(self, hidden_size: int) -> int:
        """The network and its gate."""
        return self.network.num_parameters(hidden_size) + hidden_size * self.is_gated_by_token


@dataclass(frozen=True, kw_only=True, slots=True)
class Experts:
    """The experts of one layer and their router.

    Attributes:
        num_experts: E, routed experts.
        top_k: K.
        network: one expert.
        router: how logits become gates.
        has_router_bias: the router is affine (gpt-oss).
        is_router_fp32: its product is in fp32 whatever the model's type (DeepSeek, GLM).
        has_correction_bias: a buffer of E, not a parameter, takes part in the choice
            (DeepSeek-V3).
        shared: what every token passes besides, or ``None``.
    """

    num_experts: int
    top_k: int
    network: FeedForward
    router: RouterKind = "softmax_topk"
    has_router_bias: bool = False
    is_router_fp32: bool = False
    has_correction_bias: bool = False
    shared: SharedExperts | None = None

    def __post_init__(self) -> None:
        for size in ("num_experts", "top_k"):
            require_size("Experts", size, getattr(self, size))
        fits = self.top_k <= self.num_experts
        requirement = f"be at most num_experts = {self.num_experts}"
        require(fits, "Experts", "top_k", requirement, self.top_k)
        check_choice("Experts", "router", self.router, RouterKind)


@dataclass(frozen=True, kw_only=True, slots=True)
class Layer:
    """One decoder layer: attention, then one dense network or experts.

    Attributes:
        attention: of the layer.
        dense: the network of a dense layer; ``None`` in a layer with experts.
        experts: those of an MoE layer; ``None`` in a dense layer.
    """

    attention: Attention
    dense: FeedForward | None = None
    experts: Experts | None = None

    def __post_init__(self) -> None:
        fits = (self.dense is None) != (self.experts is None)
        given = f"dense={self.dense}, experts={self.experts}"
        require(fits, "Layer", "dense or experts", "be given, and not both", given)

    @property
    def kind(self) -> LayerKind:
        """``dense`` or ``moe``."""
        return "dense" if self.experts is None else "moe"


@dataclass(frozen=True, kw_only=True, slots=True)
class LayerParameters:
    """Parameters of one layer by part; buffers are not parameters.

    Attributes:
        attention: projections, inner norms, sinks.
        norms: the two of the layer.
        dense: the network of a dense layer.
        router: weight and bias.
        shared: shared experts and their gate.
        expert: one routed expert.
        num_experts: E.
        top_k: K.
    """

    attention: int
    norms: int
    dense: int = 0
    router: int = 0
    shared: int = 0
    expert: int = 0
    num_experts: int = 0
    top_k: int = 0

    @property
    def replicated(self) -> int:
        """What every rank of an expert-parallel group holds."""
        return self.attention + self.norms + self.dense + self.router + self.shared

    @property
    def experts(self) -> int:
        """All routed experts."""
        return self.num_experts * self.expert

    @property
    def total(self) -> int:
        """All."""
        return self.replicated + self.experts

    @property
    def active(self) -> int:
        """What one token meets: K of the E experts."""
        return self.replicated + self.top_k * self.expert


@dataclass(frozen=True, kw_only=True, slots=True)
class ModelDescription:
    """A decoder-only language model.

    Attributes:
        name: for people.
        family: Hugging Face's ``model_type``, or ``"piper"`` for one described by hand.
        vocab_size: rows of the embedding and of the head; 0 leaves both out, as papers do that
            count layers only.
        hidden_size: H.
        layers: in order.
        norm: RMS norms, where the scale is applied, or layer norms.
        has_tied_embeddings: the head is the embedding's weight.
        has_head_bias: the head is affine.
        dtype: of the parameters.
        source: where the numbers come from.

    Example:
        >>> from piper_kernels.pipeline.attention_description import GroupedAttention
        >>> network = FeedForward(intermediate_size=4)
        >>> layer = Layer(
        ...     attention=GroupedAttention(num_heads=2, num_kv_heads=1, head_dim=4),
        ...     experts=Experts(num_experts=4, top_k=1, network=network))
        >>> model = ModelDescription(
        ...     name="tiny", family="piper", vocab_size=10, hidden_size=8, layers=(layer,) * 2)
        >>> model.num_parameters, model.num_active_parameters
        (1416, 840)
    """

    name: str
    family: str
    vocab_size: int
    hidden_size: int
    layers: tuple[Layer, ...]
    norm: NormKind = "rms"
    has_tied_embeddings: bool = False
    has_head_bias: bool = False
    dtype: Dtype = "bfloat16"
    source: str = field(default="", compare=False)

    def __post_init__(self) -> None:
        require_size("ModelDescription", "vocab_size", self.vocab_size, least=0)
        require_size("ModelDescription", "hidden_size", self.hidden_size)
        fits = len(self.layers) > 0
        require(fits, "ModelDescription", "layers", "be at least one", len(self.layers))
        check_choice("ModelDescription", "norm", self.norm, NormKind)
        check_choice("ModelDescription", "dtype", self.dtype, Dtype)
        # equal layers become one object, so that a search can tell them apart without hashing them
        one_of: dict[Layer, Layer] = {}
        layers = tuple(one_of.setdefault(layer, layer) for layer in self.layers)
        object.__setattr__(self, "layers", layers)

    @property
    def num_layers(self) -> int:
        """Decoder layers."""
        return len(self.layers)

    @property
    def num_experts(self) -> int:
        """Most routed experts of a layer; 0 in a dense model."""
        return max((one.experts.num_experts for one in self.layers if one.experts), default=0)

    @property
    def element_bytes(self) -> int:
        """Bytes of one parameter."""
        return ELEMENT_BYTES[self.dtype]

    @property
    def norm_parameters(self) -> int:
        """Of one norm of width H."""
        return self.hidden_size * (2 if self.norm == "layer" else 1)

    @property
    def embedding_parameters(self) -> int:
        """Of the embedding."""
        return self.vocab_size * self.hidden_size

    @property
    def head_parameters(self) -> int:
        """Of the head, its tied weight not counted again."""
        weight = 0 if self.has_tied_embeddings else self.embedding_parameters
        return weight + self.vocab_size * self.has_head_bias

    def layer_parameters(self, index: int) -> LayerParameters:
        """Parameters of layer ``index`` by part."""
        return self.parameters_of(self.layers[index])

    def parameters_of(self, layer: Layer) -> LayerParameters:
        """Parameters of one of the layers by part."""
        hidden = self.hidden_size
        attention, norms = layer.attention.num_parameters(hidden), 2 * self.norm_parameters
        experts = layer.experts
        if experts is None:
            dense = layer.dense.num_parameters(hidden) if layer.dense else 0
            return LayerParameters(attention=attention, norms=norms, dense=dense)
        shared = experts.shared
        return LayerParameters(
            attention=attention,
            norms=norms,
            router=experts.num_experts * (hidden + experts.has_router_bias),
            shared=shared.num_parameters(hidden) if shared else 0,
            expert=experts.network.num_parameters(hidden),
            num_experts=experts.num_experts,
            top_k=experts.top_k,
        )

    @property
    def num_parameters(self) -> int:
        """All, each counted once."""
        layers = sum(self.layer_parameters(index).total for index in range(self.num_layers))
        return layers + self.embedding_parameters + self.head_parameters + self.norm_parameters

    @property
    def num_active_parameters(self) -> int:
        """What one token meets: K of the E experts of each layer; embedding and head whole."""
        layers = sum(self.layer_parameters(index).active for index in range(self.num_layers))
        return layers + self.embedding_parameters + self.head_parameters + self.norm_parameters

    def digest(self) -> str:
        """32 hexadecimal digits, equal for models that compute alike, whatever their names."""
        plain = {key: value for key, value in asdict(self).items() if key not in ("name", "source")}
        return digest_of("ModelDescription", repr(sorted(plain.items())))
