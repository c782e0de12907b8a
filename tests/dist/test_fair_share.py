"""Fair sharing against filling step by step, closed forms, and its own definition."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from piper_kernels.dist.fair_share import Flows, end_times, max_min_rates
from piper_kernels.errors import ConfigError


def make_flows(paths: list[list[int]], capacities: list[float], sizes=None, weights=None) -> Flows:
    """Flows along ``paths`` over resources of ``capacities`` bytes/s."""
    width, none = max(map(len, paths)), len(capacities)
    hops = np.array([[*path, *[none] * (width - len(path))] for path in paths], dtype=np.int32).T
    cost = np.append(1 / np.array(capacities), 0.0)[hops]
    ones = np.ones(len(paths))
    return Flows(
        size_bytes=ones if sizes is None else np.array(sizes, dtype=float),
        weight=ones if weights is None else np.array(weights, dtype=float),
        hops=hops,
        cost_s_per_byte=cost,
        num_resources=none,
    )


def fill_slowly(paths, capacities, weights) -> list[float]:
    """Raise all rates together; freeze the flows of the first full resource; repeat."""
    rates: dict[int, float] = {}
    left = list(capacities)
    while len(rates) < len(paths):
        waiting = [f for f in range(len(paths)) if f not in rates]
        shares = {
            r: left[r] / sum(weights[f] for f in waiting if r in paths[f])
            for r in range(len(left))
            if any(r in paths[f] for f in waiting)
        }
        full = min(shares, key=lambda r: shares[r])
        level = shares[full]
        for f in waiting:
            if full in paths[f]:
                rates[f] = level * weights[f]
                for r in paths[f]:
                    left[r] -= rates[f]
    return [rates[f] for f in range(len(paths))]


NETWORKS = st.integers(1, 6).flatmap(
    lambda count: st.tuples(
        st.lists(st.integers(1, 9), min_size=count, max_size=count),
        st.lists(
            st.lists(st.integers(0, count - 1), min_size=1, max_size=3, unique=True),
            min_size=1,
            max_size=12,
        ),
        st.lists(st.integers(1, 4), min_size=12, max_size=12),
    )
)


@given(NETWORKS)
def test_max_min_rates_equal_filling_step_by_step(network) -> None:
    capacities, paths, weights = network
    weights = weights[: len(paths)]
    rates = max_min_rates(make_flows(paths, capacities, weights=weights))
    np.testing.assert_allclose(rates, fill_slowly(paths, capacities, weights), rtol=1e-9)


@given(NETWORKS)
def test_max_min_rates_with_slack_fit_the_links(network) -> None:
    """With slack no link is overfull, and every flow crosses one that is nearly full."""
    capacities, paths, weights = network
    flows = make_flows(paths, capacities, weights=weights[: len(paths)])
    use = flows.sum_by_resource(max_min_rates(flows, 0.05))
    assert (use <= 1 + 1e-9).all()
    assert all(max(use[r] for r in path) >= 0.95 - 1e-9 for path in paths)


def test_end_times_single_bottleneck() -> None:
    """1, 2 and 3 bytes over one link of 3 bytes/s: ends at 1, 1.5 + 1/6 ... by hand."""
    flows = make_flows([[0]] * 3, [3.0], sizes=[1, 2, 3])
    # 1 byte/s each until 1; then 1.5 each until 1 + 1/1.5; then 3
    np.testing.assert_allclose(end_times(flows), [1, 5 / 3, 2])


def test_end_times_ring_and_incast() -> None:
    ring = make_flows([[0, 1], [1, 2], [2, 0]], [2.0, 2.0, 2.0], sizes=[4, 4, 4])
    np.testing.assert_allclose(end_times(ring), [4, 4, 4])
    # 8 senders of 1 byte/s into one receiver of 2 bytes/s
    incast = make_flows([[s, 8] for s in range(8)], [1.0] * 8 + [2.0], sizes=[5] * 8)
    np.testing.assert_allclose(end_times(incast), [20] * 8)


def test_end_times_weights_count_as_messages() -> None:
    """A flow of weight 3 is three flows."""
    three = end_times(make_flows([[0]] * 4, [4.0], sizes=[1, 1, 1, 9]))
    one = end_times(make_flows([[0], [0]], [4.0], sizes=[3, 9], weights=[3, 1]))
    np.testing.assert_allclose(one, three[2:])


@given(NETWORKS, st.lists(st.integers(1, 50), min_size=12, max_size=12))
def test_end_times_move_all_bytes_within_the_links(network, sizes) -> None:
    capacities, paths, weights = network
    flows = make_flows(paths, capacities, sizes[: len(paths)], weights[: len(paths)])
    ends = end_times(flows)
    busy = flows.busy_s()
    assert ends.max() >= busy.max() * (1 - 1e-9)
    # while a flow goes on, one of its links is full
    for flow, path in enumerate(paths):
        assert ends[flow] <= sum(busy[r] for r in path) * (1 + 1e-9)


@given(NETWORKS, st.lists(st.integers(1, 50), min_size=12, max_size=12))
def test_end_times_with_tolerance_stay_near(network, sizes) -> None:
    capacities, paths, weights = network
    flows = make_flows(paths, capacities, sizes[: len(paths)], weights[: len(paths)])
    exact, near = end_times(flows).max(), end_times(flows, 0.02).max()
    assert near == pytest.approx(exact, rel=0.08)
    assert near >= flows.busy_s().max() * (1 - 1e-6)


def test_end_times_of_nothing() -> None:
    flows = make_flows([[0]], [1.0]).take(np.zeros(1, dtype=bool))
    assert end_times(flows).shape == (0,)
    assert end_times(flows, 0.02).shape == (0,)


def test_end_times_instructs() -> None:
    with pytest.raises(ConfigError, match=r"tolerance must be in \[0, 1\), got 1"):
        end_times(make_flows([[0]], [1.0]), 1.0)
