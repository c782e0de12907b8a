"""MoEStats: what one call of a layer did.

Letters: T num_tokens, E num_experts, K top_k.
"""

from dataclasses import dataclass

from torch import Tensor

from piper_kernels.balance import balance_loss, z_loss
from piper_kernels.routing import Routing, count_experts


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class MoEStats:
    """What one call of a layer did. Nothing is kept between calls.

    Attributes:
        routing: ids and gates that were computed (sentinel E where padded or dropped), and the raw
            logits. Pass it as ``routing=`` to repeat the call's choices.
        expert_counts: ``[E]`` int64: slots of real tokens that wanted each expert, before capacity.
        balance_loss: 0-dim, 1 at balance whatever K: ``balance_loss(..., "per_slot")``. Times K it
            is transformers' value ("per_token"). Differentiable; add it to the loss yourself.
        z_loss: 0-dim, mean of ``logsumexp(logits)^2``. Differentiable; likewise.
        num_dropped: 0-dim int64, slots dropped for capacity.
    """

    routing: Routing
    expert_counts: Tensor
    balance_loss: Tensor
    z_loss: Tensor
    num_dropped: Tensor


def collect_stats(wanted: Routing, limited: Routing, num_dropped: Tensor) -> MoEStats:
    """Stats of a call.

    Args:
        wanted: what the router chose.
        limited: what was computed: the same after capacity.
        num_dropped: 0-dim int64, the difference.
    """
    counts = count_experts(wanted.expert_ids, wanted.num_experts)
    return MoEStats(
        routing=limited,
        expert_counts=counts,
        balance_loss=balance_loss(wanted, normalization="per_slot", expert_counts=counts),
        z_loss=z_loss(wanted.logits, mask=wanted.mask),
        num_dropped=num_dropped,
    )
