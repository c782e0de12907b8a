"""Small built-in sizes of well-known model types, in the words of their own configurations.

All share one size: width 128, 4 layers, 8 experts of width 128, 2 per token. They are meant to
learn a text of some hundred kilobytes on a laptop, in the architecture of the big ones.
"""

from typing import Any

_WIDTH = {
    "hidden_size": 128,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 4,
    "max_position_embeddings": 2048,
}
_EXPERTS = {"num_experts": 8, "num_experts_per_tok": 2, "norm_topk_prob": True}
_LOCAL_EXPERTS = {"num_local_experts": 8, "num_experts_per_tok": 2}
_MOE_WIDTH = {"intermediate_size": 256, "moe_intermediate_size": 128}
_ROUTED_EXPERTS = {
    **_MOE_WIDTH,
    "n_routed_experts": 8,
    "num_experts_per_tok": 2,
    "n_shared_experts": 1,
    "n_group": 1,
    "topk_group": 1,
}
_LATENT_ATTENTION = {
    "q_lora_rank": 64,
    "kv_lora_rank": 64,
    "qk_rope_head_dim": 16,
    "qk_nope_head_dim": 16,
    "v_head_dim": 32,
}

FAMILIES: dict[str, dict[str, Any]] = {
    "deepseek_v2": {
        **_WIDTH,
        **_ROUTED_EXPERTS,
        **_LATENT_ATTENTION,
        "first_k_dense_replace": 1,
    },
    "deepseek_v3": {
        **_WIDTH,
        **_ROUTED_EXPERTS,
        **_LATENT_ATTENTION,
        "first_k_dense_replace": 1,
    },
    "ernie4_5_moe": {
        **_WIDTH,
        **_MOE_WIDTH,
        "moe_num_experts": 8,
        "moe_k": 2,
        "moe_num_shared_experts": 1,
        "moe_layer_start_index": 0,
    },
    "flex_olmo": {**_WIDTH, **_EXPERTS, "intermediate_size": 128},
    "glm4_moe": {**_WIDTH, **_ROUTED_EXPERTS, "head_dim": 32, "first_k_dense_replace": 1},
    "gpt_oss": {**_WIDTH, **_LOCAL_EXPERTS, "intermediate_size": 128, "head_dim": 32},
    "granitemoe": {**_WIDTH, **_LOCAL_EXPERTS, "intermediate_size": 128},
    "minimax_m2": {**_WIDTH, **_LOCAL_EXPERTS, "intermediate_size": 128, "head_dim": 32},
    "mixtral": {**_WIDTH, **_LOCAL_EXPERTS, "intermediate_size": 128, "head_dim": 32},
    "nemotron_h": {
        **_WIDTH,
        **_ROUTED_EXPERTS,
        "layers_block_type": ["mamba", "moe", "attention", "moe"],
        "mamba_num_heads": 8,
        "mamba_head_dim": 16,
        "ssm_state_size": 16,
        "n_groups": 1,
        "moe_shared_expert_intermediate_size": 128,
        "head_dim": 32,
    },
    "olmoe": {**_WIDTH, **_EXPERTS, "intermediate_size": 128},
    "phimoe": {**_WIDTH, **_LOCAL_EXPERTS, "intermediate_size": 128},
    "qwen2_moe": {
        **_WIDTH,
        **_EXPERTS,
        **_MOE_WIDTH,
        "shared_expert_intermediate_size": 128,
    },
    "qwen3_moe": {**_WIDTH, **_EXPERTS, **_MOE_WIDTH, "head_dim": 32},
    "qwen3_next": {
        **_WIDTH,
        **_EXPERTS,
        **_MOE_WIDTH,
        "shared_expert_intermediate_size": 128,
        "head_dim": 32,
        "linear_num_key_heads": 2,
        "linear_num_value_heads": 4,
        "linear_key_head_dim": 32,
        "linear_value_head_dim": 32,
    },
}
