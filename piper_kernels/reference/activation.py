"""activation: what happens between the two expert projections."""

import torch
import torch.nn.functional as F
from torch import Tensor

from piper_kernels.config import Activation, WeightLayout


def split_gate_up(preact: Tensor, layout: WeightLayout) -> tuple[Tensor | None, Tensor]:
    """Split the first projection's output into gate and up (gate is ``None`` when ungated).

    Args:
        preact: ``[..., 2I]`` if gated, ``[..., I]`` if not.
        layout: says whether gate and up are halves or alternate.

    Returns:
        ``(gate, up)``, views of ``[..., I]``.

    Example:
        >>> preact = torch.tensor([1, 2, 3, 4])
        >>> split_gate_up(preact, WeightLayout(is_interleaved=True))
        (tensor([1, 3]), tensor([2, 4]))
    """
    if not layout.is_gated:
        return None, preact
    if layout.is_interleaved:
        return preact[..., 0::2], preact[..., 1::2]
    gate, up = preact.chunk(2, dim=-1)
    return gate, up


def apply_function(z: Tensor, activation: Activation) -> Tensor:
    """The scalar function of an activation, element by element."""
    match activation.function:
        case "silu":
            return z * torch.sigmoid(activation.alpha * z)
        case "gelu":
            return F.gelu(z)
        case "gelu_tanh":
            return F.gelu(z, approximate="tanh")
        case "relu":
            return F.relu(z)
        case "relu2":
            return F.relu(z).square()
        case "identity":
            return z


def activation(preact: Tensor, activation: Activation, layout: WeightLayout) -> Tensor:
    """Apply ``activation`` to the first projection's output.

    Gated: ``a = (clamp(up, -limit, limit) + up_offset) * f(clamp(gate, max=limit))``.
    Ungated: ``a = f(up)``.

    Args:
        preact: ``[R, 2I]`` if gated, ``[R, I]`` if not; any floating dtype.
        activation: the function and its constants.
        layout: gated or not, halves or interleaved.

    Returns:
        ``[R, I]``, in preact's dtype.

    Example:
        >>> activation(torch.tensor([[1.0, 2.0]]), Activation(function="relu"), WeightLayout())
        tensor([[2.]])
    """
    gate, up = split_gate_up(preact, layout)
    return activate(gate, up, activation)


def activate(gate: Tensor | None, up: Tensor, activation: Activation) -> Tensor:
    """:func:`activation` of a gate and an up that are apart already; gate ``None`` is ungated."""
    if gate is None:
        return apply_function(up, activation)
    if activation.limit is not None:
        gate = gate.clamp(max=activation.limit)
        up = up.clamp(min=-activation.limit, max=activation.limit)
    return (up + activation.up_offset) * apply_function(gate, activation)
