"""How a run keeps experts evenly used: by a correction bias where a model has one, else a loss.

A correction bias is how DeepSeek-V3 and its kin balance; a loss on top would disturb what they
learn (Wang et al. 2024, arXiv 2408.15664).
"""

from collections.abc import Sequence

import torch
from torch import Tensor, nn

from piper_kernels.balance import balance_loss, updated_correction_bias, z_loss
from piper_kernels.huggingface.expert_counts import ExpertCounter, expert_modules
from piper_kernels.routing import Routing

CORRECTION_BIAS = "e_score_correction_bias"


def mean_balance_loss(
    router_logits: Sequence[Tensor], counter: ExpertCounter, mask: Tensor | None = None
) -> Tensor:
    """Mean over layers of ``balance_loss(..., normalization="per_token")``: top_k when balanced.

    transformers pools the layers' counts first, which lets their imbalances cancel; this does not.

    Args:
        router_logits: per layer with experts, in order, ``[T, E]`` or ``[B, S, E]``.
        counter: saw the same forward pass.
        mask: ``[T]`` or ``[B, S]``, not 0 is a real token.

    Returns:
        Scalar fp32, differentiable.
    """
    is_real = None if mask is None else mask.reshape(-1) != 0
    losses = []
    for layer, logits in zip(counter.layers, router_logits, strict=True):
        expert_ids, gates = counter.routed[layer]
        logits = logits.flatten(0, -2)
        if is_real is not None:
            # as in a routing of ours: padding has the sentinel id and is in no count
            expert_ids = expert_ids.masked_fill(~is_real[:, None], logits.shape[1])
        routing = Routing(expert_ids=expert_ids, gates=gates, logits=logits, mask=is_real)
        losses.append(balance_loss(routing, normalization="per_token"))
    return torch.stack(losses).mean()


def mean_z_loss(router_logits: Sequence[Tensor], mask: Tensor | None = None) -> Tensor:
    """Mean over layers of :func:`piper_kernels.balance.z_loss`; arguments as above."""
    flat = None if mask is None else mask.reshape(-1)
    return torch.stack(
        [z_loss(logits.flatten(0, -2), mask=flat) for logits in router_logits]
    ).mean()


def correction_biases(model: nn.Module) -> list[Tensor]:
    """The correction bias of each layer with experts, in order, as ``[E]`` views; may be none."""
    found = []
    for name, _ in expert_modules(model).values():
        block = model.get_submodule(name.rpartition(".")[0])
        tensors = (*block.named_buffers(), *block.named_parameters())
        found += [
            tensor.detach().view(-1)
            for own_name, tensor in tensors
            if own_name.rpartition(".")[2] == CORRECTION_BIAS
        ]
    return found


def update_correction_biases(
    biases: Sequence[Tensor], counter: ExpertCounter, speed: float
) -> None:
    """Move each layer's bias, in place, towards the experts that were idle in this step.

    See ``balance.updated_correction_bias``.
    """
    for bias, counts in zip(biases, counter.counts, strict=True):
        bias.copy_(updated_correction_bias(bias, counts, speed))
