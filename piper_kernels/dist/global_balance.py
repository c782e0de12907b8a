"""The balance loss of all ranks' tokens together.

The loss is not linear in the counts: a rank whose own tokens are unevenly routed may be part of a
well balanced whole, and the mean of the ranks' own losses punishes it (transformers 5.24 takes that
mean: 4.18712 instead of 4.18695 in a tiny OLMoE on 4 ranks).
"""

import torch
import torch.distributed as dist
from torch import Tensor

from piper_kernels.balance import Normalization, balance_loss
from piper_kernels.dist.collectives import GroupLike, resolve_group
from piper_kernels.routing import Routing, count_experts


def global_balance_loss(
    routing: Routing, group: GroupLike = None, *, normalization: Normalization = "per_slot"
) -> Tensor:
    """This rank's part of the balance loss of all ranks' tokens.

    The mean over the ranks is the loss of the joined batch, and the mean of their gradients, which
    data parallelism takes anyway, is its gradient. Ranks may have different numbers of real tokens.

    Args:
        routing: of this rank, ``stats.routing`` of a layer without capacity.
        group: all ranks that have different tokens. Every one of them calls this.
        normalization: as in :func:`piper_kernels.balance_loss`.

    Returns:
        0-dim, differentiable.

    Raises:
        ConfigError: no process group, or an unknown normalization.
    """
    members = resolve_group("global_balance_loss", group)
    counts = count_experts(routing.expert_ids, routing.num_experts)
    num_real = routing.num_tokens if routing.mask is None else routing.mask.sum()
    num_real = torch.as_tensor(num_real, device=counts.device).reshape(1)
    totals = torch.cat([counts, num_real.to(counts.dtype)])
    dist.all_reduce(totals, group=members)
    own = balance_loss(routing, normalization=normalization, expert_counts=totals[:-1])
    real, all_real = num_real[0].to(own.dtype), totals[-1].clamp(min=1).to(own.dtype)
    return own * (real * members.size() / all_real)
