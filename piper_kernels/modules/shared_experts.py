"""SharedExperts: the MLP that every token passes beside its routed experts.

Letters: T num_tokens, H hidden_size.
"""

from typing import Self

import torch
from torch import Tensor, nn

from piper_kernels.config import Activation, MoEConfig
from piper_kernels.errors import require
from piper_kernels.functional.dtypes import choose_dtypes
from piper_kernels.reference.activation import activate


class SharedExperts(nn.Module):
    """An MLP that every token passes, optionally weighed per token: ``sigmoid(gate(x)) * mlp(x)``.

    Made of linear layers with the names that Hugging Face models give them, so adapters and
    quantisers find them.

    Args:
        activation: the layer's.
        up_proj: H to the shared intermediate size.
        down_proj: and back.
        gate_proj: as ``up_proj``; ``None`` in an ungated layer.
        gate: H to 1, or ``None``.
    """

    def __init__(
        self,
        activation: Activation,
        *,
        up_proj: nn.Module,
        down_proj: nn.Module,
        gate_proj: nn.Module | None = None,
        gate: nn.Module | None = None,
    ) -> None:
        super().__init__()
        self.activation = activation
        self.gate_proj = gate_proj
        self.up_proj = up_proj
        self.down_proj = down_proj
        self.gate = gate

    @classmethod
    def build(
        cls,
        config: MoEConfig,
        *,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> Self:
        """The shared experts that ``config`` asks for, initialised as ``nn.Linear`` does."""
        shared = config.shared_experts
        require(
            shared is not None, "SharedExperts.build", "config.shared_experts", "be given", None
        )
        assert shared is not None
        H, width = config.hidden_size, shared.intermediate_size

        def linear(in_size: int, out_size: int) -> nn.Linear:
            return nn.Linear(in_size, out_size, bias=False, device=device, dtype=dtype)

        return cls(
            config.activation,
            gate_proj=linear(H, width) if config.layout.is_gated else None,
            up_proj=linear(H, width),
            down_proj=linear(width, H),
            gate=linear(H, 1) if shared.is_gated_by_token else None,
        )

    def reset_parameters(self) -> None:
        """Initialise each linear layer anew."""
        for module in self.children():
            module.reset_parameters()  # type: ignore[operator]

    def forward(self, x: Tensor) -> Tensor:
        """``[T, H]`` to ``[T, H]``: computed in the weights' dtype, returned in x's.

        Under autocast both are autocast's, as for a linear layer.
        """
        weight = self.up_proj.weight
        assert isinstance(weight, Tensor), "up_proj is a linear layer"
        compute_dtype, out_dtype = choose_dtypes(x, weight)
        x = x.to(compute_dtype)
        gate = None if self.gate_proj is None else self.gate_proj(x)
        y = self.down_proj(activate(gate, self.up_proj(x), self.activation))
        if self.gate is not None:
            y = torch.sigmoid(self.gate(x)) * y
        return y.to(out_dtype)
