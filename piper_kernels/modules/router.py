"""Router: hidden states to a Routing.

Letters: T num_tokens, H hidden_size, E num_experts, K top_k.
"""

from collections.abc import Callable
from typing import Any, Self

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from piper_kernels.autocast import is_autocast_active, without_autocast
from piper_kernels.balance import updated_correction_bias
from piper_kernels.config import MoEConfig
from piper_kernels.errors import ConfigError, check_dtype, check_same_device, instruction
from piper_kernels.modules.parameters import (
    Shapes,
    check_tensors,
    init_like_linear,
    init_zeros,
    new_parameters,
)
from piper_kernels.routing import Routing, apply_jitter, route, widen

WIDE_DTYPES = (torch.float32, torch.float64)


class Router(nn.Module):
    """Logits in at least fp32 whatever autocast says, then the choice of K experts.

    Args:
        config: of the layer.
        weight: ``[E, H]``, any floating dtype.
        bias: ``[E]``; with ``config.router.has_bias``, and only then.
        correction_bias: ``[E]`` fp32 or fp64; with ``config.router.has_correction_bias``, and only
            then. A persistent buffer, for the choice only. Casting the module narrower leaves it
            wide: in bf16 its steps of 1e-3 would be rounded away.

    Raises:
        ShapeError, DtypeError: a tensor is not as described.
        ConfigError: a tensor is missing, or one is given that ``config`` does not have.
    """

    weight: nn.Parameter
    bias: nn.Parameter | None
    correction_bias: Tensor | None

    def __init__(
        self,
        config: MoEConfig,
        weight: nn.Parameter,
        bias: nn.Parameter | None = None,
        correction_bias: Tensor | None = None,
    ) -> None:
        super().__init__()
        self.config = config
        given = {"weight": weight, "bias": bias, "correction_bias": correction_bias}
        check_tensors("Router", router_shapes(config), given)
        if correction_bias is not None:
            check_dtype("Router", "correction_bias", correction_bias, WIDE_DTYPES, "Use .float().")
        self.register_parameter("weight", weight)
        self.register_parameter("bias", bias)
        self.register_buffer("correction_bias", correction_bias)

    @classmethod
    def build(
        cls,
        config: MoEConfig,
        *,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> Self:
        """A router with new parameters, initialised."""
        shapes = dict(router_shapes(config))
        correction_shape = shapes.pop("correction_bias")
        parameters = new_parameters(shapes, device, dtype)
        correction_bias = None
        if correction_shape is not None:
            wide = widen(torch.empty(0, dtype=dtype)).dtype
            correction_bias = torch.empty(correction_shape, device=device, dtype=wide)
        router = cls(config, correction_bias=correction_bias, **parameters)
        router.reset_parameters()
        return router

    def reset_parameters(self) -> None:
        """Draw the weight as ``nn.Linear`` does; set the biases to 0."""
        init_like_linear(self.weight, fan_in=self.config.hidden_size)
        init_zeros(self.bias, self.correction_bias)

    def forward(self, x: Tensor, mask: Tensor | None = None) -> Routing:
        """Route the tokens, without regard to capacity.

        Args:
            x: ``[T, H]`` floating.
            mask: ``[T]``; not 0 is a real token. What the others hold, NaN included, reaches
                neither gates nor gradients.

        Returns:
            The routing; gates and logits are differentiable.

        Raises:
            DeviceError: x is elsewhere than the weight.
        """
        check_same_device("Router", {"weight": self.weight, "x": x, "mask": mask})
        if mask is not None:
            x = torch.where((mask != 0)[:, None], x, 0.0)
        if self.training and self.config.router.jitter > 0:
            x = apply_jitter(x, self.config.router.jitter)
        return route(
            wide_linear(x, self.weight, self.bias),
            self.config.top_k,
            self.config.router,
            correction_bias=self.correction_bias,
            mask=mask,
        )

    @torch.no_grad()
    def update_correction_bias(self, expert_counts: Tensor, speed: float = 1e-3) -> None:
        """Make busy experts harder to choose and idle ones easier: balance without a loss.

        Call it once per optimizer step. Nothing is accumulated here and nothing synchronises.

        Args:
            expert_counts: ``[E]`` integer: ``MoEStats.expert_counts``, summed over the step's
                microbatches and over data-parallel ranks.
            speed: by how much the bias moves; 1e-3 in DeepSeek-V3 (arXiv 2412.19437, section 4.2).

        Raises:
            ConfigError: the router has no correction bias.
            ShapeError, DtypeError: the counts are not as described.
        """
        bias = self.correction_bias
        if bias is None:
            name = "Router.update_correction_bias"
            remedy = "Build the layer with RouterConfig(has_correction_bias=True)."
            raise ConfigError(instruction(name, "correction_bias", "exist", None, remedy))
        bias.copy_(updated_correction_bias(bias, expert_counts, speed))

    def _apply(self, fn: Callable[..., Tensor], recurse: bool = True) -> Self:
        """``.to()``, ``.half()`` and the like; the correction bias stays at least fp32."""
        before = self.correction_bias
        super()._apply(fn, recurse)
        after = self.correction_bias
        if before is not None and after is not None and after.dtype not in WIDE_DTYPES:
            self.correction_bias = before.to(after.device)
        return self

    def extra_repr(self) -> str:
        """What is chosen, and how."""
        return f"{self.config.top_k} of {self.config.num_experts}, {self.config.router.kind}"


def wide_linear(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    """``F.linear`` in at least fp32, whatever autocast says.

    Args:
        x: ``[T, H]``, any floating dtype.
        weight: ``[E, H]``, any floating dtype.
        bias: ``[E]`` or ``None``.

    Returns:
        ``[T, E]`` fp32 (fp64 with fp64 x).
    """
    wide = widen(x)
    weight = weight.to(wide.dtype)
    bias = None if bias is None else bias.to(wide.dtype)
    if wide is x and not is_autocast_active(x.device):
        return F.linear(x, weight, bias)
    return _WideLinear.apply(x, weight, bias)


class _WideLinear(torch.autograd.Function):
    """``F.linear(x.float(), ...)`` that keeps x for the backward, not a wide copy of it.

    Autocast narrows nothing here, not even if the backward runs inside its region.
    """

    generate_vmap_rule = True

    @staticmethod
    def forward(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        with without_autocast(x.device):
            return F.linear(x.to(weight.dtype), weight, bias)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
        x, weight, _ = inputs
        ctx.save_for_backward(x, weight)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        x, weight = ctx.saved_tensors
        needs_x, needs_weight, needs_bias = ctx.needs_input_grad
        with without_autocast(grad.device):
            return (
                (grad @ weight).to(x.dtype) if needs_x else None,
                grad.T @ x.to(grad.dtype) if needs_weight else None,
                grad.sum(0) if needs_bias else None,
            )


def router_shapes(config: MoEConfig) -> Shapes:
    """Shape of each tensor of a :class:`Router`; ``None`` where ``config`` has none."""
    num_experts, router = config.num_experts, config.router
    return {
        "weight": (num_experts, config.hidden_size),
        "bias": (num_experts,) if router.has_bias else None,
        "correction_bias": (num_experts,) if router.has_correction_bias else None,
    }
