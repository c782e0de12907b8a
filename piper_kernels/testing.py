"""Helpers shared by the tests, the benches and users' own tests; the library imports none of it.

Letters: T num_tokens, K top_k, E num_experts.
"""

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


def guard_with_nan(tensor: Tensor, band: int = 64) -> Tensor:
    """Copy a floating tensor into the middle of a NaN-filled buffer and return the view.

    A kernel that reads past either end then shows NaN in its result.

    Example:
        >>> guard_with_nan(torch.ones(2, 2), band=3).storage_offset()
        3
    """
    buffer = torch.full((tensor.numel() + 2 * band,), torch.nan, dtype=tensor.dtype)
    buffer = buffer.to(tensor.device)
    view = buffer[band : band + tensor.numel()].view(tensor.shape)
    view.copy_(tensor)
    return view


def assert_close_to_baseline(
    name: str, actual: Tensor, baseline: Tensor, truth: Tensor, *, slack: float = 4.0
) -> None:
    """Require that ``actual`` is as near to the truth as a plain computation in the same dtype.

    ``|actual - truth| <= |baseline - truth| + slack * eps * scale``, element by element; eps is the
    dtype's, scale is the largest |truth| of the element's row plus a tenth of the tensor's largest.

    Args:
        name: what is compared, for the message.
        actual: the result under test.
        baseline: a plain computation in actual's dtype.
        truth: the same in fp64.
        slack: how many units in the last place of the row's scale are allowed on top.

    Raises:
        AssertionError: naming the worst element and all three values.
    """
    assert actual.shape == truth.shape, f"{name}: shape {tuple(actual.shape)}, want {truth.shape}"
    if not actual.numel():
        return
    exact = truth.double()
    error = (actual.double() - exact).abs()
    scale = exact.abs().amax(-1, keepdim=True) + exact.abs().max() * 0.1
    unit = torch.finfo(actual.dtype).eps * scale
    allowed = (baseline.double() - exact).abs() + slack * unit
    is_wrong = ~(error <= allowed)
    if is_wrong.any():
        excess = torch.where(error.isnan(), torch.inf, error / allowed)
        where = tuple(int(i) for i in torch.unravel_index(excess.argmax(), excess.shape))
        raise AssertionError(
            f"{name}: {int(is_wrong.sum())} of {is_wrong.numel()} elements too far; worst at "
            f"{where}: actual {actual[where].item():.6g}, baseline {baseline[where].item():.6g}, "
            f"truth {exact[where].item():.6g}, allowed error {allowed[where].item():.3g}"
        )
