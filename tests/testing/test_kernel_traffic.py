"""The counter: masks, repeats and distinct addresses of a kernel small enough to count by hand."""

import torch
import triton
import triton.language as tl

from piper_kernels.testing.kernel_traffic import count_kernel_traffic


@triton.jit
def _copy_kernel(out_ptr, in_ptr, size, BLOCK: tl.constexpr):
    places = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    first = tl.load(in_ptr)
    value = tl.load(in_ptr + places, mask=places < size, other=0)
    tl.store(out_ptr + places, value + first, mask=places < size)


def test_count_kernel_traffic_by_hand() -> None:
    source, target = torch.arange(5, dtype=torch.int16), torch.zeros(5, dtype=torch.int32)
    with count_kernel_traffic() as launches:
        _copy_kernel[(2,)](target, source, 5, BLOCK=4)
        _copy_kernel[(1,)](target, source, 1, BLOCK=4)
    assert target.tolist() == [0, 1, 2, 3, 4]
    assert [launch.kernel for launch in launches] == ["_copy_kernel", "_copy_kernel"]
    # two scalars and five elements of 2 bytes in, five of 4 bytes out; the scalar is no new address
    assert launches[0].issued_bytes == 2 * 2 + 5 * 2 + 5 * 4
    assert launches[0].compulsory_bytes == 5 * 2 + 5 * 4
    assert launches[1].issued_bytes == 2 + 2 + 4
    assert launches[1].compulsory_bytes == 2 + 4


def test_count_kernel_traffic_ends_with_its_block() -> None:
    source, target = torch.ones(1, dtype=torch.int16), torch.zeros(1, dtype=torch.int32)
    with count_kernel_traffic() as launches:
        pass
    _copy_kernel[(1,)](target, source, 1, BLOCK=1)
    assert launches == []
