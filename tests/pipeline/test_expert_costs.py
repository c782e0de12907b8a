"""What experts cost ranks, by hand."""

import numpy as np
import pytest

from piper_kernels.dist.placement_map import PlacementMap
from piper_kernels.dist.topology_presets import dgx_h100_like
from piper_kernels.errors import ConfigError
from piper_kernels.pipeline.expert_costs import ExpertCosts, clean_loads, imbalance


def test_clean_loads_replaces_what_is_not_known() -> None:
    nan = float("nan")
    assert clean_loads([2, nan, 4], "f").tolist() == [2, 3, 4]
    assert clean_loads([nan, nan], "f").tolist() == [0, 0]
    assert clean_loads([[1, nan], [nan, 5]], "f", num_dims=2).tolist() == [[1, 1], [5, 5]]


@pytest.mark.parametrize(
    ("loads", "message"),
    [
        ([1, -2], r"f: loads must be finite counts >= 0, or NaN, got -2.0 at \[1\]"),
        ([float("inf")], r"got inf at \[0\]"),
        ([], r"loads must have 1 dims, the last one E >= 1, got shape \(0,\)"),
        ([[1]], r"got shape \(1, 1\)"),
    ],
)
def test_clean_loads_refuses(loads, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        clean_loads(loads, "f")


def test_of_ranks_splits_copies_evenly() -> None:
    placement = PlacementMap(num_experts=3, slots=((0, 1), (0, 2), (0,)))
    costs = ExpertCosts.from_loads([9, 1, 2], 3, seconds_per_row=0.5)
    assert costs.of_ranks(placement).tolist() == [2.0, 2.5, 1.5]
    assert imbalance(costs.of_ranks(placement)) == 1.25
    message = "costs must be for the placement's 3 experts and 2 ranks, got 3 experts and 3 ranks"
    with pytest.raises(ConfigError, match=message):
        costs.of_ranks(PlacementMap(num_experts=3, slots=((0, 1), (2,))))


def test_from_traffic_prices_where_rows_come_from() -> None:
    topology = dgx_h100_like(2)
    counts = np.zeros((16, 2))
    counts[0, 0], counts[9, 1] = 1000, 500
    costs = ExpertCosts.from_traffic(counts, topology, seconds_per_row=1e-6, row_bytes=4096)
    # there and back at 450 GB/s inside the node, at 50 GB/s to the other one
    near, far = 2 * 4096 / 450e9, 2 * 4096 / 50e9
    want = [1e-3, 1e-3 + 1000 * near, 1e-3 + 1000 * far]
    assert costs.seconds[0, [0, 3, 8]] == pytest.approx(want)
    want = [5e-4, 5e-4 + 500 * near, 5e-4 + 500 * far]
    assert costs.seconds[1, [9, 8, 0]] == pytest.approx(want)
    with pytest.raises(ConfigError, match="a row for each of the topology's 16 ranks, got 3"):
        ExpertCosts.from_traffic(counts[:3], topology, seconds_per_row=1e-6, row_bytes=4096)


def test_imbalance_without_work_is_even() -> None:
    assert imbalance([0, 0, 0]) == 1.0
    assert imbalance([1, 1, 4]) == 2.0
