"""What real models hold: bytes of parameters and states, and of what autograd keeps.

Small ones run for real; at full size the same code runs on fake tensors, which have shapes, types
and storages but no memory.
"""

import contextlib
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from piper_kernels.pipeline.memory_settings import AttentionKernel
from piper_kernels.testing.tiny_models import model_class, tiny_config

CAUSAL = "piper_causal_sdpa"
# sizes at which index tensors do not dominate, and every size differs
SMALL = {
    "hidden_size": 128,
    "vocab_size": 512,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
}
SMALL_HEADS = {
    "moe_intermediate_size": 96,
    "kv_lora_rank": 32,
    "q_lora_rank": 48,
    "v_head_dim": 32,
    "qk_nope_head_dim": 32,
    "qk_rope_head_dim": 16,
    "qk_head_dim": 48,
}


def small_config(family: str) -> Any:
    """A config of a family that runs in milliseconds, with grouped heads where it can have them."""
    is_latent = family.startswith("deepseek")
    config = tiny_config(family, **SMALL, num_key_value_heads=4 if is_latent else 2)
    for name, size in SMALL_HEADS.items():
        if hasattr(config, name):
            setattr(config, name, size)
    if is_latent:
        config.head_dim = SMALL_HEADS["qk_rope_head_dim"]
    return config


def attention_kernel(family: str, wanted: str) -> AttentionKernel:
    """What a CPU runs when ``wanted`` is asked for.

    Its fused attention takes no heads whose values differ in width from their queries (DeepSeek),
    and gpt-oss has no fused one.
    """
    if wanted == "flash" and family == "gpt_oss":
        return "eager"
    if wanted == "flash" and family.startswith("deepseek"):
        return "math"
    return cast(AttentionKernel, wanted)


def _causal_sdpa(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    scaling: float | None = None,
    **kwargs: Any,
) -> tuple[Tensor, None]:
    """The call that transformers makes outside of tracing: causal, no mask, grouped heads as is."""
    del attention_mask, kwargs
    output = torch.nn.functional.scaled_dot_product_attention(
        query,
        key,
        value,
        is_causal=True,
        scale=scaling,
        enable_gqa=getattr(module, "num_key_value_groups", 1) > 1,
    )
    return output.transpose(1, 2).contiguous(), None


def build(config: Any, kernel: AttentionKernel, *, is_fake: bool = False) -> nn.Module:
    """The family's real causal language model in bf16, with Piper's experts.

    Args:
        config: of the family.
        kernel: of the attention.
        is_fake: called inside a ``FakeTensorMode``.
    """
    # transformers builds a mask when it sees fake tensors, and then repeats grouped heads
    ALL_ATTENTION_FUNCTIONS.register(CAUSAL, _causal_sdpa)
    fused = CAUSAL if is_fake else "sdpa"
    config._attn_implementation = "eager" if kernel == "eager" else fused
    config._experts_implementation = "piper"
    default = torch.get_default_dtype()
    torch.set_default_dtype(torch.bfloat16)
    try:
        model = model_class(config.model_type)(config)
    finally:
        torch.set_default_dtype(default)
    model.train()
    return cast(nn.Module, model if is_fake else model.to(torch.bfloat16))


def saved_bytes(model: nn.Module, ids: Tensor) -> int:
    """Bytes of all storages that the forward keeps for its backward, parameters apart."""
    tensors = [*model.parameters(), *model.buffers()]
    alive = {tensor.untyped_storage()._cdata for tensor in tensors}
    kept: dict[int, Tensor] = {}

    def pack(tensor: Tensor) -> Tensor:
        key = tensor.untyped_storage()._cdata
        if key not in alive:
            kept[key] = tensor
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        output = model(ids, labels=ids, use_cache=False)
    total = sum(tensor.untyped_storage().nbytes() for tensor in kept.values())
    del output
    return total


def measured_saved_bytes(
    config: Any, kernel: AttentionKernel, *, batch: int, seq_len: int, is_fake: bool = False
) -> int:
    """What one microbatch keeps in the real class.

    Args:
        config: of the family; its attention and experts are set.
        kernel: of the attention.
        batch: sequences.
        seq_len: tokens in a sequence.
        is_fake: on fake tensors, at any size.
    """
    with FakeTensorMode() if is_fake else contextlib.nullcontext():
        model = build(config, kernel, is_fake=is_fake)
        return saved_bytes(model, torch.randint(0, config.vocab_size, (batch, seq_len)))


def measured_static_bytes(config: Any, *, momentum: float | None = None) -> int:
    """Parameters, gradients and optimizer state of the real class after one fp32 step.

    Args:
        config: of the family.
        momentum: ``None`` is AdamW, else SGD with it.
    """
    config._attn_implementation, config._experts_implementation = "eager", "piper"
    model = model_class(config.model_type)(config).to(torch.float32).train()
    parameters = list(model.parameters())
    optimizer: torch.optim.Optimizer
    if momentum is None:
        optimizer = torch.optim.AdamW(parameters)
    else:
        optimizer = torch.optim.SGD(parameters, lr=0.1, momentum=momentum)
    ids = torch.randint(0, config.vocab_size, (2, 32))
    model(ids, labels=ids, use_cache=False).loss.backward()
    optimizer.step()
    gradients = [one.grad for one in parameters if one.grad is not None]
    states = [
        value
        for state in optimizer.state.values()
        for value in state.values()
        if isinstance(value, Tensor)
    ]
    return sum(tensor.untyped_storage().nbytes() for tensor in [*parameters, *gradients, *states])
