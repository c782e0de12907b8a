"""Rows as bytes, and back, whatever the dtypes beside one another."""

import pytest
import torch

from piper_kernels.dist.row_bytes import RowFormat

DTYPES = [torch.float64, torch.bfloat16, torch.int32, torch.float16, torch.uint8, torch.int64]


@pytest.mark.parametrize("num_rows", [0, 1, 5])
@pytest.mark.parametrize("num_parts", [1, 2, 6])
def test_row_format_there_and_back(num_rows: int, num_parts: int) -> None:
    # odd widths: a part of eight-byte numbers begins at an odd byte
    tensors = [
        torch.randint(0, 99, (num_rows, 2 * index + 1)).to(dtype)
        for index, dtype in enumerate(reversed(DTYPES[:num_parts]))
    ]
    row = RowFormat.of(tensors)
    wire = row.pack([tensor.T.contiguous().T for tensor in tensors])
    assert wire.shape == (num_rows, row.num_bytes)
    assert wire.dtype == torch.uint8
    assert row.num_bytes == sum(t.element_size() * t.shape[1] for t in tensors)
    for have, want in zip(row.unpack(wire), tensors, strict=True):
        assert torch.equal(have, want)
        assert have.dtype == want.dtype


@pytest.mark.parametrize("shape", [(0, 3), (1, 1), (4, 1), (2, 3)])
def test_row_format_takes_expanded_tensors(shape: tuple[int, int]) -> None:
    # the gradient of a sum: all strides 0, which for few elements passes as contiguous
    tensor = torch.ones(()).expand(shape)
    row = RowFormat.of([tensor])
    assert torch.equal(row.unpack(row.pack([tensor]))[0], tensor)


def test_row_format_keeps_every_bit() -> None:
    # a NaN with a payload is moved, not computed
    bits = torch.tensor([[0x7FC00123, -1]], dtype=torch.int32)
    rows = bits.view(torch.float32)
    row = RowFormat.of([rows, rows])
    for part in row.unpack(row.pack([rows, rows])):
        assert torch.equal(part.view(torch.int32), bits)
