"""Which rows belong to which expert, read on the host once per call."""

from itertools import pairwise
from typing import NamedTuple

from torch import Tensor


class Segment(NamedTuple):
    """The rows ``start:end`` of one expert that has any."""

    expert: int
    start: int
    end: int


class Segments(NamedTuple):
    """Every expert with rows, every expert without, and the number of valid rows."""

    hit: list[Segment]
    empty: list[int]
    num_valid: int

    def blocks(self, max_rows: int) -> list[Segment]:
        """The hit segments, cut into near-equal blocks of at most ``max_rows``; longest first.

        Example:
            >>> Segments([Segment(0, 0, 2), Segment(3, 2, 9)], [1, 2], 9).blocks(4)
            [Segment(expert=3, start=2, end=6), Segment(expert=3, start=6, end=9), \
Segment(expert=0, start=0, end=2)]
        """
        blocks = [
            Segment(expert, start + part.start, start + part.stop)
            for expert, start, end in self.hit
            for part in split_evenly(end - start, max_rows)
        ]
        return sorted(blocks, key=lambda block: block.start - block.end)


def longest(blocks: list[Segment]) -> int:
    """Rows of the longest block, 0 without blocks."""
    return max((end - start for _, start, end in blocks), default=0)


def split_evenly(size: int, max_size: int) -> list[slice]:
    """Cut ``range(size)`` into the fewest pieces of at most ``max_size``, of near-equal length.

    Example:
        >>> split_evenly(7, 4)
        [slice(0, 4, None), slice(4, 7, None)]
    """
    count = -(-size // max_size)
    edges = [-(-size * i // count) for i in range(count + 1)] if count else []
    return [slice(start, end) for start, end in pairwise(edges)]


def read_segments(expert_offsets: Tensor) -> Segments:
    """Split ``expert_offsets [E + 1]`` into the segments of its experts.

    Example:
        >>> import torch
        >>> read_segments(torch.tensor([0, 2, 2, 5])).hit
        [Segment(expert=0, start=0, end=2), Segment(expert=2, start=2, end=5)]
    """
    offsets = expert_offsets.tolist()
    hit, empty = [], []
    for expert, (start, end) in enumerate(pairwise(offsets)):
        if end > start:
            hit.append(Segment(expert, start, end))
        else:
            empty.append(expert)
    return Segments(hit, empty, offsets[-1])
