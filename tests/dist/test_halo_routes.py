"""Programs carried out row by row, and compared with the flat exchange in the right order."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from piper_kernels.dist.exchange_counts import count_rows, plain_counts
from piper_kernels.dist.halo_plan import make_plan
from piper_kernels.dist.halo_program import rank_counts
from piper_kernels.dist.halo_routes import rank_routes
from piper_kernels.dist.placement_map import PlacementMap
from piper_kernels.dist.topology_presets import frontier
from piper_kernels.errors import ConfigError, PlanError
from piper_kernels.testing.exchange import (
    COUNTS_KINDS,
    make_buffers,
    make_cluster,
    make_counts,
    run_programs,
)

CLUSTERS = st.lists(st.tuples(st.integers(1, 4), st.integers(0, 2)), min_size=1, max_size=5)
UNWRITTEN = np.array([-1, -1, -1])


def build_programs(topology, counts, algorithm, is_far_first=False):
    return [
        rank_routes(topology, rank, algorithm, is_far_first=is_far_first).program(
            rank_counts(topology, counts, rank, algorithm)
        )
        for rank in range(topology.num_ranks)
    ]


def labelled(origin: int, target: int, count: int) -> np.ndarray:
    """``[count, 3]`` rows that say where they come from, where they go, and which they are."""
    return np.array([(origin, target, nth) for nth in range(count)]).reshape(count, 3)


def check_exchange(topology, rows, algorithm, is_far_first=False) -> None:
    """There, as torch's all_to_all_single orders it, and back."""
    num_ranks = topology.num_ranks
    counts = plain_counts(topology, rows)
    programs = build_programs(topology, counts, algorithm, is_far_first)
    buffers = make_buffers(programs, UNWRITTEN)
    inputs = []
    for rank in range(num_ranks):
        blocks = [labelled(rank, target, rows[rank, target]) for target in range(num_ranks)]
        inputs.append(np.concatenate(blocks))
        buffers[rank]["input"][:] = inputs[-1]
    run_programs(programs, buffers)
    for rank in range(num_ranks):
        flat = [labelled(origin, rank, rows[origin, rank]) for origin in range(num_ranks)]
        np.testing.assert_array_equal(buffers[rank]["output"], np.concatenate(flat))
        for name in set(buffers[rank]) - {"output"}:
            buffers[rank][name][:] = -1
    run_programs([program.reverse() for program in programs], buffers)
    for rank in range(num_ranks):
        np.testing.assert_array_equal(buffers[rank]["input"], inputs[rank])


@given(
    CLUSTERS,
    st.sampled_from(COUNTS_KINDS),
    st.sampled_from(["flat", "halo"]),
    st.booleans(),
    st.integers(0, 99),
)
def test_programs_equal_the_flat_exchange(cluster, kind, algorithm, is_far_first, seed) -> None:
    topology = make_cluster(*zip(*cluster, strict=True), seed)
    rows = make_counts(kind, topology.num_ranks, seed)
    check_exchange(topology, rows, algorithm, is_far_first)


# field report A69: node shapes, ragged ones too
@pytest.mark.parametrize("sizes", [(2, 2), (2, 2, 2), (3, 3), (4,), (1, 1, 1), (2, 1), (3, 2, 2)])
@pytest.mark.parametrize("kind", COUNTS_KINDS)
def test_programs_on_node_shapes(sizes, kind) -> None:
    topology = frontier(1).lay_out(sizes)
    check_exchange(topology, make_counts(kind, topology.num_ranks, 1), "halo")


@given(CLUSTERS, st.sampled_from(["flat", "halo", "halo_dedup"]), st.booleans(), st.integers(0, 99))
def test_programs_are_the_parts_of_the_plan(cluster, algorithm, is_far_first, seed) -> None:
    """Same peers, same sizes, same posting order, without knowing the whole counts."""
    topology = make_cluster(*zip(*cluster, strict=True), seed)
    _, _, counts = random_routing(topology, seed)
    plan = make_plan(topology, counts, 1, algorithm, is_far_first=is_far_first)
    programs = build_programs(topology, counts, algorithm, is_far_first)
    for rank, program in enumerate(programs):
        assert [part.name for part in program.phases] == [phase.name for phase in plan.phases]
        for part, phase in zip(program.phases, plan.phases, strict=True):
            assert part.after == phase.after
            sent, received = phase.src == rank, np.flatnonzero(phase.dst == rank)
            expected = zip(phase.dst[sent].tolist(), phase.num_rows[sent].tolist(), strict=True)
            assert [(send.peer, send.num_rows) for send in part.sends] == list(expected)
            by_step = received[np.lexsort((phase.src[received], phase.step[received]))]
            pairs = zip(phase.src[by_step].tolist(), phase.num_rows[by_step].tolist(), strict=True)
            assert [(recv.peer, recv.num_rows) for recv in part.recvs] == list(pairs)


def test_programs_carry_the_blocks_of_the_plan() -> None:
    """Phase II's rows are those of the plan's blocks, in their order."""
    topology = make_cluster((3, 2, 2), (0, 0, 1), 5)
    rows = make_counts("uniform", 7, 3)
    second = make_plan(topology, rows, 1).phase("II")
    programs = build_programs(topology, plain_counts(topology, rows), "halo")
    blocks = second.blocks
    assert blocks is not None
    for message in range(second.num_messages):
        src, dst = int(second.src[message]), int(second.dst[message])
        own = slice(blocks.offsets[message], blocks.offsets[message + 1])
        parts = zip(blocks.origin[own], blocks.target[own], blocks.num_rows[own], strict=True)
        expected = np.concatenate([labelled(o, t, n) for o, t, n in parts])
        given_rows = np.concatenate([labelled(src, t, rows[src, t]) for t in range(7)])
        (send,) = (s for s in programs[src].phases[1].sends if s.peer == dst)
        pieces = zip(send.starts, send.stops, strict=True)
        np.testing.assert_array_equal(
            np.concatenate([given_rows[a:b] for a, b in pieces]), expected
        )


def random_routing(topology, seed):
    """Physical ids per rank, placement, counts; some ranks have no tokens, some slots drop."""
    rng = np.random.default_rng(seed)
    num_ranks = topology.num_ranks
    placement = PlacementMap.contiguous(2 * num_ranks + 1, num_ranks)
    ids = [
        rng.integers(0, placement.num_experts + 1, (rng.integers(0, 6), 3))
        for _ in range(num_ranks)
    ]
    physical = [placement.choose(topology, rank, part) for rank, part in enumerate(ids)]
    return physical, placement, count_rows(topology, placement, ids)


@given(CLUSTERS, st.integers(0, 999))
def test_dedup_programs_equal_the_flat_exchange(cluster, seed) -> None:
    """Dispatch expands to the flat rows; combine with partial sums equals the flat combine."""
    topology = make_cluster(*zip(*cluster, strict=True), seed)
    physical, placement, counts = random_routing(topology, seed)
    node_of, num_ranks = topology.maps.rank_to_node, topology.num_ranks
    rank_of = np.append(placement.maps.physical_to_rank, -1)
    # ranks that each (origin, token) goes to
    targets = {
        (origin, token): sorted({int(rank_of[slot]) for slot in slots} - {-1})
        for origin in range(num_ranks)
        for token, slots in enumerate(physical[origin])
    }
    programs = build_programs(topology, counts, "halo_dedup")
    buffers = make_buffers(programs, UNWRITTEN[:2])

    def rows_where(origin: int, goes) -> list[tuple[int, int]]:
        return [key for key, ranks in targets.items() if key[0] == origin and goes(ranks)]

    for rank in range(num_ranks):
        near = [
            row
            for target in sorted(topology.nodes[node_of[rank]].ranks)
            for row in rows_where(rank, lambda ranks, t=target: t in ranks)
        ]
        far = [
            row
            for node in range(topology.num_nodes)
            if node != node_of[rank]
            for row in rows_where(rank, lambda ranks, n=node: n in node_of[ranks])
        ]
        buffers[rank]["near"][:] = np.array(near).reshape(-1, 2)
        buffers[rank]["far"][:] = np.array(far).reshape(-1, 2)

    def spread_of(rank: int) -> list[tuple[int, int]]:
        """Relay's rows once for each rank of the node that wants them."""
        return [
            (origin, token)
            for target in sorted(topology.nodes[node_of[rank]].ranks)
            for origin, token in buffers[rank]["relay"].tolist()
            if target in targets[origin, token]
        ]

    def fill_spread(name: str) -> None:
        if name == "III":
            for rank in range(num_ranks):
                buffers[rank]["spread"][:] = np.array(spread_of(rank)).reshape(-1, 2)

    run_programs(programs, buffers, between=fill_spread)
    for rank in range(num_ranks):
        expected = [key for key, ranks in targets.items() if rank in ranks]
        assert list(map(tuple, buffers[rank]["output"].tolist())) == expected
    check_dedup_combine(programs, buffers, spread_of, targets, physical, placement)


def check_dedup_combine(programs, buffers, spread_of, targets, physical, placement) -> None:
    """Each expert answers a whole number; sums over k must come back to each token."""

    def answer(origin: int, token: int, rank: int) -> int:
        """Sum of the answers of a rank's experts to one token."""
        slots = physical[origin][token]
        ranks = np.append(placement.maps.physical_to_rank, -1)[slots]
        return int((1 + slots * 7 + token + 100 * origin)[ranks == rank].sum())

    relays = [part["relay"].tolist() for part in buffers]
    spreads = [spread_of(rank) for rank in range(len(programs))]
    sources = [{name: rows.tolist() for name, rows in part.items()} for part in buffers]
    back = make_buffers(programs, np.array([0]))
    for rank, part in enumerate(back):
        part["output"][:, 0] = [answer(o, t, rank) for o, t in sources[rank]["output"]]

    def sum_in_relay(name: str) -> None:
        if name == "II":
            for rank, part in enumerate(back):
                place = {tuple(row): index for index, row in enumerate(relays[rank])}
                for row, value in zip(spreads[rank], part["spread"], strict=True):
                    part["relay"][place[row]] += value

    run_programs([program.reverse() for program in programs], back, between=sum_in_relay)
    for rank, part in enumerate(back):
        total = np.zeros(len(physical[rank]), dtype=int)
        for name in ("near", "far"):
            for (_, token), value in zip(sources[rank][name], part[name], strict=True):
                total[token] += value[0]
        expected = [
            sum(answer(rank, token, target) for target in targets[rank, token])
            for token in range(len(total))
        ]
        assert total.tolist() == expected


def test_both_experts_on_one_remote_node_cross_once() -> None:
    # field report A69: K = 2, both on one remote node, on two of its ranks
    topology = frontier(1).lay_out((2, 2))
    ids = [np.array([[2, 3]]), *[np.zeros((0, 2), dtype=int)] * 3]
    counts = count_rows(topology, PlacementMap.contiguous(4, 4), ids)
    programs = build_programs(topology, counts, "halo_dedup")
    assert programs[0].buffer_rows == {"output": 0, "near": 0, "far": 1, "spread": 0, "relay": 0}
    assert programs[2].buffer_rows["relay"] == 1
    assert programs[2].buffer_rows["spread"] == 2
    assert [programs[rank].buffer_rows["output"] for rank in (2, 3)] == [1, 1]


def test_run_programs_finds_a_wrong_program() -> None:
    topology = frontier(1).lay_out((2, 2))
    counts = plain_counts(topology, np.ones((4, 4), dtype=int))
    programs = build_programs(topology, counts, "halo")
    other = plain_counts(topology, np.ones((4, 4), dtype=int) * 2)
    programs[3] = build_programs(topology, other, "halo")[3]
    with pytest.raises(PlanError, match="phase I from rank 3 to rank 2: 1 rows expected, got 2"):
        run_programs(programs, make_buffers(programs, UNWRITTEN))


def test_rank_routes_instructs() -> None:
    with pytest.raises(ConfigError, match=r"rank_routes: rank must be in 0 .. 15, got 16"):
        rank_routes(frontier(2), 16, "halo")
    with pytest.raises(ConfigError, match="rank_routes: algorithm must be one of flat, halo"):
        rank_routes(frontier(2), 0, "ring")
