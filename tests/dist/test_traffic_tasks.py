"""What each way of exchanging sends."""

import numpy as np
import pytest

from piper_kernels.dist.exchange_counts import expect_rows, plain_counts
from piper_kernels.dist.link_loads import link_loads
from piper_kernels.dist.placement_map import PlacementMap
from piper_kernels.dist.topology_presets import frontier
from piper_kernels.dist.traffic_tasks import Traffic, list_tasks
from piper_kernels.errors import ConfigError


def make_traffic(tp_size: int, **fields) -> Traffic:
    """Two nodes of eight ranks, K = 2 of 16 experts, 32 tokens for each expert-parallel rank."""
    topology = frontier(2)
    part = topology.select(range(0, 16, tp_size))
    counts = expect_rows(part, PlacementMap.contiguous(16, 16 // tp_size), 32, 2)
    sizes = {"dispatch_row_bytes": 10, "combine_row_bytes": 20}
    return Traffic(
        topology=topology, counts=counts, top_k=2, tp_size=tp_size, **{**sizes, **fields}
    )


def loads_of(traffic: Traffic, *mode):
    tasks = list_tasks(traffic, *mode)
    return {
        task.name: link_loads(traffic.topology, [task.phase], task.row_bytes)
        for task in tasks
        if task.phase is not None
    }


def test_list_tasks_without_tp() -> None:
    traffic = make_traffic(1, expert_s=1.0)
    tasks = list_tasks(traffic, "halo", "none")
    assert [(task.name, task.resources, task.after) for task in tasks] == [
        ("dispatch I", ("node",), ()),
        ("dispatch II", ("nic",), ()),
        ("dispatch III", ("node",), ("dispatch II",)),
        ("experts", ("gpu",), ("dispatch I", "dispatch III")),
        ("combine III", ("node",), ("experts",)),
        ("combine II", ("nic",), ("combine III",)),
        ("combine I", ("node",), ("experts",)),
    ]
    flat = list_tasks(traffic, "flat", "none")
    assert [(task.name, task.resources) for task in flat] == [
        ("dispatch flat", ("nic", "node")),
        ("experts", ("gpu",)),
        ("combine flat", ("nic", "node")),
    ]
    loads = loads_of(traffic, "flat", "none")
    there, back = loads["dispatch flat"], loads["combine flat"]
    # 16 ranks send half of their 64 rows to the other node
    assert there.level_bytes["group"] == pytest.approx(16 * 32 * 10)
    assert back.level_bytes["group"] == pytest.approx(16 * 32 * 20)


def test_list_tasks_sliced_sends_a_share() -> None:
    """Between nodes exactly t times less; inside, what completes the rows again."""
    traffic = make_traffic(4)
    replicated, sliced = (
        loads_of(traffic, "flat", "replicated"),
        loads_of(traffic, "flat", "sliced"),
    )
    for leg in ("dispatch flat", "combine flat"):
        ratio = replicated[leg].level_bytes["group"] / sliced[leg].level_bytes["group"]
        assert ratio == pytest.approx(4.0)
    # every rank gets the 3/4 of its group's 64 rows that it lacks; tokens are half of the rows
    assert sliced["gather"].level_bytes["node"] == pytest.approx(16 * 64 * 3 / 4 * 10)
    assert sliced["reduce"].level_bytes["node"] == pytest.approx(16 * 64 * 3 / 4 * 20)
    assert sliced["regather"].level_bytes["node"] == pytest.approx(16 * 32 * 3 / 4 * 20)
    # an all-reduce is a reduce-scatter and an all-gather
    assert replicated["reduce"].level_bytes["node"] == pytest.approx(2 * 16 * 64 * 3 / 4 * 20)
    assert set(replicated) == {"dispatch flat", "reduce", "combine flat"}
    order = [task.name for task in list_tasks(traffic, "flat", "sliced")]
    assert order == ["dispatch flat", "gather", "reduce", "combine flat", "regather"]


def test_list_tasks_keeps_copies_apart() -> None:
    """The i-th TP rank of one group talks to the i-th of another, by its own NIC."""
    (task,) = (
        task for task in list_tasks(make_traffic(2), "halo", "sliced") if task.name == "dispatch II"
    )
    assert task.phase is not None
    assert (task.phase.src % 2 == task.phase.dst % 2).all()
    assert set(task.phase.src.tolist()) == set(range(16))


def test_list_tasks_dispatch_only() -> None:
    names = [t.name for t in list_tasks(make_traffic(4, has_combine=False), "flat", "sliced")]
    assert names == ["dispatch flat", "gather"]


def test_list_tasks_dedup_sends_fewer_rows() -> None:
    traffic = make_traffic(1)
    halo, dedup = loads_of(traffic, "halo", "none"), loads_of(traffic, "halo_dedup", "none")
    ratio = halo["dispatch II"].level_bytes["group"] / dedup["dispatch II"].level_bytes["group"]
    assert ratio == pytest.approx(traffic.counts.dedup_factor(traffic.topology))


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"tp_size": 3}, "tp_size must divide the 16 ranks, got 3"),
        ({"tp_size": 16}, "keep each group of tensor parallelism on one node, got one that spans"),
        ({"tp_size": 2}, r"rows must have shape \(8, 8\) for 8 ranks on 2 nodes, got \(16, 16\)"),
        ({"combine_row_bytes": 0}, "combine_row_bytes must be above 0, got 0"),
        ({"top_k": 0}, "top_k must be above 0, got 0"),
        ({"expert_s": -1.0}, "expert_s must be >= 0, got -1"),
        ({"flat_far_efficiency": 1.5}, "flat_far_efficiency must be above 0, at most 1, got 1.5"),
    ],
)
def test_traffic_instructs(fields, message: str) -> None:
    topology = frontier(2)
    counts = plain_counts(topology, np.ones((16, 16)))
    good = {"dispatch_row_bytes": 1, "combine_row_bytes": 1}
    with pytest.raises(ConfigError, match=message):
        Traffic(topology=topology, counts=counts, **{**good, **fields})
