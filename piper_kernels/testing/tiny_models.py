"""Tiny transformers models of every family whose experts are on the experts registry.

The families are found by reading transformers' modeling files, so a new one is met by the tests
without anybody listing it. Imported by its own name only: the other helpers need no transformers.
"""

import ast
import importlib
import inspect
from functools import cache
from pathlib import Path
from typing import Any

import torch
import transformers
from torch import Tensor, nn

from piper_kernels.errors import did_you_mean, require
from piper_kernels.huggingface import EXPERTS_IMPLEMENTATION
from piper_kernels.huggingface.layouts import is_experts_module

# One size per meaning; a config takes those that it knows. Unequal sizes, so that a swap shows.
SIZES: dict[str, Any] = {
    "vocab_size": 64,
    "unpadded_vocab_size": 64,
    "hidden_size": 32,
    "moe_hidden_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 4,
    "head_dim": 8,
    "global_head_dim": 8,
    "intermediate_size": 24,
    "moe_intermediate_size": 20,
    "shared_expert_intermediate_size": 12,
    "shared_intermediate_size": 12,
    "moe_shared_expert_intermediate_size": 12,
    "num_experts": 8,
    "num_local_experts": 8,
    "n_routed_experts": 8,
    "moe_num_experts": 8,
    "num_experts_per_tok": 2,
    "num_experts_per_token": 2,
    "moe_topk": 2,
    "moe_top_k": 2,
    "top_k_experts": 2,
    "moe_k": 2,
    "n_shared_experts": 1,
    "num_shared_experts": 1,
    "n_group": 1,
    "topk_group": 1,
    "first_k_dense_replace": 1,
    "moe_layer_start_index": 0,
    # latent attention and its indexer
    "kv_lora_rank": 8,
    "q_lora_rank": 8,
    "qk_rope_head_dim": 4,
    "qk_nope_head_dim": 8,
    "v_head_dim": 8,
    "qk_head_dim": 12,
    "index_n_heads": 2,
    "index_head_dim": 8,
    "index_topk": 4,
    # linear attention and state space layers
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "linear_key_head_dim": 8,
    "linear_value_head_dim": 8,
    "linear_head_dim": 8,
    "linear_num_heads": 4,
    "mamba_num_heads": 8,
    "mamba_head_dim": 8,
    "mamba_n_heads": 8,
    "mamba_d_head": 8,
    "mamba_d_state": 8,
    "mamba_n_groups": 1,
    "mamba_dt_rank": 4,
    "ssm_state_size": 8,
    "n_groups": 1,
    "max_position_embeddings": 64,
    "pad_token_id": None,
    "bos_token_id": 1,
    "eos_token_id": 2,
}

_HYBRID = {"layer_types": ["linear_attention", "full_attention"]}
_ONE_SPARSE = {"mlp_layer_types": ["dense", "sparse"]}
# a limit for each layer
_CLAMPED = {"swiglu_limits": [0.7, 0.7]}
_MROPE = {"rope_type": "default", "rope_theta": 1e4, "mrope_section": [1, 1, 2]}
# What a family needs beyond the common sizes, mostly one layer of each of its kinds.
SETTINGS: dict[str, dict[str, Any]] = {
    "axk1": {"head_dim": 4},
    "bailing_hybrid": _HYBRID | _ONE_SPARSE | _CLAMPED,
    "beam": _ONE_SPARSE,
    "deepseek_ocr2": _ONE_SPARSE,
    "deepseek_v3": {"head_dim": 4, "n_group": 2, "topk_group": 1},
    "deepseek_v4": {"mlp_layer_types": ["hash_moe", "moe"]},
    "ernie4_5_vl_moe": {"moe_intermediate_size": [20, 12], "rope_parameters": _MROPE},
    "flint": {"decoder_sparse_step": 1, "mlp_only_layers": []},
    "gemma4": {
        "enable_moe_block": True,
        "hidden_size_per_layer_input": 0,
        "num_global_key_value_heads": 4,
    },
    "glm4v_moe": {"rope_parameters": _MROPE | {"partial_rotary_factor": 1.0}},
    "glm5_next": _HYBRID | _ONE_SPARSE | {"index_kpool": 2, "qk_rope_head_dim": 0, "head_dim": 0},
    "granitemoehybrid": {"layer_types": ["mamba", "attention"]},
    "hy_v4_vl": {"qk_rope_head_dim": 8, "rope_parameters": _MROPE},
    "jamba": {
        "attn_layer_period": 2,
        "attn_layer_offset": 1,
        "expert_layer_period": 2,
        "expert_layer_offset": 1,
        "use_mamba_kernels": False,
    },
    "kimi_linear": _HYBRID | _ONE_SPARSE,
    # keys and values are rounded in blocks of 16
    "kolibri1_1": {
        "head_dim": 16,
        "num_key_value_heads": 2,
        "index_num_heads": 1,
        "layer_types": ["indexed_attention", "sliding_attention"],
        "mlp_only_layers": [],
    },
    "lfm2_moe": {"layer_types": ["conv", "full_attention"], "num_dense_layers": 1},
    "longcat_flash": {"head_dim": 4, "num_layers": 1, "zero_expert_num": 2},
    "mimo_v2_flash": {"num_key_value_heads": 2},
    "qwen3_5_moe": _HYBRID,
    "qwen3_next": _HYBRID,
    "qwen4_exp": _HYBRID
    | {
        "indexer_n_heads": 2,
        "indexer_kv_heads": 1,
        "indexer_head_dim": 8,
        "indexer_budget": 8,
        "indexer_compress_ratio": 2,
    },
    "step3p7": _ONE_SPARSE | _CLAMPED | {"pad_token_id": 0, "sliding_window": 8},
    "zaya": {"num_experts_per_tok": 1, "num_key_value_heads": 2},
}


@cache
def experts_classes() -> dict[str, tuple[str, ...]]:
    """Family -> names of its classes decorated with ``@use_experts_implementation``.

    Example:
        >>> experts_classes()["mixtral"]
        ('MixtralExperts',)
    """
    found: dict[str, tuple[str, ...]] = {}
    models = Path(transformers.__file__).parent / "models"
    for path in sorted(models.glob("*/modeling_*.py")):
        source = path.read_text(encoding="utf-8")
        if "@use_experts_implementation" not in source:
            continue
        found[path.parent.name] = tuple(
            node.name
            for node in ast.parse(source).body
            if isinstance(node, ast.ClassDef)
            and any("use_experts_implementation" in ast.unparse(d) for d in node.decorator_list)
        )
    return found


def modeling_module(family: str) -> Any:
    """``transformers.models.<family>.modeling_<family>``."""
    return importlib.import_module(f"transformers.models.{family}.modeling_{family}")


def model_class(family: str) -> Any:
    """The family's causal language model, else its text model, else its base model."""
    module = modeling_module(family)
    names = [name for name in module.__all__ if not name.endswith("PreTrainedModel")]
    for ending in ("ForCausalLM", "TextModel", "Model"):
        fitting = [name for name in names if name.endswith(ending)]
        if fitting:
            return getattr(module, fitting[0])
    raise LookupError(f"{family} has no causal language model and no base model: {names}")


def tiny_config(family: str, **settings: Any) -> Any:
    """The family's config at ``SIZES``.

    Args:
        family: folder of the family below ``transformers/models``.
        settings: what to change.

    Raises:
        ConfigError: the family's config does not know a setting.

    Example:
        >>> tiny_config("mixtral", num_experts_per_tok=1).num_experts_per_tok
        1
    """
    config_class = model_class(family).config_class
    aliases = config_class.attribute_map
    known = set(config_class().to_dict()) | set(aliases)
    for name in settings:
        remedy = did_you_mean(name, known)
        require(name in known, "tiny_config", name, f"be a setting of {family}", name, remedy)
    special = SETTINGS.get(family, {}) | settings
    # two names of one setting: the special one counts
    taken = {aliases.get(name, name) for name in special}
    common = {
        name: size
        for name, size in SIZES.items()
        if name in known and aliases.get(name, name) not in taken
    }
    return config_class(**common, **special)


def _build(module_class: Any, config: Any, **options: Any) -> Any:
    """A module with random parameters of unit gain, the same at every call.

    transformers' own initialisation is so small that a wrong expert hardly shows in the logits.
    """
    with torch.random.fork_rng():
        torch.manual_seed(0)
        module = module_class(config, **options)
        for parameter in module.parameters():
            if parameter.ndim >= 2:
                parameter.data.normal_(0.0, parameter.shape[-1] ** -0.5)
            elif not parameter.data.any():
                # biases start at zero, where a forgotten one would not show
                parameter.data.normal_(0.0, 0.1)
        for name, buffer in module.named_buffers():
            # hash routers: token id -> expert ids
            if name.endswith("tid2eid"):
                buffer.random_(SIZES["num_experts"])
    return module


def tiny_experts(
    family: str,
    class_name: str,
    *,
    experts: str = EXPERTS_IMPLEMENTATION,
    dtype: torch.dtype = torch.float64,
) -> Any:
    """One experts module of a family, outside any model, with random weights.

    Args:
        family: folder of the family below ``transformers/models``.
        class_name: one of ``experts_classes()[family]``.
        experts: the experts implementation to select.
        dtype: of the parameters.
    """
    config = tiny_config(family)
    config._experts_implementation = experts
    widths = getattr(config, "moe_intermediate_size", None)
    # one width per modality: ernie4_5_vl_moe hands each experts module its own
    options: dict[str, Any] = {"intermediate_size": widths[0]} if isinstance(widths, list) else {}
    experts_class = getattr(modeling_module(family), class_name)
    # the limits of a clamp differ by layer in some families
    if "layer_idx" in inspect.signature(experts_class).parameters:
        options["layer_idx"] = 0
    return _build(experts_class, config, **options).to(dtype)


def tiny_model(
    family: str, *, experts: str = "eager", dtype: torch.dtype = torch.float32, **settings: Any
) -> Any:
    """A model of ``tiny_config(family)``, in eval mode, with random weights.

    Args:
        family: folder of the family below ``transformers/models``.
        experts: the experts implementation to select.
        dtype: of parameters and buffers.
        settings: passed on to the config.
    """
    config = tiny_config(family, **settings)
    config._experts_implementation = experts
    return _build(model_class(family), config).to(dtype).eval()


def tiny_vision_language_model(**text_settings: Any) -> Any:
    """A Qwen3-VL-MoE whose experts, and whose loss coefficient, belong to ``config.text_config``.

    Args:
        text_settings: passed on to the text config.
    """
    module = modeling_module("qwen3_vl_moe")
    rope = {
        "rope_parameters": {"rope_type": "default", "rope_theta": 1e4, "mrope_section": [2, 1, 1]}
    }
    vision = {
        "depth": 1,
        "hidden_size": 16,
        "intermediate_size": 16,
        "num_heads": 2,
        "out_hidden_size": SIZES["hidden_size"],
        "num_position_embeddings": 16,
        "deepstack_visual_indexes": [0],
    }
    text = tiny_config("qwen3_vl_moe", **text_settings).to_dict() | rope
    config = module.Qwen3VLMoeConfig(text_config=text, vision_config=vision)
    return _build(module.Qwen3VLMoeForConditionalGeneration, config).eval()


def experts_modules(model: nn.Module) -> list[nn.Module]:
    """The modules of ``model`` that look their forward up on the experts registry."""
    return [module for module in model.modules() if is_experts_module(module)]


def first_output(output: Any) -> Tensor:
    """Logits, or the last hidden state of a base model."""
    logits = getattr(output, "logits", None)
    return output.last_hidden_state if logits is None else logits
