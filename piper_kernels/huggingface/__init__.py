"""The bridge to Hugging Face transformers: needs transformers 5.17 or newer.

Importing this package registers the experts function ``"piper"`` for every model family on
transformers' experts registry::

    import piper_kernels.huggingface
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(path, experts_implementation="piper")
    model.set_experts_implementation("eager")  # and back, at any time

and, where transformers has one (5.24), the expert-parallel implementation of the same name.

For some families it also puts whole :class:`piper_kernels.PiperMoE` layers into a model
(:func:`replace_moe_blocks`), and it converts expert weights of checkpoints (:func:`fuse_folder`).
"""

from piper_kernels.huggingface.blocks import replace_moe_blocks, restore_moe_blocks
from piper_kernels.huggingface.checkpoint_folders import fuse_folder, split_folder
from piper_kernels.huggingface.checkpoint_names import (
    MIXTRAL_NAMES,
    NEMOTRON_NAMES,
    QWEN_NAMES,
    ExpertNames,
)
from piper_kernels.huggingface.checkpoints import fuse_experts, split_experts
from piper_kernels.huggingface.expert_parallel import register_expert_parallel
from piper_kernels.huggingface.experts_function import explain_experts_function
from piper_kernels.huggingface.families import FAMILIES, read_config
from piper_kernels.huggingface.lora import check_lora, lora_targets
from piper_kernels.huggingface.registry import EXPERTS_IMPLEMENTATION, register_experts_function

__all__ = [
    "EXPERTS_IMPLEMENTATION",
    "FAMILIES",
    "MIXTRAL_NAMES",
    "NEMOTRON_NAMES",
    "QWEN_NAMES",
    "ExpertNames",
    "check_lora",
    "explain_experts_function",
    "fuse_experts",
    "fuse_folder",
    "lora_targets",
    "read_config",
    "register_expert_parallel",
    "register_experts_function",
    "replace_moe_blocks",
    "restore_moe_blocks",
    "split_experts",
    "split_folder",
]

register_experts_function()
register_expert_parallel()
