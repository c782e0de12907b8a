"""activation and its derivative, written out: no autograd, at least fp32 inside.

Gated:   ``a = (clamp(up, -limit, limit) + up_offset) * f(clamp(gate, max=limit))``
Ungated: ``a = f(up)``

Gradients at the edges are those of the oracle: a clamp passes the gradient where the input is
inside or on its bound, relu passes none at 0.
"""

from collections.abc import Iterator

import torch
import torch.nn.functional as F
from torch import Tensor

from piper_kernels.config import Activation, WeightLayout
from piper_kernels.cpu.gemm import wide_dtype

# Elements of one temporary: a handful of fp32 temporaries of this size stay in a 1 MB L2 cache.
_CHUNK_ELEMENTS = 32 * 1024


def split_gate_up(preact: Tensor, layout: WeightLayout) -> tuple[Tensor | None, Tensor]:
    """Views of gate (``None`` when ungated) and up, ``[n, I]`` each."""
    if not layout.is_gated:
        return None, preact
    if layout.is_interleaved:
        return preact[:, 0::2], preact[:, 1::2]
    size = preact.shape[1] // 2
    return preact[:, :size], preact[:, size:]


def apply_function(z: Tensor, activation: Activation) -> Tensor:
    """``f(z)``; may return ``z`` itself."""
    match activation.function:
        case "silu":
            if activation.alpha == 1.0:
                return F.silu(z)
            return torch.sigmoid(z * activation.alpha).mul_(z)
        case "gelu":
            return F.gelu(z)
        case "gelu_tanh":
            return F.gelu(z, approximate="tanh")
        case "relu":
            return F.relu(z)
        case "relu2":
            return F.relu(z).square_()
        case "identity":
            return z


def function_backward(grad: Tensor, z: Tensor, activation: Activation) -> Tensor:
    """``grad * f'(z)``; may return ``grad`` itself."""
    aten = torch.ops.aten
    match activation.function:
        case "silu":
            if activation.alpha == 1.0:
                return aten.silu_backward(grad, z)
            sigmoid = torch.sigmoid(z * activation.alpha)
            slope = (1 - sigmoid).mul_(z).mul_(activation.alpha).add_(1).mul_(sigmoid)
            return slope.mul_(grad)
        case "gelu":
            return aten.gelu_backward(grad, z)
        case "gelu_tanh":
            return aten.gelu_backward(grad, z, approximate="tanh")
        case "relu":
            return aten.threshold_backward(grad, z, 0)
        case "relu2":
            return F.relu(z).mul_(2).mul_(grad)
        case "identity":
            return grad


def _chunks(num_rows: int, width: int) -> Iterator[slice]:
    step = max(1, _CHUNK_ELEMENTS // max(width, 1))
    for start in range(0, num_rows, step):
        yield slice(start, min(start + step, num_rows))


def activation_forward(
    out: Tensor, preact: Tensor, activation: Activation, layout: WeightLayout
) -> None:
    """``out[...] = activation(preact)``.

    Args:
        out: ``[n, I]``.
        preact: ``[n, 2I]``, ``[n, I]`` ungated; out's dtype.
        activation: the function and its constants.
        layout: gated or not, halves or interleaved.
    """
    wide = wide_dtype(preact.dtype)
    for rows in _chunks(*out.shape):
        gate, up = split_gate_up(preact[rows].to(wide), layout)
        if gate is None:
            out[rows].copy_(apply_function(up, activation))
            continue
        gate, up = _clamp(gate, up, activation)
        if activation.up_offset:
            up = up + activation.up_offset
        torch.mul(apply_function(gate, activation), up, out=out[rows])


def activation_backward(
    preact: Tensor,
    grad_act: Tensor | None,
    gates: Tensor,
    activation: Activation,
    layout: WeightLayout,
    *,
    grad_preact: Tensor | None,
    scaled_act: Tensor | None,
    grad_gates: Tensor | None,
) -> None:
    """Everything that the backward of an expert needs from its activation; fills what is given.

    Args:
        preact: ``[n, 2I]``, ``[n, I]`` ungated.
        grad_act: ``[n, I]``, gradient of the expert's output times the down projection, before the
            gate. May be ``None`` if only ``scaled_act`` is wanted.
        gates: ``[n]`` in the wide dtype, the rows' gates.
        activation: the function and its constants.
        layout: gated or not, halves or interleaved.
        grad_preact: like ``preact``; receives the gradient, gate included.
        scaled_act: ``[n, I]``; receives ``gate * activation(preact)``.
        grad_gates: ``[n]`` in the wide dtype; receives ``sum(grad_act * activation(preact))``.
    """
    wide = wide_dtype(preact.dtype)
    inner_size = preact.shape[1] // 2 if layout.is_gated else preact.shape[1]
    for rows in _chunks(preact.shape[0], inner_size):
        scale = gates[rows, None]
        gate, up = split_gate_up(preact[rows].to(wide), layout)
        if gate is None:
            value, factor = apply_function(up, activation), None
            act = value
        else:
            inside_gate, inside_up = _clamp(gate, up, activation)
            value = apply_function(inside_gate, activation)
            factor = inside_up + activation.up_offset if activation.up_offset else inside_up
            act = value * factor
        if scaled_act is not None:
            torch.mul(act, scale, out=scaled_act[rows])
        if grad_act is None:
            continue
        slope = grad_act[rows].to(wide)
        if grad_gates is not None:
            torch.sum(slope * act, dim=1, out=grad_gates[rows])
        if grad_preact is None:
            continue
        slope = slope * scale
        if gate is None or factor is None:
            grad_preact[rows] = function_backward(slope, up, activation)
            continue
        grad_gate = function_backward(slope * factor, inside_gate, activation)
        grad_up = slope.mul_(value)
        if activation.limit is not None:
            grad_gate = torch.where(gate == inside_gate, grad_gate, 0)
            grad_up = torch.where(up == inside_up, grad_up, 0)
        into_gate, into_up = split_gate_up(grad_preact[rows], layout)
        assert into_gate is not None, f"{layout=}"
        into_gate.copy_(grad_gate)
        into_up.copy_(grad_up)


def _clamp(gate: Tensor, up: Tensor, activation: Activation) -> tuple[Tensor, Tensor]:
    if activation.limit is None:
        return gate, up
    limit = activation.limit
    return gate.clamp(max=limit), up.clamp(min=-limit, max=limit)
