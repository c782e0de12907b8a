"""Balance: the losses that keep experts evenly used, and the update that needs no loss.

Each function concerns one layer and one call, and keeps no state: a model's loss is the mean of its
layers' losses. (Pooling the layers' counts first would let their imbalances cancel.) Everything is
computed in at least fp32, without a host synchronisation and without one-hot tensors.
Letters: T num_tokens, K top_k, E num_experts.
"""

import math
from typing import Literal

import torch
from torch import Tensor

from piper_kernels.autocast import without_autocast
from piper_kernels.config import check_choice
from piper_kernels.errors import check_dtype, check_shape, require
from piper_kernels.routing import LOGITS_DTYPES, Routing, count_experts, widen

Normalization = Literal["per_slot", "per_token"]


def balance_loss(
    routing: Routing, *, normalization: Normalization, expert_counts: Tensor | None = None
) -> Tensor:
    """``E * sum_e f[e] * P[e]``: large if busy experts are also the likely ones.

    ``P[e]`` is the mean of ``routing.probabilities[:, e]`` over real tokens; it carries the
    gradient. ``f[e]`` is expert e's share, of all slots or for each token:

    ============= ================================ ======== ========== =============================
    normalization f[e]                             sum of f at balance used by
    ============= ================================ ======== ========== =============================
    per_slot      slots of e / all slots           1        1          Megatron-LM, DeepSeek-V3
    per_token     slots of e / real tokens         K        K          transformers
    ============= ================================ ======== ========== =============================

    So per_token is K times per_slot, and a coefficient tuned for one must be divided or multiplied
    by K for the other. With K = 1 both are the loss of Switch Transformers.

    Args:
        routing: of one layer, before :func:`piper_kernels.routing.apply_capacity`: dropped slots
            would no longer count as load.
        normalization: ``per_slot`` or ``per_token``.
        expert_counts: ``[E]`` counts to take ``f`` from; default: this routing's own. Give the sum
            over data-parallel ranks, and the mean of the ranks' losses (and gradients) is the loss
            of the whole batch, provided that ranks have equally many real tokens.

    Returns:
        0-dim, fp32 (fp64 for fp64 logits); 0 if no token is real.

    Raises:
        ConfigError: an unknown normalization.
        ShapeError: ``expert_counts`` is not ``[E]``.

    Example:
        Both tokens go to expert 0 of 2, each with probability 0.9, K = 1: f = (1, 0),
        P = (0.9, 0.1), and the loss is 2 * 0.9::

            >>> from piper_kernels.config import RouterConfig
            >>> from piper_kernels.routing import route
            >>> logits = torch.tensor([[0.9, 0.1], [0.9, 0.1]]).log()
            >>> balance_loss(route(logits, 1, RouterConfig()), normalization="per_slot")
            tensor(1.8000)

    Source:
        Fedus et al. 2021, Switch Transformers (arXiv 2101.03961), equations 4 to 6; transformers
        5.24, ``load_balancing_loss_func``; DeepSeek-V3 (arXiv 2412.19437), equations 17 to 20.
    """
    check_choice("balance_loss", "normalization", normalization, Normalization)
    num_experts = routing.num_experts
    if expert_counts is None:
        expert_counts = count_experts(routing.expert_ids, num_experts)
    check_shape("balance_loss", "expert_counts", expert_counts, ("E",), (num_experts,))
    with without_autocast(routing.logits.device):
        probability = _mean_over_real_tokens(routing.probabilities, routing.mask)
        share = expert_counts.to(probability.dtype) / expert_counts.sum().clamp(min=1)
        if normalization == "per_token":
            share = share * routing.top_k
        return num_experts * (share * probability).sum()


def z_loss(logits: Tensor, *, mask: Tensor | None = None) -> Tensor:
    """Mean over real tokens of ``logsumexp(logits)^2``: keeps router logits small.

    Args:
        logits: ``[T, E]`` floating, never probabilities.
        mask: ``[T]`` bool, integer or floating; not 0 is a real token. ``Routing.mask`` fits.

    Returns:
        0-dim, fp32 (fp64 for fp64 logits); 0 if no token is real.

    Raises:
        ShapeError, DtypeError: a tensor is not as described.

    Example:
        >>> z_loss(torch.tensor([[200.0, 0.0, 0.0, 0.0]]))
        tensor(40000.)

    Source:
        Zoph et al. 2022, ST-MoE (arXiv 2202.08906), equation 5.
    """
    check_shape("z_loss", "logits", logits, ("T", "E"), (None, None))
    check_dtype("z_loss", "logits", logits, LOGITS_DTYPES)
    with without_autocast(logits.device):
        wide = widen(logits)
        if mask is not None:
            remedy = "Flatten a [B, S] mask with mask.reshape(-1)."
            check_shape("z_loss", "mask", mask, ("T",), (logits.shape[0],), remedy)
            mask = mask != 0
            # before the logsumexp: what padding holds must reach neither the loss nor a gradient
            wide = torch.where(mask[:, None], wide, 0.0)
        return _mean_over_real_tokens(wide.logsumexp(-1).square(), mask)


def updated_correction_bias(correction_bias: Tensor, expert_counts: Tensor, speed: float) -> Tensor:
    """``correction_bias + speed * sign(mean(expert_counts) - expert_counts)``: no loss needed.

    Idle experts become easier to choose, busy ones harder. Call it once per optimizer step, with
    counts summed over microbatches and data-parallel ranks; padding is not in
    :func:`piper_kernels.routing.count_experts`.

    Args:
        correction_bias: ``[E]`` fp32 or fp64; not changed.
        expert_counts: ``[E]`` int64 or int32.
        speed: at least 0; 1e-3 in DeepSeek-V3.

    Returns:
        A new ``[E]`` tensor in the dtype of ``correction_bias``, without gradient.

    Raises:
        ShapeError: the two shapes differ.
        DtypeError: the bias is narrower than fp32 (steps of 1e-3 would be rounded away), or the
            counts are not integers.
        ConfigError: ``speed`` is negative or not finite.

    Example:
        >>> updated_correction_bias(torch.zeros(3), torch.tensor([6, 3, 0]), 0.5)
        tensor([-0.5000,  0.0000,  0.5000])

    Source:
        Wang et al. 2024 (arXiv 2408.15664), algorithm 1.
    """
    name = "updated_correction_bias"
    check_shape(name, "correction_bias", correction_bias, ("E",), (None,))
    check_dtype(
        name,
        "correction_bias",
        correction_bias,
        (torch.float32, torch.float64),
        "A narrower bias rounds its updates away: keep the buffer in fp32.",
    )
    check_shape(name, "expert_counts", expert_counts, ("E",), tuple(correction_bias.shape))
    check_dtype(name, "expert_counts", expert_counts, (torch.int64, torch.int32))
    require(math.isfinite(speed) and speed >= 0, name, "speed", "be a finite number >= 0", speed)
    counts = expert_counts.long()
    # in integers: the sign of a rounded mean could move a bias that is exactly balanced
    direction = (counts.sum() - counts * counts.shape[0]).sign()
    return correction_bias.detach() + speed * direction.to(correction_bias.dtype)


def _mean_over_real_tokens(values: Tensor, mask: Tensor | None) -> Tensor:
    """Mean over dim 0 of the rows that ``mask`` (bool) leaves; 0 if there is none."""
    if mask is None:
        return values.sum(0) / max(values.shape[0], 1)
    is_real = mask.unflatten(0, (-1, *[1] * (values.ndim - 1)))
    return torch.where(is_real, values, 0.0).sum(0) / mask.sum().clamp(min=1)
