"""Choice: the arithmetic of routing, from finite logits to the K best experts and their gates.

Plain torch in the dtype of the logits, without a host synchronisation.
Letters: T num_tokens, K top_k, E num_experts, G num_groups.
"""

import torch
from torch import Tensor

from piper_kernels.config import RouterConfig, RouterKind

# beyond this K one stable sort over E is faster than K passes over E
MAX_PASSES = 16
# added to the sum that gates are divided by, as DeepSeek-V3 does
NORMALIZATION_EPSILON = 1e-20


def choose(
    logits: Tensor, top_k: int, config: RouterConfig, correction_bias: Tensor | None
) -> tuple[Tensor, Tensor]:
    """Expert ids, best first, and their gates; the meaning is in :func:`piper_kernels.route`.

    Args:
        logits: ``[T, E]`` fp32 or fp64, finite.
        top_k: K.
        config: the router.
        correction_bias: ``[E]`` floating or ``None``; takes part in the choice only.

    Returns:
        ``(expert_ids [T, K] int64, gates [T, K])``, the gates differentiable.
    """
    scores = _scores(logits, config.kind)
    order = _order(logits.detach(), scores.detach(), config, correction_bias)
    expert_ids = choose_experts(order, top_k)
    if config.kind == "sigmoid_topk":
        # from the chosen logits alone, so that only [T, K] is saved for backward
        return expert_ids, _gates(_sigmoid(logits.gather(1, expert_ids)), config)
    return expert_ids, _gates(scores.gather(1, expert_ids), config)


def choose_experts(scores: Tensor, top_k: int) -> Tensor:
    """Indices of the K largest scores of each row, best first; equal scores by the lower index.

    ``torch.topk`` promises no order among equals. ``torch.max`` promises the first maximum, so K
    passes of it choose well-definedly on every backend. Measured on one CPU core (torch 2.13,
    T = 32768, E = 256, K = 8): 110 ms against 81 ms for topk and 389 ms for a stable sort.

    Args:
        scores: ``[T, E]`` floating, without NaN.
        top_k: K <= E.

    Returns:
        ``[T, K]`` int64; no index twice in a row, even among scores of -inf.
    """
    if top_k > MAX_PASSES:
        return scores.sort(dim=-1, descending=True, stable=True).indices[:, :top_k]
    # -inf is kept for what is already chosen
    rest = scores.clamp(min=torch.finfo(scores.dtype).min)
    chosen: list[Tensor] = []
    for _ in range(top_k):
        chosen.append(rest.max(-1, keepdim=True).indices)
        rest.scatter_(1, chosen[-1], -torch.inf)
    return torch.cat(chosen, -1)


def exclude_groups(order: Tensor, scores: Tensor, config: RouterConfig) -> Tensor:
    """``order`` with -inf for every expert outside the best ``config.num_selected_groups`` groups.

    Args:
        order: ``[T, E]`` what experts are ranked by; a group's ``max`` is taken of it.
        scores: ``[T, E]`` what ``top2_sum`` adds up.
        config: the router; its groups are consecutive experts, E / G each.

    Example:
        >>> config = RouterConfig(num_groups=2, num_selected_groups=1)
        >>> scores = torch.tensor([[-3.0, -1.0, -2.0, -2.0]])
        >>> exclude_groups(scores, scores, config)
        tensor([[-3., -1., -inf, -inf]])
    """
    size = order.shape[1] // config.num_groups
    if config.group_score == "max":
        group_scores = order.unflatten(1, (config.num_groups, size)).amax(-1)
    else:
        by_group = scores.unflatten(1, (config.num_groups, size))
        group_scores = by_group.topk(min(2, size), dim=-1).values.sum(-1)
    groups = choose_experts(group_scores, config.num_selected_groups)
    is_out = torch.ones_like(group_scores, dtype=torch.bool).scatter_(1, groups, False)
    # one step above what choose_experts takes -inf for, so that an expert masked with -inf or the
    # dtype's lowest number still comes before those of an excluded group
    limits = torch.finfo(order.dtype)
    order = order.clamp(min=limits.min * (1.0 - limits.eps))
    # -inf, not 0: a negative score in a good group must still win (field report A33)
    return order.masked_fill(is_out.repeat_interleave(size, dim=1), -torch.inf)


def has_constant_gates(config: RouterConfig, top_k: int) -> bool:
    """Whether gates are constant, so that no gradient of the output reaches the router.

    So it is for one normalised gate: ``w / w = 1``. Such a router learns from its losses only.

    Example:
        >>> has_constant_gates(RouterConfig(is_normalized=True), 1)
        True
    """
    return top_k == 1 and (config.is_normalized or config.kind == "topk_softmax")


def _scores(logits: Tensor, kind: RouterKind) -> Tensor:
    """``[T, E]`` what experts are compared by, once a bias or a sum is involved."""
    if kind == "softmax_topk":
        return logits.softmax(-1)
    if kind == "sigmoid_topk":
        # the cheap form, whose gradient is NaN far below 0
        return 1.0 / (1.0 + (-logits.detach()).exp())
    return logits


def _sigmoid(logits: Tensor) -> Tensor:
    """Sigmoid as softmax of (z, 0), differentiable.

    Not ``torch.sigmoid``: on the CPU (torch 2.13) its vector and scalar code differ by one ulp, so
    equal logits would get unequal scores by their place in memory, and ties would be broken by it.
    """
    return torch.stack((logits, torch.zeros_like(logits)), -1).softmax(-1)[..., 0]


def _order(logits: Tensor, scores: Tensor, config: RouterConfig, bias: Tensor | None) -> Tensor:
    """``[T, E]`` what experts are ranked by; -inf in excluded groups."""
    if bias is not None:
        scores = scores + bias.detach().to(scores.dtype)
        logits = scores
    if config.num_selected_groups == config.num_groups:
        return logits
    return exclude_groups(logits, scores, config)


def _gates(chosen: Tensor, config: RouterConfig) -> Tensor:
    """``[T, K]`` gates from the scores of the chosen experts."""
    if config.kind == "topk_softmax":
        chosen = chosen.softmax(-1)
    elif has_constant_gates(config, chosen.shape[1]):
        # w / w, exactly, with a gradient of exactly 0
        chosen = chosen * 0.0 + 1.0
    elif config.is_normalized:
        chosen = chosen / (chosen.sum(-1, keepdim=True) + NORMALIZATION_EPSILON)
    return chosen * config.scaling_factor
