"""Max-min fair sharing of links by flows, and how long the flows take.

A flow gets as much as it can without taking from one that has less (per unit of weight). Rates stay
the same until a flow ends, then are shared anew. This is what congestion control aims at, without
packets, queues or start-up.

Pure: no torch, no process group. Letters: F flows, H hops of a flow, R resources.
"""

from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from piper_kernels.dist.links import FloatArray
from piper_kernels.dist.topology import IntArray
from piper_kernels.errors import require

# dials of the approximation, set by comparing with exact flows: tests/dist/test_simulate.py
SLACK = 0.05
PAST_SHARE = 0.05


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class Flows:
    """Bytes on their way.

    Attributes:
        size_bytes: ``[F]`` above 0.
        weight: ``[F]`` messages that a flow stands for: it takes as many shares of a link.
        hops: ``[H, F]`` resources that a flow crosses, each once; ``num_resources`` where it
            crosses fewer than H.
        cost_s_per_byte: ``[H, F]`` seconds for which a byte of the flow occupies the resource.
        num_resources: R. Each offers one second per second.
    """

    size_bytes: FloatArray
    weight: FloatArray
    hops: NDArray[np.int32]
    cost_s_per_byte: FloatArray
    num_resources: int

    def take(self, chosen: NDArray[Any]) -> "Flows":
        """Some of the flows, by index or mask."""
        return Flows(
            size_bytes=self.size_bytes[chosen],
            weight=self.weight[chosen],
            hops=self.hops[:, chosen],
            cost_s_per_byte=self.cost_s_per_byte[:, chosen],
            num_resources=self.num_resources,
        )

    def busy_s(self) -> FloatArray:
        """``[R]`` seconds for which all flows together occupy each resource."""
        return self.sum_by_resource(self.size_bytes)

    def sum_by_resource(self, amount: FloatArray) -> FloatArray:
        """``[R]`` sums of ``amount * cost_s_per_byte`` over the flows that cross a resource."""
        total = np.zeros(self.num_resources + 1)
        for hop, cost in zip(self.hops, self.cost_s_per_byte, strict=True):
            total += np.bincount(hop, weights=amount * cost, minlength=len(total))
        return total[:-1]


def max_min_rates(flows: Flows, slack: float = 0.0) -> FloatArray:
    """Max-min fair rates.

    A resource is settled once none of its flows is held lower elsewhere; all such resources are
    settled at once, so the rounds are as many as bottlenecks hang on one another, not as many as
    there are resources.

    Args:
        flows: each with a hop at least.
        slack: settle a resource already when its flows are held lower by this share at most; they
            then get that much less than they could. 0 is exact, more saves rounds.

    Returns:
        ``[F]`` bytes/s.

    Example:
        Flows 0 and 1 share resource 0, flow 1 also crosses the slower resource 1.

        >>> flows = Flows(
        ...     size_bytes=np.ones(2), weight=np.ones(2), num_resources=2,
        ...     hops=np.array([[0, 0], [2, 1]], dtype=np.int32),
        ...     cost_s_per_byte=np.array([[0.1, 0.1], [0.0, 0.5]]))
        >>> max_min_rates(flows).tolist()  # flow 1 gets 2 of 10 bytes/s, flow 0 the rest
        [8.0, 2.0]
    """
    rates = np.zeros(len(flows.size_bytes))
    waiting, rest = np.arange(len(rates)), flows
    left, load = np.ones(flows.num_resources), flows.sum_by_resource(flows.weight)
    # sums of removals leave this much of a load that is gone
    nothing = 1e-12 * load
    is_waiting = np.ones(len(waiting), dtype=bool)
    while len(waiting):
        # the last entry is for hops that are not there
        share = np.full(flows.num_resources + 1, np.inf)
        np.divide(left, load, out=share[:-1], where=load > nothing)
        own = np.where(is_waiting, _least(share, rest.hops), np.inf)
        done = is_waiting & _is_settled(share, rest.hops, own, slack)
        settled = rest.take(done)
        rate = own[done] * settled.weight
        rates[waiting[done]] = rate
        left = np.maximum(left - settled.sum_by_resource(rate), 0.0)
        load = load - settled.sum_by_resource(settled.weight)
        is_waiting &= ~done
        # carrying settled flows along is cheaper than copying the others in every round
        if 2 * np.count_nonzero(is_waiting) <= len(waiting):
            waiting, rest = waiting[is_waiting], rest.take(is_waiting)
            is_waiting = np.ones(len(waiting), dtype=bool)
    return rates


def _least(per_resource: FloatArray, hops: NDArray[np.int32]) -> FloatArray:
    """The smallest value among the resources that each flow crosses."""
    least = per_resource[hops[0]]
    for hop in hops[1:]:
        np.minimum(least, per_resource[hop], out=least)
    return least


def _is_settled(
    share: FloatArray, hops: NDArray[np.int32], own: FloatArray, slack: float
) -> NDArray[np.bool_]:
    """Flows on a resource none of whose flows is held lower elsewhere, but for the slack."""
    lowest = np.full_like(share, np.inf)
    for hop in hops:
        np.minimum.at(lowest, hop, own)
    is_bottleneck = lowest >= share * (1 - max(slack, 1e-12))
    is_bottleneck[-1] = False
    is_settled = is_bottleneck[hops[0]]
    for hop in hops[1:]:
        is_settled |= is_bottleneck[hop]
    return is_settled


def end_times(
    flows: Flows,
    tolerance: float = 0.0,
    *,
    rest_share: float = 0.0,
    parts: IntArray | None = None,
) -> FloatArray:
    """When each flow ends if all start together.

    Args:
        flows: sizes above 0, each with a hop at least.
        tolerance: 0 is exact and shares anew after every end. Else ends that are near one another
            are awaited before the next sharing, as long as no resource is left unused for more than
            this share of the time. Flows that go on get what was left unused, as far as their other
            hops allow.
        rest_share: a resource with less to do than the busiest of its part may also be left unused
            for this share of the difference. It costs some time of flows that are not the last to
            end, and saves most of the work.
        parts: ``[R]`` part of each resource, where the last end of each part is wanted; ``None``
            where the last end of all is.

    Returns:
        ``[F]`` seconds.

    Example:
        >>> flows = Flows(
        ...     size_bytes=np.array([8.0, 6.0]), weight=np.ones(2), num_resources=1,
        ...     hops=np.zeros((1, 2), dtype=np.int32), cost_s_per_byte=np.full((1, 2), 0.5))
        >>> end_times(flows).tolist()  # 1 byte/s each until 6 s, then 2
        [7.0, 6.0]
    """
    require(0 <= tolerance < 1, "end_times", "tolerance", "be in [0, 1)", tolerance)
    ends = np.zeros(len(flows.size_bytes))
    waiting, rest = np.arange(len(ends)), flows
    left, now_s = flows.size_bytes, 0.0
    while len(waiting):
        rates = max_min_rates(rest, SLACK if tolerance else 0.0)
        needs_s = left / rates
        step_s = float(needs_s.min())
        if tolerance:
            to_do_s = rest.sum_by_resource(left)
            may_rest_s = rest_share * (_busiest(to_do_s, parts) - to_do_s)
            allowed_s = may_rest_s + tolerance * PAST_SHARE * now_s
            step_s = _longer_step(rest, rates, needs_s, tolerance, allowed_s)
        # ends that differ by rounding alone are one
        done = needs_s <= step_s * (1 + 1e-12)
        ends[waiting[done]] = now_s + needs_s[done]
        now_s += step_s
        moved = rates * np.minimum(needs_s, step_s)
        unused_s = np.maximum(step_s - rest.sum_by_resource(moved), 0.0)
        waiting, rest, left = waiting[~done], rest.take(~done), (left - moved)[~done]
        if tolerance and len(waiting):
            left = np.maximum(left - _catch_up(rest, unused_s), 1e-9 * rest.size_bytes)
    return ends


def _busiest(to_do_s: FloatArray, parts: IntArray | None) -> FloatArray:
    """``[R]`` the most that any resource of the same part has to do."""
    if parts is None:
        return np.full_like(to_do_s, to_do_s.max())
    most = np.zeros(int(parts.max()) + 1)
    np.maximum.at(most, parts, to_do_s)
    return most[parts]


def _longer_step(
    rest: Flows,
    rates: FloatArray,
    needs_s: FloatArray,
    tolerance: float,
    allowed_s: FloatArray,
) -> float:
    """The longest time until an end for which keeping the rates leaves little unused.

    That is ``allowed_s`` for each resource, and ``tolerance`` of the step.
    """
    ends_s = np.sort(needs_s)
    low, high = 0, len(ends_s) - 1
    while low < high:
        middle = (low + high + 1) // 2
        step_s = float(ends_s[middle])
        unused_s = rest.sum_by_resource(rates * np.maximum(step_s - needs_s, 0.0))
        fits = bool((unused_s <= allowed_s + tolerance * step_s).all())
        low, high = (middle, high) if fits else (low, middle - 1)
    return float(ends_s[low])


def _catch_up(rest: Flows, unused_s: FloatArray) -> FloatArray:
    """Bytes that flows could have moved on top with the capacity that was left unused."""
    load = rest.sum_by_resource(rest.weight)
    share = np.full(rest.num_resources + 1, np.inf)
    np.divide(unused_s, load, out=share[:-1], where=load > 0)
    return _least(share, rest.hops) * rest.weight
