"""How many layers each stage gets when layers, or what stages do besides, weigh differently.

Pure: no torch, no process group.
"""

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
    low, high = 0.0, (sum(layer_s) + first_s + last_s) * (1 + 1e-9)
    best = _fill(layer_s, num_stages, first_s, last_s, high)
    assert best is not None, f"all layers fit into {high} seconds"
    for _ in range(50):
        middle = (low + high) / 2
        split = _fill(layer_s, num_stages, first_s, last_s, middle)
        if split is None:
            low = middle
        else:
            best, high = split, middle
    return best


def _fill(
    layer_s: Sequence[float], num_stages: int, first_s: float, last_s: float, limit: float
) -> tuple[int, ...] | None:
    """Fill stages from the last one on up to ``limit``; ``None`` if layers are left over."""
    counts, left = [], len(layer_s)
    for stage in reversed(range(num_stages)):
        extra = (first_s if stage == 0 else 0.0) + (last_s if stage == num_stages - 1 else 0.0)
        weight, count = extra, 0
        # stages in front need a layer each
        while left > stage and (count == 0 or weight + layer_s[left - 1] <= limit):
            left -= 1
            count += 1
            weight += layer_s[left]
        if weight > limit:
            return None
        counts.append(count)
    return tuple(reversed(counts)) if left == 0 else None
