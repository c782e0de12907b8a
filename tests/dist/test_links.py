"""Speeds of ports."""

import numpy as np
import pytest

from piper_kernels.dist.links import Fabric, Link
from piper_kernels.errors import ConfigError


def test_link_seconds_by_hand() -> None:
    link = Link(latency_s=1e-5, bandwidth_bytes_per_s=1e9, message_gap_s=1e-6)
    assert link.seconds(4_000, 2) == pytest.approx(16e-6)
    assert link.seconds(0, 3) == pytest.approx(13e-6)


def test_link_efficiency_at_interpolates_in_log_size() -> None:
    curve = ((1024.0, 0.1), (1048576.0, 0.9))
    link = Link(latency_s=0, bandwidth_bytes_per_s=1e9, efficiency=curve)
    got = link.efficiency_at([0, 1024, 32768, 1048576, 1e12])
    np.testing.assert_allclose(got, [0.1, 0.1, 0.5, 0.9, 0.9], rtol=1e-12)
    assert link.seconds(32768) == pytest.approx(32768 / 0.5e9)
    perfect = Link(latency_s=0, bandwidth_bytes_per_s=1e9)
    np.testing.assert_array_equal(perfect.efficiency_at([0, 1, 1e9]), [1, 1, 1])


@pytest.mark.parametrize(
    ("curve", "message"),
    [
        (((10.0, 0.5), (10.0, 0.6)), "Link: efficiency must have rising sizes"),
        (((10.0, 0.0),), "Link: efficiency must have shares above 0"),
        (((0.0, 0.5),), "efficiency.0.0 must be greater than 0, got 0.0"),
        (((1.0, 1.5),), "efficiency.0.1 must be less than or equal to 1, got 1.5"),
    ],
)
def test_link_refuses_a_bad_curve(curve, message) -> None:
    with pytest.raises(ConfigError, match=message):
        Link(latency_s=0, bandwidth_bytes_per_s=1.0, efficiency=curve)


@pytest.mark.parametrize("field", ["latency_s", "bandwidth_bytes_per_s", "message_gap_s"])
@pytest.mark.parametrize("value", [-1.0, float("nan"), float("inf")])
def test_link_refuses_impossible_numbers(field: str, value: float) -> None:
    fields = {"latency_s": 0.0, "bandwidth_bytes_per_s": 1.0, "message_gap_s": 0.0}
    with pytest.raises(ConfigError, match=f"Link: {field} must be .*, got {value}"):
        Link(**{**fields, field: value})


def test_link_refuses_zero_bandwidth() -> None:
    with pytest.raises(ConfigError, match="bandwidth_bytes_per_s must be greater than 0, got 0"):
        Link(latency_s=0, bandwidth_bytes_per_s=0)


def test_fabric_fields_belong_to_their_kind() -> None:
    with pytest.raises(ConfigError, match="num_groups must be given for a dragonfly and for"):
        Fabric(kind="dragonfly", uplink_bytes_per_s=1.0)
    with pytest.raises(ConfigError, match="num_groups must be given for a dragonfly and for"):
        Fabric(kind="fat_tree", uplink_bytes_per_s=1.0, num_groups=2)
    with pytest.raises(
        ConfigError, match=r"non_minimal_share must be 0 for a fat_tree, and .*got 0.5"
    ):
        Fabric(kind="fat_tree", uplink_bytes_per_s=1.0, non_minimal_share=0.5)
    with pytest.raises(ConfigError, match="kind must be 'fat_tree' or 'dragonfly', got 'torus'"):
        Fabric(kind="torus", uplink_bytes_per_s=1.0)
    with pytest.raises(ConfigError, match=r"and for fewer than 3 groups, got 0.5"):
        Fabric(kind="dragonfly", uplink_bytes_per_s=1.0, num_groups=2, non_minimal_share=0.5)


def test_fabric_capacities_equal_a_count_of_links() -> None:
    """All groups of the machine in one job: every link carries the same, counted hop by hop."""
    num_groups, share = 5, 0.6
    fabric = Fabric(
        kind="dragonfly",
        uplink_bytes_per_s=8.0,
        num_groups=num_groups,
        non_minimal_share=share,
    )
    load = np.zeros((num_groups, num_groups))
    for src in range(num_groups):
        for dst in set(range(num_groups)) - {src}:
            load[src, dst] += 1 - share
            for via in set(range(num_groups)) - {src, dst}:
                load[src, via] += share / (num_groups - 2)
                load[via, dst] += share / (num_groups - 2)
    # each pair of groups exchanges one byte, so a group sends num_groups - 1
    assert fabric.uplink_capacity(num_groups) == pytest.approx(
        8.0 / (load[0].sum() / (num_groups - 1))
    )
    assert fabric.pair_capacity(num_groups) == pytest.approx(8.0 / (num_groups - 1) / load[0, 1])
    # two groups alone: detours never come back through them
    assert fabric.uplink_capacity(2) == 8.0
    assert fabric.pair_capacity(2) == pytest.approx(2.0 / (1 - share))


def test_fabric_fat_tree_has_no_pairs() -> None:
    fabric = Fabric(kind="fat_tree", uplink_bytes_per_s=8.0)
    assert fabric.uplink_capacity(7) == 8.0
    assert fabric.pair_capacity(7) == float("inf")
