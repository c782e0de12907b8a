"""The Hugging Face families that the planner knows by heart: config -> description.

Pure: no torch, no process group, no transformers. What each class builds was read in transformers
5.24, ``models/<family>/modeling_<family>.py``; tests compare every family with the real class.
"""

from collections.abc import Callable

from piper_kernels.config import RouterKind
from piper_kernels.errors import require
from piper_kernels.pipeline.attention_description import (
    Attention,
    GroupedAttention,
    LatentAttention,
    QkNorm,
)
from piper_kernels.pipeline.config_reader import ConfigReader
from piper_kernels.pipeline.model_description import (
    Experts,
    FeedForward,
    Layer,
    ModelDescription,
    NormKind,
    SharedExperts,
)


def _grouped_attention(
    config: ConfigReader,
    *,
    has_qkv_bias: bool = False,
    has_output_bias: bool = False,
    qk_norm: QkNorm = "none",
    has_sinks: bool = False,
    has_partial_rotary: bool = False,
) -> GroupedAttention:
    """Attention under the usual keys; a head is ``hidden_size // num_attention_heads`` wide."""
    heads = config.size("num_attention_heads")
    return GroupedAttention(
        num_heads=heads,
        num_kv_heads=config.size("num_key_value_heads", default=heads),
        head_dim=config.size("head_dim", default=config.size("hidden_size") // heads),
        has_qkv_bias=has_qkv_bias,
        has_output_bias=has_output_bias,
        qk_norm=qk_norm,
        has_sinks=has_sinks,
        has_partial_rotary=has_partial_rotary,
    )


def _latent_attention(config: ConfigReader) -> LatentAttention:
    """Multi-head latent attention of DeepSeek."""
    rank = config.size("q_lora_rank", default=0)
    return LatentAttention(
        num_heads=config.size("num_attention_heads"),
        kv_lora_rank=config.size("kv_lora_rank"),
        q_lora_rank=rank or None,
        qk_nope_head_dim=config.size("qk_nope_head_dim"),
        qk_rope_head_dim=config.size("qk_rope_head_dim"),
        v_head_dim=config.size("v_head_dim"),
        has_bias=config.flag("attention_bias", default=False),
    )


def _experts(
    config: ConfigReader,
    size_key: str,
    router: RouterKind = "softmax_topk",
    *,
    has_bias: bool = False,
    is_router_fp32: bool = False,
    has_correction_bias: bool = False,
    shared: SharedExperts | None = None,
) -> Experts:
    """Experts under the usual keys."""
    network = FeedForward(intermediate_size=config.size(size_key), has_bias=has_bias)
    num_experts = config.size("num_experts", "num_local_experts", "n_routed_experts")
    top_k = config.size("num_experts_per_tok", "experts_per_token")
    requirement = f"be at most the {num_experts} experts"
    require(top_k <= num_experts, config.source, "num_experts_per_tok", requirement, top_k)
    return Experts(
        num_experts=num_experts,
        top_k=top_k,
        network=network,
        router=router,
        has_router_bias=has_bias,
        is_router_fp32=is_router_fp32,
        has_correction_bias=has_correction_bias,
        shared=shared,
    )


def _decoder(
    family: str,
    config: ConfigReader,
    layers: tuple[Layer, ...],
    *,
    norm: NormKind = "rms",
    has_head_bias: bool = False,
) -> ModelDescription:
    """The model around its layers."""
    return ModelDescription(
        name=family,
        family=family,
        vocab_size=config.size("vocab_size"),
        hidden_size=config.size("hidden_size"),
        layers=layers,
        norm=norm,
        has_tied_embeddings=config.flag("tie_word_embeddings", default=False),
        has_head_bias=has_head_bias,
        dtype=config.dtype(),
        source=config.source,
    )


def _all_sparse(
    family: str,
    config: ConfigReader,
    attention: Attention,
    experts: Experts,
    *,
    norm: NormKind = "rms",
    has_head_bias: bool = False,
) -> ModelDescription:
    """A model whose every layer has experts."""
    layer = Layer(attention=attention, experts=experts)
    layers = (layer,) * config.size("num_hidden_layers")
    return _decoder(family, config, layers, norm=norm, has_head_bias=has_head_bias)


def _mixtral(config: ConfigReader) -> ModelDescription:
    experts = _experts(config, "intermediate_size")
    return _all_sparse("mixtral", config, _grouped_attention(config), experts)


def _olmoe(config: ConfigReader) -> ModelDescription:
    bias = config.flag("attention_bias", default=False)
    attention = _grouped_attention(
        config, has_qkv_bias=bias, has_output_bias=bias, qk_norm="all_heads"
    )
    return _all_sparse("olmoe", config, attention, _experts(config, "intermediate_size"))


def _granitemoe(config: ConfigReader) -> ModelDescription:
    bias = config.flag("attention_bias", default=False)
    attention = _grouped_attention(config, has_qkv_bias=bias, has_output_bias=bias)
    experts = _experts(config, "intermediate_size", "topk_softmax")
    return _all_sparse("granitemoe", config, attention, experts)


def _gpt_oss(config: ConfigReader) -> ModelDescription:
    bias = config.flag("attention_bias", default=True)
    attention = _grouped_attention(config, has_qkv_bias=bias, has_output_bias=bias, has_sinks=True)
    experts = _experts(config, "intermediate_size", "topk_softmax", has_bias=True)
    return _all_sparse("gpt_oss", config, attention, experts, norm="rms_fp32")


def _phimoe(config: ConfigReader) -> ModelDescription:
    bias = config.flag("attention_bias", default=False)
    attention = _grouped_attention(config, has_qkv_bias=bias, has_output_bias=bias)
    # sparsemixer: K softmaxes over masked logits; the nearest kind, and no parameter differs
    experts = _experts(config, "intermediate_size", "softmax_topk")
    has_head_bias = config.flag("lm_head_bias", default=False)
    return _all_sparse(
        "phimoe", config, attention, experts, norm="layer", has_head_bias=has_head_bias
    )


def _sparse_steps(
    family: str, config: ConfigReader, attention: Attention, shared: SharedExperts | None
) -> ModelDescription:
    """Qwen's pattern: dense layers by list, and all but every n-th."""
    step = config.size("decoder_sparse_step", default=1)
    always_dense = config.sizes("mlp_only_layers")
    has_experts = config.size("num_experts", "num_local_experts", least=0) > 0
    pattern = [
        has_experts and index not in always_dense and (index + 1) % step == 0
        for index in range(config.size("num_hidden_layers"))
    ]
    # a width that no layer uses need not make sense (0 in Qwen3's MoE checkpoints)
    sparse = dense = None
    if any(pattern):
        experts = _experts(config, "moe_intermediate_size", shared=shared)
        sparse = Layer(attention=attention, experts=experts)
    if not all(pattern):
        network = FeedForward(intermediate_size=config.size("intermediate_size"))
        dense = Layer(attention=attention, dense=network)
    layers = tuple(layer for is_sparse in pattern if (layer := sparse if is_sparse else dense))
    return _decoder(family, config, layers)


def _qwen2_moe(config: ConfigReader) -> ModelDescription:
    attention = _grouped_attention(config, has_qkv_bias=config.flag("qkv_bias", default=True))
    network = FeedForward(intermediate_size=config.size("shared_expert_intermediate_size"))
    shared = SharedExperts(network=network, is_gated_by_token=True)
    return _sparse_steps("qwen2_moe", config, attention, shared)


def _qwen3_moe(config: ConfigReader) -> ModelDescription:
    bias = config.flag("attention_bias", default=False)
    attention = _grouped_attention(config, has_qkv_bias=bias, has_output_bias=bias, qk_norm="head")
    return _sparse_steps("qwen3_moe", config, attention, None)


def _dense_first(
    family: str,
    config: ConfigReader,
    attention: Attention,
    router: RouterKind,
    *,
    has_correction_bias: bool,
    has_mlp_bias: bool = False,
) -> ModelDescription:
    """DeepSeek's pattern: the first layers dense, shared experts beside the routed ones."""
    num_layers = config.size("num_hidden_layers")
    num_dense = min(config.size("first_k_dense_replace", default=0, least=0), num_layers)
    num_shared = config.size("n_shared_experts", default=0, least=0)
    shared = None
    if num_shared:
        width = num_shared * config.size("moe_intermediate_size")
        network = FeedForward(intermediate_size=width, has_bias=has_mlp_bias)
        shared = SharedExperts(network=network)
    layers: tuple[Layer, ...] = ()
    if num_dense:
        width = config.size("intermediate_size")
        dense = FeedForward(intermediate_size=width, has_bias=has_mlp_bias)
        layers += (Layer(attention=attention, dense=dense),) * num_dense
    if num_dense < num_layers:
        experts = _experts(
            config,
            "moe_intermediate_size",
            router,
            is_router_fp32=True,
            has_correction_bias=has_correction_bias,
            shared=shared,
        )
        layers += (Layer(attention=attention, experts=experts),) * (num_layers - num_dense)
    return _decoder(family, config, layers)


def _deepseek_v2(config: ConfigReader) -> ModelDescription:
    return _dense_first(
        "deepseek_v2",
        config,
        _latent_attention(config),
        "softmax_topk",
        has_correction_bias=False,
        has_mlp_bias=config.flag("mlp_bias", default=False),
    )


def _deepseek_v3(config: ConfigReader) -> ModelDescription:
    attention = _latent_attention(config)
    return _dense_first("deepseek_v3", config, attention, "sigmoid_topk", has_correction_bias=True)


def _glm4_moe(config: ConfigReader) -> ModelDescription:
    attention = _grouped_attention(
        config,
        has_qkv_bias=config.flag("attention_bias", default=False),
        qk_norm="head" if config.flag("use_qk_norm", default=False) else "none",
        has_partial_rotary=True,
    )
    return _dense_first("glm4_moe", config, attention, "sigmoid_topk", has_correction_bias=True)


FAMILIES: dict[str, Callable[[ConfigReader], ModelDescription]] = {
    "mixtral": _mixtral,
    "qwen2_moe": _qwen2_moe,
    "qwen3_moe": _qwen3_moe,
    "olmoe": _olmoe,
    "granitemoe": _granitemoe,
    "deepseek_v2": _deepseek_v2,
    "deepseek_v3": _deepseek_v3,
    "glm4_moe": _glm4_moe,
    "gpt_oss": _gpt_oss,
    "phimoe": _phimoe,
}
