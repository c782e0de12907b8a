"""Routing: from router logits to expert ids and gates. Every router kind, in plain torch.

Everything is computed in at least fp32 whatever autocast says (fp64 stays fp64), without a host
synchronisation on a device, and with shapes that depend on (T, K, E) alone. Losses and the
loss-free bias update are in ``piper_kernels.balance``.
Letters: T num_tokens, K top_k, E num_experts. A slot is a (token, k) pair.
"""

from dataclasses import dataclass, replace

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import is_fake

from piper_kernels.autocast import without_autocast
from piper_kernels.choice import choose
from piper_kernels.config import RouterConfig, RouterKind
from piper_kernels.errors import (
    ConfigError,
    RoutingError,
    check_dtype,
    check_same_device,
    check_shape,
    instruction,
    require,
)

LOGITS_DTYPES = (torch.float32, torch.bfloat16, torch.float16, torch.float64)


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class Routing:
    """Where each token goes, and with which weight.

    Attributes:
        expert_ids: ``[T, K]`` int64, best expert first; the sentinel E marks a slot that nobody
            computes: padding, a contained token, a slot dropped for capacity.
        gates: ``[T, K]`` fp32 (fp64 for fp64 logits), differentiable; 0 at sentinel slots.
        logits: ``[T, E]`` in the dtype of ``gates``, differentiable: what the router computed,
            never probabilities. Rows of tokens that are not real may hold anything.
        mask: ``[T]`` bool, True is a real token; ``None`` means that all are.
        kind: the router's kind, which says what ``probabilities`` are.

    Raises:
        ShapeError: the tensors do not agree in T and K.
        DtypeError: the ids are not int64, or the mask is not bool.

    Example:
        >>> routing = route(torch.tensor([[0.0, 2.0, 1.0]]), 2, RouterConfig())
        >>> routing.expert_ids
        tensor([[1, 2]])
        >>> routing.gates
        tensor([[0.7311, 0.2689]])
    """

    expert_ids: Tensor
    gates: Tensor
    logits: Tensor
    mask: Tensor | None = None
    kind: RouterKind = "softmax_topk"

    def __post_init__(self) -> None:
        check_shape("Routing", "logits", self.logits, ("T", "E"), (None, None))
        num_tokens = self.num_tokens
        check_shape("Routing", "expert_ids", self.expert_ids, ("T", "K"), (num_tokens, None))
        wanted = (num_tokens, self.expert_ids.shape[1])
        check_shape("Routing", "gates", self.gates, ("T", "K"), wanted)
        check_dtype("Routing", "expert_ids", self.expert_ids, (torch.int64,), "Use .long().")
        if self.mask is not None:
            check_shape("Routing", "mask", self.mask, ("T",), (num_tokens,))
            check_dtype("Routing", "mask", self.mask, (torch.bool,), "Pass mask != 0.")

    @property
    def num_tokens(self) -> int:
        """T."""
        return self.logits.shape[0]

    @property
    def num_experts(self) -> int:
        """E."""
        return self.logits.shape[1]

    @property
    def top_k(self) -> int:
        """K."""
        return self.expert_ids.shape[1]

    def detach(self) -> "Routing":
        """The same choices without their graph: for a replay after the backward of this call."""
        return replace(self, gates=self.gates.detach(), logits=self.logits.detach())

    @property
    def probabilities(self) -> Tensor:
        """``[T, E]``, each row sums to 1; differentiable, computed anew at each access.

        ``softmax(logits)``; for ``sigmoid_topk`` the scores divided by their sum over E, as in
        DeepSeek-V3's balance loss (arXiv 2412.19437, equation 19). Rows that are not real hold 1/E.
        """
        with without_autocast(self.logits.device):
            logits = widen(self.logits)
            if self.mask is not None:
                logits = torch.where(self.mask[:, None], logits, 0.0)
            if self.kind == "sigmoid_topk":
                # sigmoid(z) / sum(sigmoid(z)) without underflow
                logits = torch.nn.functional.logsigmoid(logits)
            return logits.softmax(-1)


def route(
    logits: Tensor,
    top_k: int,
    config: RouterConfig,
    *,
    correction_bias: Tensor | None = None,
    mask: Tensor | None = None,
) -> Routing:
    """Choose K experts for each token, and weigh them.

    The scores are ``softmax(logits)``, ``sigmoid(logits)`` or, for ``topk_softmax``, the logits
    themselves. Experts are chosen by score + correction_bias (without a bias by the logits, which
    order alike and do not saturate), best first, equal ones by the lower index. Gates come from
    the scores without bias: of the chosen ones, normalised if asked for, then scaled. A normalised
    gate with K = 1 is the constant 1, so the router learns from its losses alone
    (:func:`piper_kernels.choice.has_constant_gates`).

    A token that ``mask`` rules out gets the sentinel id E and gates 0, its logits are not looked
    at, and no gradient reaches them. With ``config.non_finite = "contain"`` a token that has a NaN
    or an infinity among its logits is treated in just this way, and ``Routing.mask`` says so: an
    expert that computed it would spread the NaN, since gate 0 times NaN is NaN.

    Args:
        logits: ``[T, E]`` fp32, bf16, fp16 or fp64; any strides.
        top_k: K.
        config: the router.
        correction_bias: ``[E]`` floating; takes part in the choice only and gets no gradient.
            Required if ``config.has_correction_bias``.
        mask: ``[T]`` bool, integer or floating; not 0 is a real token. Flatten a ``[B, S]`` mask.

    Returns:
        The routing, on the device of ``logits``.

    Raises:
        RoutingError: a real token's logits are not finite and ``config.non_finite`` is "raise".
            On a device and in compiled code this is an assertion on the device instead.
        ConfigError: K is below 1 or above E, E does not fit the groups, the bias is missing.
        ShapeError, DtypeError, DeviceError: a tensor is not as described.

    Example:
        Two equal scores, so the lower index comes first::

            >>> route(torch.tensor([[1.0, 3.0, 3.0]]), 2, RouterConfig()).expert_ids
            tensor([[1, 2]])

    Source:
        transformers 5.24 (the router classes of Mixtral, Qwen2-MoE, Qwen3-MoE, OLMoE, GraniteMoE,
        gpt-oss, DeepSeek-V2, DeepSeek-V3, GLM-4-MoE; compared in tests/test_routing_parity.py).
    """
    _check_route(logits, top_k, config, correction_bias, mask)
    with without_autocast(logits.device):
        wide = widen(logits)
        is_real = None if mask is None else mask != 0
        # two reductions that let NaN through are 8 times faster than isfinite over [T, E]
        is_finite = wide.detach().amax(-1).isfinite() & wide.detach().amin(-1).isfinite()
        if config.non_finite == "contain":
            is_real = is_finite if is_real is None else is_real & is_finite
        else:
            _refuse(is_finite if is_real is None else is_finite | ~is_real)
        # before any arithmetic: 0 * NaN in a backward pass would still be NaN
        clean = wide if is_real is None else torch.where(is_real[:, None], wide, 0.0)
        expert_ids, gates = choose(clean, top_k, config, correction_bias)
        if is_real is not None:
            expert_ids = expert_ids.masked_fill(~is_real[:, None], logits.shape[1])
            gates = torch.where(is_real[:, None], gates, 0.0)
    return Routing(expert_ids=expert_ids, gates=gates, logits=wide, mask=is_real, kind=config.kind)


def apply_jitter(x: Tensor, jitter: float) -> Tensor:
    """``x * noise``, noise uniform in [1 - jitter, 1 + jitter): for the router's input in training.

    Args:
        x: any shape, floating; never changed in place.
        jitter: in [0, 1).

    Returns:
        A new tensor in the dtype of ``x``; the product is taken in at least fp32.

    Raises:
        ConfigError: ``jitter`` is outside [0, 1).
        DtypeError: ``x`` is not floating.

    Source:
        Fedus et al. 2021, Switch Transformers (arXiv 2101.03961), appendix C.
    """
    require(0.0 <= jitter < 1.0, "apply_jitter", "jitter", "be in [0, 1)", jitter)
    check_dtype("apply_jitter", "x", x, LOGITS_DTYPES)
    wide = widen(x.detach())
    noise = torch.empty_like(wide).uniform_(1.0 - jitter, 1.0 + jitter)
    return (x * noise).to(x.dtype)


def apply_capacity(routing: Routing, capacity_factor: float) -> tuple[Routing, Tensor]:
    """Drop slots beyond an expert's capacity, ``ceil(capacity_factor * T * K / E)`` rows.

    T counts real tokens. In an expert the lowest gate is dropped first; of equal gates the later
    token's. A dropped slot gets id E and gate 0; the token's other gates stay as they are.

    Args:
        routing: where tokens want to go.
        capacity_factor: above 0; 1 is room for a perfectly even spread. ``E / K`` or more drops
            nothing.

    Returns:
        ``(routing, num_dropped)``, the latter a 0-dim int64 tensor on the routing's device.

    Raises:
        ConfigError: ``capacity_factor`` is 0, negative or NaN.

    Example:
        >>> routing = route(torch.tensor([[2.0, 0.0], [3.0, 0.0], [0.0, 1.0]]), 1,
        ...                 RouterConfig(is_normalized=False))
        >>> routing, num_dropped = apply_capacity(routing, 0.5)
        >>> routing.expert_ids.flatten(), int(num_dropped)
        (tensor([2, 0, 1]), 1)
    """
    require(
        capacity_factor > 0,
        "apply_capacity",
        "capacity_factor",
        "be above 0",
        capacity_factor,
        "Leave capacity out for a dropless layer.",
    )
    num_experts, ids = routing.num_experts, routing.expert_ids
    num_real = routing.num_tokens if routing.mask is None else routing.mask.sum().double()
    capacity = capacity_factor * routing.top_k / num_experts * num_real
    slot_ids = ids.reshape(-1)
    by_gate = routing.gates.detach().reshape(-1).sort(descending=True, stable=True).indices
    sorted_ids, by_expert = slot_ids[by_gate].sort(stable=True)
    starts = torch.searchsorted(sorted_ids, sorted_ids)
    rank = torch.arange(slot_ids.shape[0], device=ids.device) - starts
    # rank < ceil(capacity), but 1.1 / 2 * 100 = 55.00000000000001 is not room for 56
    has_room = rank.double() * (1.0 + 1e-12) < capacity
    is_kept = torch.empty_like(slot_ids, dtype=torch.bool)
    is_kept[by_gate[by_expert]] = has_room & (sorted_ids < num_experts)
    is_kept = is_kept.view(ids.shape)
    num_dropped = ((ids < num_experts) & ~is_kept).sum()
    kept = replace(
        routing,
        expert_ids=ids.masked_fill(~is_kept, num_experts),
        gates=torch.where(is_kept, routing.gates, 0.0),
    )
    return kept, num_dropped


def count_experts(expert_ids: Tensor, num_experts: int) -> Tensor:
    """``[E]`` int64: how many slots each expert has. Sentinels (ids >= E) are not counted.

    Args:
        expert_ids: any shape, int64 or int32.
        num_experts: E.

    Raises:
        ConfigError: ``num_experts`` is below 1.
        DtypeError: ``expert_ids`` are not integers.

    Example:
        >>> count_experts(torch.tensor([[0, 2], [2, 3]]), 3)
        tensor([1, 0, 2])
    """
    require(num_experts >= 1, "count_experts", "num_experts", "be at least 1", num_experts)
    check_dtype("count_experts", "expert_ids", expert_ids, (torch.int64, torch.int32))
    slot_ids = expert_ids.reshape(-1).long().clamp(max=num_experts)
    # one more bin for the sentinels; sums of integers do not depend on their order
    counts = torch.zeros(num_experts + 1, dtype=torch.int64, device=slot_ids.device)
    return counts.scatter_add_(0, slot_ids, torch.ones_like(slot_ids))[:num_experts]


def widen(tensor: Tensor) -> Tensor:
    """The tensor in fp32; fp64 stays fp64."""
    return tensor.to(torch.promote_types(tensor.dtype, torch.float32))


def _check_route(
    logits: Tensor,
    top_k: int,
    config: RouterConfig,
    correction_bias: Tensor | None,
    mask: Tensor | None,
) -> None:
    """Everything that can be checked without looking at a value."""
    check_shape(
        "route", "logits", logits, ("T", "E"), (None, None), "Flatten [B, S, E] to [B * S, E]."
    )
    check_dtype("route", "logits", logits, LOGITS_DTYPES)
    num_tokens, num_experts = logits.shape
    config.check_sizes("route", num_experts, top_k)
    if correction_bias is not None:
        check_shape("route", "correction_bias", correction_bias, ("E",), (num_experts,))
        check_dtype("route", "correction_bias", correction_bias, LOGITS_DTYPES)
    elif config.has_correction_bias:
        remedy = "Pass the buffer, or set has_correction_bias=False."
        requirement = "be given, because config.has_correction_bias is True"
        raise ConfigError(instruction("route", "correction_bias", requirement, None, remedy))
    if mask is not None:
        remedy = "Flatten a [B, S] mask with mask.reshape(-1)."
        check_shape("route", "mask", mask, ("T",), (num_tokens,), remedy)
    check_same_device("route", {"logits": logits, "correction_bias": correction_bias, "mask": mask})


def _refuse(is_good: Tensor) -> None:
    """Raise unless every token is good; on a device and while tracing, assert there instead."""
    if torch.compiler.is_compiling() or is_good.device.type != "cpu" or is_fake(is_good):
        torch._assert_async(is_good.all(), "route: logits must be finite, got NaN or Inf")
        return
    is_good = _without_transforms(is_good).flatten()
    if is_good.all():
        return
    num_bad, first = int((~is_good).sum()), int(is_good.long().argmin())
    given = f"NaN or Inf in {num_bad} of {is_good.shape[0]} tokens, first in token {first}"
    remedy = (
        "Look for the first layer whose output is not finite, or let such tokens pass by with "
        "RouterConfig(non_finite='contain')."
    )
    raise RoutingError(instruction("route", "logits", "be finite", given, remedy))


def _without_transforms(tensor: Tensor) -> Tensor:
    """All samples of a tensor inside ``torch.func.vmap``, which lets nobody look at values."""
    functorch = torch._C._functorch
    while functorch.is_functorch_wrapped_tensor(tensor):
        tensor = functorch.get_unwrapped(tensor)
    return tensor
