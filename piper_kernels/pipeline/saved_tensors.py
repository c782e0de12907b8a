"""What each part of a model keeps for its backward, tensor by tensor, in bytes per token.

Pure: no torch, no process group. The lists follow transformers 5.24's modules and Piper's experts
op, and are held to real runs by ``bench.validate_memory``; with fused norms, dropout and half
attention they are those of Korthikanti et al. 2022 (arXiv 2205.05198, section 4), whose layer is
``s b h (34 + 5 a s / h)`` bytes. Letters: H hidden_size, I intermediate_size, E num_experts, K
top_k, S seq_len.
"""

from typing import NamedTuple

from piper_kernels.cost.sizes import EXPERT_ID_BYTES, GATE_BYTES, INDEX_BYTES
from piper_kernels.pipeline.attention_description import Attention, GroupedAttention
from piper_kernels.pipeline.memory_settings import ActivationRules
from piper_kernels.pipeline.model_description import (
    Experts,
    FeedForward,
    Layer,
    ModelDescription,
    NormKind,
)

FP32_BYTES = 4
TOKEN_ID_BYTES = 8


class SavedTensor(NamedTuple):
    """One tensor that is kept from forward to backward.

    Attributes:
        name: ``<part>.<what>``.
        bytes_per_token: of one token.
        is_cut: tensor parallelism leaves a rank its share only.
        is_core: belongs to the attention's core, which selective checkpointing computes anew.
    """

    name: str
    bytes_per_token: float
    is_cut: bool = False
    is_core: bool = False


def saved_by_norm(
    name: str, width: int, kind: NormKind, element: int, rules: ActivationRules, num_norms: int = 1
) -> list[SavedTensor]:
    """A norm of ``width``, of which a token passes ``num_norms`` side by side.

    Composed RMS norms keep an fp32 copy of their input, the reciprocal root and the normalised
    values; fused ones and layer norms their input and a few numbers.

    Example:
        >>> [saved.bytes_per_token for saved in saved_by_norm("n", 8, "rms", 2, ActivationRules())]
        [32, 4, 16]
    """
    whole = width * num_norms
    if kind == "layer" or rules.has_fused_norms:
        return [SavedTensor(f"{name}.input", whole * element)]
    scaled = FP32_BYTES if kind == "rms_fp32" else element
    return [
        SavedTensor(f"{name}.input_fp32", whole * FP32_BYTES),
        SavedTensor(f"{name}.reciprocal_root", num_norms * FP32_BYTES),
        SavedTensor(f"{name}.normalised", whole * scaled),
    ]


def _scores(attention: Attention, seq_len: int, element: int, rules: ActivationRules) -> float:
    """Bytes of one token's attention weights, all heads together."""
    has_sinks = isinstance(attention, GroupedAttention) and attention.has_sinks
    heads, columns = attention.num_heads, seq_len + has_sinks
    match rules.attention:
        case "flash":
            return heads * FP32_BYTES
        case "math":
            return heads * columns * FP32_BYTES
        case "half":
            dropped = (1 + element) * rules.has_dropout
            return heads * columns * (element + dropped)
        case "eager" if has_sinks:
            # the largest logit is taken off first, and the softmax stays in the model's type
            return heads * (columns * element + EXPERT_ID_BYTES)
        case _:
            # the softmax is in fp32; a shorter type gets a copy
            return heads * columns * (FP32_BYTES + (element if element < FP32_BYTES else 0))


def saved_by_attention(
    model: ModelDescription, attention: Attention, seq_len: int, rules: ActivationRules
) -> list[SavedTensor]:
    """An attention: its input, what its inner norms keep, queries, keys, values, weights, output.

    Args:
        model: gives width and type.
        attention: of the layer.
        seq_len: S.
        rules: kernels.
    """
    element, hidden = model.element_bytes, model.hidden_size
    saved = [SavedTensor("attention.input", hidden * element)]
    heads, kernel = attention.num_heads, rules.attention
    v_size = heads * attention.v_dim
    if isinstance(attention, GroupedAttention):
        widths = {"queries": attention.q_size, "keys": attention.kv_size}
        sides = {"queries": heads, "keys": attention.num_kv_heads}
        for side, width in widths.items() if attention.qk_norm != "none" else ():
            count = sides[side] if attention.qk_norm == "head" else 1
            norm = saved_by_norm(
                f"attention.{side}_norm", width // count, "rms", element, rules, count
            )
            saved += [one._replace(is_cut=True) for one in norm]
        # a fused kernel reads grouped keys and values as they are; others repeat them
        kv_size = attention.kv_size if kernel == "flash" else attention.q_size
        sizes = (attention.q_size, kv_size, kv_size)
    else:
        for width in attention.norm_sizes:
            saved += saved_by_norm("attention.latent_norm", width, "rms", element, rules)
            saved.append(SavedTensor("attention.latent", width * element))
        sizes = (attention.q_size, attention.q_size, v_size)
    inner = FP32_BYTES if kernel == "math" else element
    names = ("queries", "keys", "values")
    saved += [
        SavedTensor(f"attention.{name}", size * inner, is_cut=True)
        for name, size in zip(names, sizes, strict=True)
    ]
    weights = _scores(attention, seq_len, element, rules)
    saved.append(SavedTensor("attention.weights", weights, is_cut=True, is_core=True))
    saved.append(SavedTensor("attention.output", v_size * element, is_cut=True))
    is_partial = isinstance(attention, GroupedAttention) and attention.has_partial_rotary
    if kernel == "flash" and is_partial:
        # joining the rotated part to the rest changes the layout, so the output is copied
        copied = SavedTensor("attention.output_copy", v_size * element, is_cut=True)
        saved.append(copied)
    if rules.has_dropout:
        saved.append(SavedTensor("attention.dropout", hidden))
    return saved


def saved_by_network(
    name: str, network: FeedForward, element: int, rules: ActivationRules
) -> list[SavedTensor]:
    """A feed-forward network that every token passes, its input apart.

    Composed, a gated one keeps gate, activated gate, up and their product.
    """
    width = network.intermediate_size * element
    if rules.has_fused_activations or network.num_matrices == 2:
        names = {"preactivation": network.preact_size * element, "activation": width}
    else:
        names = dict.fromkeys(("gate", "activated_gate", "up", "activation"), width)
    return [SavedTensor(f"{name}.{what}", size, is_cut=True) for what, size in names.items()]


def saved_by_experts(
    model: ModelDescription, experts: Experts, rules: ActivationRules, ep_size: int
) -> list[SavedTensor]:
    """Router, routed experts and shared experts of a layer, their common input apart.

    Args:
        model: gives width and type.
        experts: of the layer.
        rules: the save dial and the imbalance.
        ep_size: with more than one rank the rows that arrive are kept as well.
    """
    element, hidden, top_k = model.element_bytes, model.hidden_size, experts.top_k
    saved = []
    if experts.is_router_fp32 and element < FP32_BYTES:
        saved.append(SavedTensor("router.input_fp32", hidden * FP32_BYTES))
    if experts.router != "topk_softmax":
        scores = experts.num_experts * (FP32_BYTES + experts.has_correction_bias)
        saved.append(SavedTensor("router.scores", scores))
    saved.append(SavedTensor("router.choice", top_k * (EXPERT_ID_BYTES + 2 * GATE_BYTES)))
    rows = top_k * rules.imbalance
    saved.append(SavedTensor("experts.maps", 3 * rows * INDEX_BYTES))
    if ep_size > 1:
        saved.append(SavedTensor("experts.rows", rows * hidden * element))
    if rules.save == "preact":
        size = rows * experts.network.preact_size * element
        saved.append(SavedTensor("experts.preactivation", size, is_cut=True))
    if experts.shared is not None:
        saved += saved_by_network("shared", experts.shared.network, element, rules)
        if experts.shared.is_gated_by_token:
            saved.append(SavedTensor("shared.output", (hidden + 1) * element))
    return saved


def saved_by_layer(
    model: ModelDescription, layer: Layer, seq_len: int, rules: ActivationRules, ep_size: int = 1
) -> list[SavedTensor]:
    """Everything that one layer keeps.

    Example:
        Korthikanti et al. 2022, equation 1: a layer of GPT keeps ``34 h + 5 a s`` bytes a token.

        >>> from piper_kernels.pipeline.attention_description import GroupedAttention
        >>> attention = GroupedAttention(num_heads=64, num_kv_heads=64, head_dim=96)
        >>> layer = Layer(
        ...     attention=attention, dense=FeedForward(intermediate_size=24576, num_matrices=2))
        >>> model = ModelDescription(name="22B", family="gpt", vocab_size=51200, hidden_size=6144,
        ...     layers=(layer,), norm="layer", dtype="float16")
        >>> rules = ActivationRules(attention="half", has_fused_norms=True, has_dropout=True)
        >>> sum(one.bytes_per_token for one in saved_by_layer(model, layer, 2048, rules))
        864256
        >>> 34 * 6144 + 5 * 64 * 2048
        864256
    """
    element, hidden = model.element_bytes, model.hidden_size
    saved = saved_by_norm("input_norm", hidden, model.norm, element, rules)
    saved += saved_by_attention(model, layer.attention, seq_len, rules)
    saved += saved_by_norm("second_norm", hidden, model.norm, element, rules)
    saved.append(SavedTensor("network.input", hidden * element))
    if layer.dense is not None:
        saved += saved_by_network("network", layer.dense, element, rules)
    if layer.experts is not None:
        saved += saved_by_experts(model, layer.experts, rules, ep_size)
    if rules.has_dropout:
        saved.append(SavedTensor("network.dropout", hidden))
    return saved


def saved_by_rotary(model: ModelDescription) -> list[SavedTensor]:
    """The two rotary tables that all layers of a stage share."""
    width = model.layers[0].attention.rotary_dim
    return [SavedTensor("rotary.tables", 2 * width * model.element_bytes)]


def saved_by_head(model: ModelDescription, rules: ActivationRules) -> list[SavedTensor]:
    """Last norm, head and loss: its log-probabilities are in fp32."""
    if model.vocab_size == 0:
        return []
    element, hidden = model.element_bytes, model.hidden_size
    return [
        *saved_by_norm("last_norm", hidden, model.norm, element, rules),
        SavedTensor("head.input", hidden * element),
        SavedTensor("loss.log_probabilities", model.vocab_size * FP32_BYTES, is_cut=True),
        SavedTensor("loss.labels", TOKEN_ID_BYTES),
    ]


def bytes_per_token(saved: list[SavedTensor], rules: ActivationRules, tp_size: int = 1) -> float:
    """What one of ``tp_size`` ranks keeps of ``saved``, for one token.

    Example:
        >>> saved = [SavedTensor("whole", 8.0), SavedTensor("cut", 8.0, is_cut=True)]
        >>> bytes_per_token(saved, ActivationRules(), tp_size=4)
        10.0
        >>> bytes_per_token(saved, ActivationRules(is_sequence_parallel=True), tp_size=4)
        4.0
    """
    is_all_cut = rules.is_sequence_parallel
    return sum(one.bytes_per_token / (tp_size if one.is_cut or is_all_cut else 1) for one in saved)
