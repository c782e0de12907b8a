"""How a GEMM reads its weights: through pointers, or through a tensor descriptor where it can.

A descriptor (TMA on NVIDIA) moves a whole tile with one instruction and no address a thread keeps.
It asks for a contiguous last dim and 16-byte steps between all others. Gates and ups in halves are
read together, as two slices of one box; where both lie in one row, pointers remain.
Letters: E num_experts, N output size, K contracted size.
"""

from dataclasses import dataclass
from typing import Literal

from torch import Tensor
from triton.tools.tensor_descriptor import TensorDescriptor

from piper_kernels.triton.device_traits import traits_of

Source = Literal["pointers", "rows", "columns", "halves"]
_STEP_BYTES = 16
# cuTensorMapEncodeTiled: a box has at most 256 elements a dim, a step at most 2^40 bytes
_MOST_BOX = 256
_MOST_STEP_BYTES = 1 << 40
_DESCRIBED_BYTES = 2


@dataclass(frozen=True, slots=True, eq=False)
class WeightSource:
    """What a kernel gets for its weights.

    Attributes:
        kind: ``"pointers"``; or how the descriptor's boxes lie: ``"rows"`` are ``[N, K]`` boxes,
            ``"columns"`` ``[K, N]`` ones, ``"halves"`` ``[2, N / 2, K]`` ones.
        weight: the tensor, or its descriptor.
    """

    kind: Source
    weight: Tensor | TensorDescriptor


def _is_describable(matrix: Tensor, box: list[int]) -> bool:
    """Whether TMA can read boxes of ``matrix``, a contiguous last dim given."""
    size = matrix.element_size()
    steps = [stride * size for stride in matrix.stride()[:-1]]
    return (
        size == _DESCRIBED_BYTES
        and matrix.numel() > 0
        and matrix.data_ptr() % _STEP_BYTES == 0
        and all(step > 0 and step % _STEP_BYTES == 0 for step in steps)
        and max(steps) < _MOST_STEP_BYTES
        and max(box) <= _MOST_BOX
    )


def _described(kind: Source, matrix: Tensor, box: list[int]) -> WeightSource | None:
    if not _is_describable(matrix, box):
        return None
    shape, strides = list(matrix.shape), list(matrix.stride())
    return WeightSource(kind, TensorDescriptor(matrix, shape, strides, box))


def weight_source(
    weight: Tensor, block_n: int, block_k: int, *, has_halves: bool = False
) -> WeightSource:
    """Choose how ``[BLOCK_N, BLOCK_K]`` tiles of a weight are read.

    Args:
        weight: ``[E, N, K]``, any strides, K the contracted dim.
        block_n: columns of a tile of the output.
        block_k: how much of K one step takes.
        has_halves: a tile takes its columns from both halves of N alike.

    Returns:
        A descriptor where the device has them, elements have 2 bytes and the strides allow it.

    Example:
        >>> import torch
        >>> weight_source(torch.zeros(2, 8, 16), 16, 16).kind
        'pointers'
    """
    pointers = WeightSource("pointers", weight)
    if not traits_of(weight.device).has_descriptors:
        return pointers
    found = None
    if weight.stride(2) == 1 and has_halves:
        halves = weight.unflatten(1, (2, -1))
        found = _described("halves", halves, [1, 2, block_n // 2, block_k])
    elif weight.stride(2) == 1:
        found = _described("rows", weight, [1, block_n, block_k])
    elif weight.stride(1) == 1 and not has_halves:
        found = _described("columns", weight.mT, [1, block_k, block_n])
    return found or pointers
