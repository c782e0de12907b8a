"""Segments and how they are cut: by the shapes alone, without gaps."""

import pytest
import torch

from piper_kernels.cpu.segments import Segment, longest, read_segments, split_evenly


def test_read_segments() -> None:
    segments = read_segments(torch.tensor([0, 0, 3, 3, 8], dtype=torch.int32))
    assert segments.hit == [Segment(1, 0, 3), Segment(3, 3, 8)]
    assert segments.empty == [0, 2]
    assert segments.num_valid == 8


def test_segments_blocks_longest_first() -> None:
    segments = read_segments(torch.tensor([0, 2, 2, 12]))
    blocks = segments.blocks(4)
    assert blocks == [
        Segment(2, 2, 6),
        Segment(2, 6, 9),
        Segment(2, 9, 12),
        Segment(0, 0, 2),
    ]
    assert longest(blocks) == 4
    assert longest([]) == 0


@pytest.mark.parametrize("size", [0, 1, 2, 7, 255, 256, 257, 513, 1000])
@pytest.mark.parametrize("max_size", [1, 3, 256])
def test_split_evenly(size: int, max_size: int) -> None:
    pieces = split_evenly(size, max_size)
    assert [i for piece in pieces for i in range(size)[piece]] == list(range(size))
    lengths = [piece.stop - piece.start for piece in pieces]
    assert len(pieces) == -(-size // max_size)
    assert max(lengths, default=0) - min(lengths, default=0) <= 1
    assert max(lengths, default=0) <= max_size
