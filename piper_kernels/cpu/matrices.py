"""One expert's weights as the loops over experts want them, and the two steps that use them."""

from typing import NamedTuple

import torch
from torch import Tensor

from piper_kernels.contracts import ExpertsWeights
from piper_kernels.cpu.gemm import matmul_into


class Matrices(NamedTuple):
    """Views, for ``z = x @ gate_up + gate_up_bias`` and ``out = act @ down + down_bias``.

    Attributes:
        gate_up: ``[H, 2I]``, ``[H, I]`` ungated.
        down: ``[I, H]``.
        gate_up_bias: ``[2I]`` or ``None``.
        down_bias: ``[H]`` or ``None``.
    """

    gate_up: Tensor
    down: Tensor
    gate_up_bias: Tensor | None
    down_bias: Tensor | None


def matrices_of(weights: ExpertsWeights, expert: int) -> Matrices:
    """The weights of one expert, whatever the layout."""
    gate_up, down = weights.gate_up_proj[expert], weights.down_proj[expert]
    is_transposed = weights.layout.is_transposed
    return Matrices(
        gate_up=gate_up if is_transposed else gate_up.t(),
        down=down if is_transposed else down.t(),
        gate_up_bias=None if weights.gate_up_bias is None else weights.gate_up_bias[expert],
        down_bias=None if weights.down_bias is None else weights.down_bias[expert],
    )


def project(out: Tensor, rows: Tensor, matrix: Tensor, bias: Tensor | None) -> None:
    """``out[...] = rows @ matrix + bias``."""
    matmul_into(out, rows, matrix)
    if bias is not None:
        out.add_(bias)


def gather(scratch: Tensor, source: Tensor, tokens: Tensor) -> Tensor:
    """Rows ``tokens [n]`` of ``source [T, width]``, in the first rows of ``scratch``."""
    return torch.index_select(source, 0, tokens, out=scratch[: tokens.shape[0]])
