"""The best placement with the fewest swaps, by listing all placements of a small group.

Pure: no torch, no process group. Letters: E experts, P ranks, S slots.
"""

import itertools
import math

from piper_kernels.dist.placement_map import PlacementMap
from piper_kernels.pipeline.expert_costs import ExpertCosts

# all placements of 8 experts on 4 ranks are 2,520, on 5 ranks 5,040
MOST_PLACEMENTS = 5_040

# of each slot, its expert; slots of one rank in rising order, since their order costs nothing
_State = tuple[int, ...]


def is_small(placement: PlacementMap) -> bool:
    """Whether all placements with these slots can be listed; not where an expert has copies."""
    if placement.has_replicas or placement.num_experts > 10:
        return False
    orders = math.factorial(placement.num_experts)
    return orders // math.prod(math.factorial(len(s)) for s in placement.slots) <= MOST_PLACEMENTS


def fewest_swaps(
    before: PlacementMap, costs: ExpertCosts, min_gain: float
) -> list[tuple[int, int]]:
    """Pairs of slots to swap, in order, that reach the least slowest rank with the fewest swaps.

    Args:
        before: a placement that :func:`is_small`.
        costs: of its experts and ranks.
        min_gain: share of the mean rank's seconds that must be won in all, or nothing is swapped.

    Example:
        >>> before = PlacementMap(num_experts=4, slots=((0, 1), (2, 3)))
        >>> fewest_swaps(before, ExpertCosts.from_loads([9, 7, 2, 1], 2), 0.0)
        [(0, 2)]
    """
    ranks = before.maps.physical_to_rank.tolist()
    table = costs.seconds.tolist()

    def slowest(state: _State) -> float:
        seconds = [0.0] * before.num_ranks
        for expert, rank in zip(state, ranks, strict=True):
            seconds[rank] += table[expert][rank]
        return max(seconds)

    start = tuple(before.maps.physical_to_logical.tolist())
    reached: dict[_State, tuple[_State, _State | None]] = {
        _sorted_in_ranks(start, ranks): (start, None)
    }
    layer = [start]
    least_gain = min_gain * float(costs.of_ranks(before).mean())
    best, best_seconds = start, slowest(start) - least_gain
    while layer:
        following = []
        for state in layer:
            for a, b in itertools.combinations(range(len(state)), 2):
                if ranks[a] == ranks[b]:
                    continue
                swapped = list(state)
                swapped[a], swapped[b] = state[b], state[a]
                new = tuple(swapped)
                key = _sorted_in_ranks(new, ranks)
                if key in reached:
                    continue
                reached[key] = (new, state)
                following.append(new)
        # rounding must not prefer a placement that takes more swaps
        found = min(following, key=slowest, default=best)
        if slowest(found) < best_seconds * (1 - 1e-12):
            best, best_seconds = found, slowest(found)
        layer = following
    return _path(best, ranks, reached)


def _sorted_in_ranks(state: _State, ranks: list[int]) -> _State:
    return tuple(expert for _, expert in sorted(zip(ranks, state, strict=True)))


def _path(
    state: _State, ranks: list[int], reached: dict[_State, tuple[_State, _State | None]]
) -> list[tuple[int, int]]:
    """The swaps from the start to ``state``."""
    swaps: list[tuple[int, int]] = []
    while (parent := reached[_sorted_in_ranks(state, ranks)][1]) is not None:
        a, b = (i for i, pair in enumerate(zip(state, parent, strict=True)) if pair[0] != pair[1])
        swaps.append((a, b))
        state = parent
    return swaps[::-1]
