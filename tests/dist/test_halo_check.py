"""The checker finds every kind of wrong plan."""

from dataclasses import replace

import numpy as np
import pytest

from piper_kernels.dist.exchange_counts import count_rows
from piper_kernels.dist.halo_check import check_plan
from piper_kernels.dist.halo_plan import HaloPlan, make_plan
from piper_kernels.dist.placement_map import PlacementMap
from piper_kernels.dist.topology_presets import frontier
from piper_kernels.errors import PlanError

TOPOLOGY = frontier(1).lay_out((2, 2))
ONES = np.ones((4, 4), dtype=np.int64)


def changed(plan: HaloPlan, name: str, **fields) -> HaloPlan:
    """The plan with some arrays of one phase, or of its blocks, replaced."""
    phase = plan.phase(name)
    assert phase.blocks is not None
    for field in list(fields):
        if field.startswith("block_"):
            blocks = replace(phase.blocks, **{field.removeprefix("block_"): fields.pop(field)})
            phase = replace(phase, blocks=blocks)
    new = replace(phase, **fields)
    return replace(plan, phases=tuple(new if p.name == name else p for p in plan.phases))


def test_check_plan_accepts_good_plans() -> None:
    for algorithm in ("flat", "halo"):
        check_plan(make_plan(TOPOLOGY, ONES, 8, algorithm))
        check_plan(make_plan(TOPOLOGY, 0 * ONES, 8, algorithm))


@pytest.mark.parametrize(
    ("name", "field", "value", "message"),
    [
        ("II", "dst", [2, 3, 0, 7], r"phase II: ranks must be in 0 .. 3, got 0 .. 7"),
        ("II", "dst", [2, 3, 1, 1], "phase III: rank 0 sends block 2 -> 0, which is at rank 1"),
        ("II", "dst", [2, 3, 3, 1], "rank 2 to rank 3 spans level node, which is another phase's"),
        ("I", "dst", [0, 2, 1, 0, 2, 3, 3, 2], "rank 0 to rank 2 spans level group"),
        ("I", "dst", [0, 0, 1, 0, 2, 3, 3, 2], "rank 0 sends rank 0 2 messages, must be one"),
        ("II", "num_rows", [2, 2, 2, 3], "rank 3 to rank 1 has 3 rows, its blocks need 2"),
        ("II", "num_rows", [2, 0, 2, 2], "rank 1 to rank 3 is empty and must not be sent"),
        ("II", "block_target", [2, 3, 2, 3, 0, 1, 1, 1], "block 3 -> 1 is sent 2 times, must be"),
        ("II", "block_num_rows", [3, 1, 1, 1, 1, 1, 1, 1], "has 2 rows, its blocks need 4"),
        ("II", "block_offsets", [0, 2, 4, 6, 7], "offsets must cover its messages and blocks"),
        ("II", "block_offsets", [0, 2, 4, 8, 8], "from rank 3 to rank 1 must carry a block"),
        ("III", "after", (), "it sends on what phase II brings and must wait for it"),
        ("III", "blocks", None, "phase III lists no blocks. Make the plan with has_blocks=True"),
    ],
)
def test_check_plan_finds(name, field, value, message) -> None:
    plan = make_plan(TOPOLOGY, ONES, 8)
    given = np.array(value) if isinstance(value, list) else value
    with pytest.raises(PlanError, match=message):
        check_plan(changed(plan, name, **{field: given}))


def test_check_plan_finds_a_block_of_wrong_size() -> None:
    plan = make_plan(TOPOLOGY, ONES, 8)
    rows = np.array([2, 1, 1, 1, 1, 1, 1, 1])
    wrong = changed(plan, "II", block_num_rows=rows, num_rows=np.array([3, 2, 2, 2]))
    with pytest.raises(PlanError, match="block 0 -> 2 has 2 rows, the counts say 1"):
        check_plan(wrong)


def test_check_plan_finds_lost_rows() -> None:
    plan = make_plan(TOPOLOGY, ONES, 8)
    without = replace(plan, phases=tuple(p for p in plan.phases if p.name != "III"))
    with pytest.raises(PlanError, match=r"rows from rank 0 to rank 3 end at rank 2. 4 blocks are"):
        check_plan(without)
    without = replace(plan, phases=tuple(p for p in plan.phases if p.name != "I"))
    with pytest.raises(PlanError, match="the 1 rows from rank 0 to rank 1 end at rank 0"):
        check_plan(without)


def test_check_plan_finds_rows_that_go_another_way() -> None:
    """Blocks that a message does not hold cannot be passed on."""
    plan = make_plan(TOPOLOGY, ONES, 8)
    third = plan.phase("III")
    assert third.blocks is not None
    origin = third.blocks.origin.copy()
    origin[[0, 3]] = origin[[3, 0]]
    with pytest.raises(PlanError, match="phase III: rank 0 sends block 3 -> 0, which is at rank 1"):
        check_plan(changed(plan, "III", block_origin=origin))


def test_check_plan_finds_bytes_too_many_with_dedup() -> None:
    ids = [[[2, 3]], [[2, 3]], [[0, 1]], [[0, 1]]]
    counts = count_rows(TOPOLOGY, PlacementMap.contiguous(4, 4), ids)
    plan = make_plan(TOPOLOGY, counts, 8, "halo_dedup")
    check_plan(plan)
    assert plan.phase("II").num_rows.tolist() == [1, 1, 1, 1]
    with pytest.raises(PlanError, match="5 rows cross between nodes, the counts need 4"):
        check_plan(changed(plan, "II", num_rows=np.array([2, 1, 1, 1])))
    with pytest.raises(PlanError, match=r"rank 0 to rank 2 has 3 rows, its blocks need 1 .. 2"):
        check_plan(changed(plan, "II", num_rows=np.array([3, 1, 1, 1])))
    # one token for both ranks of node 1, and two tokens for one rank each: the sum stays right
    ids = [[[2, 3]], [[2, 2], [3, 3]], [[0, 1]], [[0, 1]]]
    counts = count_rows(TOPOLOGY, PlacementMap.contiguous(4, 4), ids)
    plan = make_plan(TOPOLOGY, counts, 8, "halo_dedup")
    assert plan.phase("II").num_rows.tolist() == [1, 2, 1, 1]
    with pytest.raises(PlanError, match="rank 0 to rank 2 has 2 rows, for 1 tokens"):
        check_plan(changed(plan, "II", num_rows=np.array([2, 1, 1, 1])))
    back = plan.reverse()
    rows = np.array([{0: 1, 1: 1, 2: 2, 3: 1}[src] for src in back.phase("II").src.tolist()])
    with pytest.raises(PlanError, match="rank 2 to rank 0 has 2 rows, for 1 tokens"):
        check_plan(changed(back, "II", num_rows=rows))
