"""How many layers each stage gets when layers, or what stages do besides, weigh differently.

Pure: no torch, no process group.
"""

import bisect
import itertools
from collections.abc import Sequence

from piper_kernels.errors import PlanError, require


def balance_layers(
    layer_s: Sequence[float], num_stages: int, *, first_s: float = 0.0, last_s: float = 0.0
) -> tuple[int, ...]:
    """Consecutive layers for each stage, at least one, so that the slowest stage is fastest.

    Of equally good splits the one with most layers behind: stages in front keep more microbatches.

    Args:
        layer_s: of each layer, in order.
        num_stages: to fill.
        first_s: what the first stage does besides.
        last_s: what the last stage does besides.

    Raises:
        PlanError: fewer layers than stages.

    Example:
        >>> balance_layers([1.0] * 8, 4, last_s=1.0)
        (1, 2, 3, 2)
    """
    num_layers = len(layer_s)
    requirement = f"be at least the {num_stages} stages"
    fits = 1 <= num_stages <= num_layers
    require(fits, "balance_layers", "num_layers", requirement, num_layers, error=PlanError)
    # a little more than all, against rounding
    sums = [0.0, *itertools.accumulate(layer_s)]
    low, high = 0.0, (sums[-1] + first_s + last_s) * (1 + 1e-9)
    best = _fill(sums, num_stages, first_s, last_s, high)
    assert best is not None, f"all layers fit into {high} seconds"
    while high - low > 1e-9 * high:
        middle = (low + high) / 2
        split = _fill(sums, num_stages, first_s, last_s, middle)
        if split is None:
            low = middle
        else:
            best, high = split, middle
    return best


def _fill(
    sums: list[float], num_stages: int, first_s: float, last_s: float, limit: float
) -> tuple[int, ...] | None:
    """Fill stages from the last one on up to ``limit``; ``None`` if layers are left over."""
    counts, left = [], len(sums) - 1
    for stage in reversed(range(num_stages)):
        extra = (first_s if stage == 0 else 0.0) + (last_s if stage == num_stages - 1 else 0.0)
        if sums[left] - sums[left - 1] + extra > limit:
            return None
        # stages in front need a layer each
        start = bisect.bisect_left(sums, sums[left] + extra - limit, stage, left - 1)
        counts.append(left - start)
        left = start
    return tuple(reversed(counts)) if left == 0 else None
