"""Which rows belong to which expert, read on the host once per call."""

from itertools import pairwise
from typing import NamedTuple

from torch import Tensor

from piper_kernels.errors import RoutingError, instruction


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

    @property
    def max_rows(self) -> int:
        """Rows of the busiest expert."""
        return max((end - start for _, start, end in self.hit), default=0)


def read_segments(function: str, expert_offsets: Tensor) -> Segments:
    """Split ``expert_offsets [E + 1]`` into the segments of its experts.

    Raises:
        RoutingError: an id was negative. Such ids sort before expert 0, so they show as a first
            offset above 0.

    Example:
        >>> import torch
        >>> read_segments("experts", torch.tensor([0, 2, 2, 5])).hit
        [Segment(expert=0, start=0, end=2), Segment(expert=2, start=2, end=5)]
    """
    offsets = expert_offsets.tolist()
    if offsets[0] != 0:
        value = f"{offsets[0]} negative ids"
        remedy = f"Mark slots that nobody computes with E = {len(offsets) - 1}."
        raise RoutingError(instruction(function, "expert_ids", "be >= 0", value, remedy))
    hit, empty = [], []
    for expert, (start, end) in enumerate(pairwise(offsets)):
        if end > start:
            hit.append(Segment(expert, start, end))
        else:
            empty.append(expert)
    return Segments(hit, empty, offsets[-1])
