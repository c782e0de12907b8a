"""Plans in words."""

import numpy as np
import pytest

from piper_kernels.dist.halo_plan import make_plan
from piper_kernels.dist.halo_print import describe_plan, describe_rank
from piper_kernels.dist.topology_presets import frontier
from piper_kernels.errors import ConfigError
from piper_kernels.testing.exchange import make_counts


@pytest.mark.parametrize("algorithm", ["flat", "halo"])
@pytest.mark.parametrize("sizes", [(1,), (8, 8, 8, 8), (8, 7, 7, 7, 3)])
def test_descriptions_fit_100_columns(algorithm: str, sizes) -> None:
    hosts = [f"frontier{n:05d}.olcf.ornl.gov" for n in range(len(sizes))]
    topology = frontier(1).lay_out(sizes, hosts=hosts)
    counts = make_counts("skewed", topology.num_ranks, 0) * 10_000_000
    for plan in (
        make_plan(topology, counts, 14336, algorithm),
        make_plan(topology, counts, 14336, algorithm).reverse(),
    ):
        texts = [describe_plan(plan), *(describe_rank(plan, r) for r in range(topology.num_ranks))]
        for line in "\n".join(texts).splitlines():
            assert len(line) <= 100, line


def test_describe_plan_says_what_fell_back_and_which_way() -> None:
    topology = frontier(1).lay_out((3, 2))
    plan = make_plan(topology, np.ones((5, 5), dtype=int), 8, is_far_first=True).reverse()
    text = describe_plan(plan)
    assert "far groups first, reversed" in text.splitlines()[0]
    assert "note: rails 2 .. 2 end before node1 (2 ranks)" in text
    assert plan.digest() in text


def test_describe_rank_marks_messages_off_their_rail() -> None:
    plan = make_plan(frontier(1).lay_out((2, 1)), np.ones((3, 3), dtype=int), 8)
    assert "rail 1*  NIC 0 -> 1 " in describe_rank(plan, 1)
    assert "rail 0  NIC 0 -> 1 " in describe_rank(plan, 0)


def test_describe_rank_lists_all_its_messages() -> None:
    topology = frontier(2)
    text = describe_rank(make_plan(topology, np.ones((16, 16), dtype=int), 8), 3)
    lines = text.splitlines()
    assert lines[0] == "rank 3 on node0"
    # I: 7 sends, 7 receives, a move; II: one each way; III: as I
    assert len(lines) == 1 + 15 + 2 + 15
    assert "II   send  step   0  to rank   11 on node1     rail 3  NIC 1 -> 5 " in text
    with pytest.raises(ConfigError, match=r"describe_rank: rank must be in 0 .. 15, got 16"):
        describe_rank(make_plan(topology, np.ones((16, 16), dtype=int), 8), 16)
