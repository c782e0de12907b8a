"""Rows of several tensors as rows of bytes, and back: what belongs together travels in one message.

Letters: n rows.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True, slots=True)
class RowFormat:
    """What one row on the wire consists of.

    Attributes:
        parts: dtype and number of elements of each part.

    Example:
        >>> row = RowFormat(((torch.bfloat16, 3), (torch.int32, 1)))
        >>> row.num_bytes
        10
        >>> wire = row.pack([torch.ones(2, 3, dtype=torch.bfloat16),
        ...                  torch.tensor([[7], [8]], dtype=torch.int32)])
        >>> wire.shape, row.unpack(wire)[1].tolist()
        (torch.Size([2, 10]), [[7], [8]])
    """

    parts: tuple[tuple[torch.dtype, int], ...]

    @classmethod
    def of(cls, tensors: Sequence[Tensor]) -> "RowFormat":
        """The format of ``[n, width]`` tensors side by side."""
        return cls(tuple((tensor.dtype, tensor.shape[1]) for tensor in tensors))

    @property
    def num_bytes(self) -> int:
        """Of one row."""
        return sum(dtype.itemsize * width for dtype, width in self.parts)

    def pack(self, tensors: Sequence[Tensor]) -> Tensor:
        """``[n, num_bytes]`` uint8 from ``[n, width]`` tensors; one alone is not copied."""
        parts = [_dense(tensor.detach()).view(torch.uint8) for tensor in tensors]
        return parts[0] if len(parts) == 1 else torch.cat(parts, dim=1)

    def unpack(self, wire: Tensor) -> list[Tensor]:
        """The tensors, ``[n, width]``; a part alone is not copied."""
        sizes = [dtype.itemsize * width for dtype, width in self.parts]
        pieces = wire.split(sizes, dim=1)
        if len(pieces) > 1:
            # a part need not begin where its dtype may
            pieces = tuple(p.clone(memory_format=torch.contiguous_format) for p in pieces)
        return [piece.view(dtype) for piece, (dtype, _) in zip(pieces, self.parts, strict=True)]


def _dense(tensor: Tensor) -> Tensor:
    """With the strides of a new tensor: those of size 1 or 0 may be any in a contiguous one."""
    if tensor.is_contiguous() and tensor.stride(-1) == 1:
        return tensor
    return tensor.clone(memory_format=torch.contiguous_format)
