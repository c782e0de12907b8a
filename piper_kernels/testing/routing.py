"""Expert ids and gates of the kinds that every op is tested with."""

from typing import Literal, get_args

import torch
from torch import Tensor

from piper_kernels.errors import require

RoutingKind = Literal["uniform", "skewed", "one_expert_empty", "all_to_one", "with_sentinels"]
ROUTING_KINDS: tuple[RoutingKind, ...] = get_args(RoutingKind)


def make_routing(
    kind: RoutingKind,
    num_tokens: int,
    num_experts: int,
    top_k: int,
    *,
    dtype: torch.dtype = torch.float32,
    seed: int = 0,
) -> tuple[Tensor, Tensor]:
    """Expert ids and gates of a given kind; the K experts of a token differ from one another.

    Args:
        kind: ``uniform``; ``skewed`` (popularity falls as 1 / rank^1.2); ``one_expert_empty`` (the
            middle expert gets nothing, where E > K); ``all_to_one`` (every token's first choice is
            the last expert); ``with_sentinels`` (a quarter of the slots carry id E and gate 0).
        num_tokens: T.
        num_experts: E.
        top_k: K.
        dtype: of the gates.
        seed: equal seeds give equal routings.

    Returns:
        ``(expert_ids [T, K] int64, gates [T, K])``, on the CPU; gates of a token sum to 1 before
        sentinels are set.
    """
    require(kind in ROUTING_KINDS, "make_routing", "kind", f"be one of {ROUTING_KINDS}", kind)
    generator = torch.Generator().manual_seed(seed)
    popularity = torch.ones(num_experts)
    if kind == "skewed":
        popularity = 1.0 / torch.arange(1, num_experts + 1) ** 1.2
    noise = -torch.log(-torch.log(torch.rand(num_tokens, num_experts, generator=generator)))
    scores = popularity.log() + noise
    if kind == "one_expert_empty" and num_experts > top_k:
        scores[:, num_experts // 2] = -torch.inf
    if kind == "all_to_one":
        scores[:, -1] = torch.inf
    expert_ids = scores.topk(top_k, dim=-1).indices
    gates = torch.rand(num_tokens, top_k, generator=generator, dtype=torch.float64) + 0.1
    gates = gates / gates.sum(-1, keepdim=True)
    if kind == "with_sentinels":
        is_sentinel = torch.rand(num_tokens, top_k, generator=generator) < 0.25
        expert_ids = expert_ids.masked_fill(is_sentinel, num_experts)
        gates = gates.masked_fill(is_sentinel, 0.0)
    return expert_ids, gates.to(dtype)
