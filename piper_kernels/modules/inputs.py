"""What a layer is given: checked, and brought into the form that its parts take."""

from dataclasses import replace

from torch import Tensor, nn

from piper_kernels.config import MoEConfig
from piper_kernels.errors import (
    ConfigError,
    ShapeError,
    check_dtype,
    check_same_device,
    check_shape,
    instruction,
)
from piper_kernels.routing import LOGITS_DTYPES, Routing


def flatten_tokens(
    x: Tensor, mask: Tensor | None, router_weight: Tensor
) -> tuple[Tensor, Tensor | None]:
    """Give x as ``[T, H]`` and the mask as ``[T]``.

    Args:
        x: ``[..., H]`` floating, at least 2 dims.
        mask: x's leading dims, or ``[T]``, or ``None``.
        router_weight: ``[E, H]``: says H and the device.

    Raises:
        ShapeError: x or mask has another shape.
        DtypeError: x is not floating.
        DeviceError: x or mask is elsewhere than the router; a router on meta is left to its own
            check, since accelerate's offloading fills its weight only while it is called.
    """
    hidden_size = router_weight.shape[1]
    if x.ndim < 2 or x.shape[-1] != hidden_size:
        requirement = f"have at least 2 dims, the last of hidden_size = {hidden_size}"
        remedy = "Use x[None] for a single token." if x.ndim == 1 else ""
        given = f"shape {tuple(x.shape)}"
        raise ShapeError(instruction("PiperMoE", "x", requirement, given, remedy))
    check_dtype("PiperMoE", "x", x, LOGITS_DTYPES)
    owner = None if router_weight.is_meta else router_weight
    check_same_device("PiperMoE", {"router.weight": owner, "x": x, "mask": mask})
    tokens = x.reshape(-1, hidden_size)
    if mask is None:
        return tokens, None
    if mask.shape not in (x.shape[:-1], tokens.shape[:1]):
        requirement = f"have x's leading dims {tuple(x.shape[:-1])}, or [T] = [{tokens.shape[0]}]"
        remedy = "Pass the padding mask itself, not an attention mask made from it."
        given = f"shape {tuple(mask.shape)}"
        raise ShapeError(instruction("PiperMoE", "mask", requirement, given, remedy))
    return tokens, mask.reshape(-1)


def adopt_routing(
    routing: Routing, config: MoEConfig, tokens: Tensor, mask: Tensor | None, router: nn.Module
) -> Routing:
    """Check a routing from outside, and tie the router's parameters to it with a zero gradient.

    Raises:
        ShapeError: the routing belongs to another batch or another layer.
        DeviceError: it is elsewhere than the tokens.
        ConfigError: a mask is given beside it.
    """
    if mask is not None:
        requirement, remedy = "be None when routing is given", "The routing knows its padding."
        raise ConfigError(instruction("PiperMoE", "mask", requirement, "a mask", remedy))
    num_tokens = tokens.shape[0]
    remedy = "The routing belongs to another batch or another layer."
    for name, dim, tensor, size in (
        ("routing.expert_ids", "K", routing.expert_ids, config.top_k),
        ("routing.logits", "E", routing.logits, config.num_experts),
    ):
        check_shape("PiperMoE", name, tensor, ("T", dim), (num_tokens, size), remedy)
    check_same_device("PiperMoE", {"x": tokens, "routing.expert_ids": routing.expert_ids})
    gates = routing.gates
    for parameter in router.parameters():
        # the sum of nothing: data-parallel wrappers wait for a gradient of every parameter, except
        # of one that accelerate has offloaded to meta
        if parameter.device == gates.device:
            gates = gates + parameter[:0].sum()
    return replace(routing, gates=gates)
