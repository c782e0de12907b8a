"""Experts: the parameters of E expert MLPs, and the op over them.

Letters: T num_tokens, H hidden_size, I intermediate_size, E num_experts, K top_k.
"""

from typing import Any, Self

import torch
from torch import Tensor, nn

from piper_kernels.config import Backend, MoEConfig, Save, check_choice
from piper_kernels.functional.experts import experts
from piper_kernels.functional.explain import Explanation, explain_experts
from piper_kernels.modules.parameters import (
    Shapes,
    check_tensors,
    init_like_linear,
    init_zeros,
    new_parameters,
)


class Experts(nn.Module):
    """The expert MLPs. Called like Hugging Face's experts modules, so these fit in its place.

    Args:
        config: of the layer.
        gate_up_proj: ``[E, 2I, H]`` (``[E, I, H]`` ungated), or as ``config.layout`` says.
        down_proj: ``[E, H, I]``, or as ``config.layout`` says.
        gate_up_proj_bias: ``[E, 2I]`` (``[E, I]`` ungated); with ``config.has_expert_bias``, and
            only then.
        down_proj_bias: ``[E, H]``; likewise.
        save: what is kept for the backward: the pre-activation, or only x.
        backend: which implementation runs.

    Raises:
        ShapeError: a tensor does not fit ``config``.
        ConfigError: a bias is missing, or one is given that ``config`` does not have; ``save`` or
            ``backend`` is unknown.
    """

    gate_up_proj: nn.Parameter
    down_proj: nn.Parameter
    gate_up_proj_bias: nn.Parameter | None
    down_proj_bias: nn.Parameter | None

    def __init__(
        self,
        config: MoEConfig,
        gate_up_proj: nn.Parameter,
        down_proj: nn.Parameter,
        gate_up_proj_bias: nn.Parameter | None = None,
        down_proj_bias: nn.Parameter | None = None,
        *,
        save: Save = "preact",
        backend: Backend = "auto",
    ) -> None:
        super().__init__()
        check_choice("Experts", "save", save, Save)
        check_choice("Experts", "backend", backend, Backend)
        self.config, self.save, self.backend = config, save, backend
        parameters = {
            "gate_up_proj": gate_up_proj,
            "down_proj": down_proj,
            "gate_up_proj_bias": gate_up_proj_bias,
            "down_proj_bias": down_proj_bias,
        }
        check_tensors("Experts", expert_shapes(config), parameters)
        for name, parameter in parameters.items():
            self.register_parameter(name, parameter)

    @classmethod
    def build(
        cls,
        config: MoEConfig,
        *,
        save: Save = "preact",
        backend: Backend = "auto",
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> Self:
        """Experts with new parameters, initialised."""
        parameters = new_parameters(expert_shapes(config), device, dtype)
        module = cls(config, save=save, backend=backend, **parameters)
        module.reset_parameters()
        return module

    def reset_parameters(self) -> None:
        """Draw every expert as an MLP of ``nn.Linear``: an expert's own fan-in counts, not E's."""
        init_like_linear(self.gate_up_proj, fan_in=self.config.hidden_size)
        init_like_linear(self.down_proj, fan_in=self.config.intermediate_size)
        init_zeros(self.gate_up_proj_bias, self.down_proj_bias)

    def forward(self, x: Tensor, expert_ids: Tensor, gates: Tensor) -> Tensor:
        """``[T, H]``: the gate-weighted sum of each token's experts.

        Args:
            x: ``[T, H]``.
            expert_ids: ``[T, K]`` int64; ids ``>= E`` contribute nothing.
            gates: ``[T, K]`` fp32 (fp64 with fp64 x).
        """
        return experts(x, expert_ids, gates, self.gate_up_proj, self.down_proj, **self._options())

    def explain(self, x: Tensor, expert_ids: Tensor, gates: Tensor) -> Explanation:
        """What ``forward`` would do with these arguments; nothing is computed."""
        weights = self.gate_up_proj, self.down_proj
        return explain_experts(x, expert_ids, gates, *weights, **self._options())

    def _options(self) -> dict[str, Any]:
        return {
            "layout": self.config.layout,
            "activation": self.config.activation,
            "gate_up_bias": self.gate_up_proj_bias,
            "down_bias": self.down_proj_bias,
            "save": self.save,
            "backend": self.backend,
        }

    def extra_repr(self) -> str:
        """Sizes, activation and what is not the default."""
        sizes = f"num_experts={self.config.num_experts}, hidden_size={self.config.hidden_size}"
        kind = f"intermediate_size={self.config.intermediate_size}, {self.config.activation}"
        return f"{sizes}, {kind}, save={self.save!r}, backend={self.backend!r}"


def expert_shapes(config: MoEConfig) -> Shapes:
    """Shape of each parameter of :class:`Experts`; ``None`` where ``config`` has none."""
    E, H, I = config.num_experts, config.hidden_size, config.intermediate_size
    gate_up_shape, down_shape = config.layout.weight_shapes(E, H, I)
    has_bias = config.has_expert_bias
    return {
        "gate_up_proj": gate_up_shape,
        "down_proj": down_shape,
        "gate_up_proj_bias": (E, config.layout.preact_size(I)) if has_bias else None,
        "down_proj_bias": (E, H) if has_bias else None,
    }
