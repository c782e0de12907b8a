"""Where experts live, which copy a token goes to, and what is refused."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from piper_kernels.dist.placement_map import PlacementMap
from piper_kernels.dist.topology_presets import frontier, one_box
from piper_kernels.errors import ConfigError


@pytest.mark.parametrize(
    ("num_experts", "num_ranks"), [(60, 8), (60, 16), (8, 3), (4, 4), (7, 1), (256, 32)]
)
def test_contiguous_covers_each_expert_once(num_experts: int, num_ranks: int) -> None:
    # field reports A63 and A87: an EP degree that does not divide E
    placement = PlacementMap.contiguous(num_experts, num_ranks)
    assert [e for experts in placement.slots for e in experts] == list(range(num_experts))
    sizes = [len(experts) for experts in placement.slots]
    assert max(sizes) - min(sizes) <= 1
    assert sizes == sorted(sizes, reverse=True)
    for expert in range(num_experts):
        ((rank, slot),) = placement.copies_of(expert)
        assert placement.slots[rank][slot] == expert


def test_contiguous_refuses_idle_ranks() -> None:
    message = r"num_ranks must be at most num_experts = 4, got 8. Use a smaller expert-parallel"
    with pytest.raises(ConfigError, match=message):
        PlacementMap.contiguous(4, 8)
    with pytest.raises(ConfigError, match="num_ranks must be at least 1, got 0"):
        PlacementMap.contiguous(4, 0)


@pytest.mark.parametrize(
    ("slots", "message"),
    [
        (((0, 1), (0, 0, 2)), r"slots\[1\] must hold an expert once per rank, got \[0\] twice"),
        (((0, 1), (0,)), r"slots must place each of the 3 experts, got no slot for \[2\]"),
        (((0, 1), (2, 3)), r"slots must hold ids below num_experts = 3, got \[3\]"),
        (((0, 1), (2, -1)), r"slots.1.1 must be greater than or equal to 0, got -1"),
        ((), r"slots must list the experts of a rank at least"),
    ],
)
def test_placement_map_refuses(slots, message: str) -> None:
    # field report A84: two copies of one expert on a rank
    with pytest.raises(ConfigError, match=message):
        PlacementMap(num_experts=3, slots=slots)


def test_placement_map_file_round_trip() -> None:
    placement = PlacementMap(num_experts=3, slots=((2, 0), (), (1, 2)))
    assert PlacementMap.from_json(placement.to_json()) == placement
    swapped = placement.replace(slots=((0, 2), (), (1, 2)))
    assert swapped.digest() != placement.digest()


def test_placement_map_maps_by_hand() -> None:
    placement = PlacementMap(num_experts=3, slots=((2, 0), (), (1, 2)))
    maps = placement.maps
    assert placement.num_slots, placement.has_replicas == (4, True)
    assert maps.physical_to_logical.tolist() == [2, 0, 1, 2]
    assert maps.physical_to_rank.tolist() == [0, 0, 2, 2]
    assert maps.physical_to_slot.tolist() == [0, 1, 0, 1]
    assert maps.physical_offsets.tolist() == [0, 2, 2, 4]
    assert maps.num_copies.tolist() == [1, 1, 2]
    assert maps.copies.tolist() == [[1, 4], [2, 4], [0, 3]]
    assert placement.copies_of(2) == ((0, 0), (2, 1))
    with pytest.raises(ConfigError, match=r"expert must be in 0 .. 2, got 3"):
        placement.copies_of(3)


def choose_slowly(placement, topology, rank, expert, token) -> tuple[int, int]:
    """The rule of DESIGN section 9, word by word."""
    copies = placement.copies_of(expert)
    on_rank = [c for c in copies if c[0] == rank]
    on_node = [c for c in copies if topology.level_of(c[0], rank) == "node"]
    candidates = on_rank or on_node or copies
    return candidates[token % len(candidates)]


@given(st.data())
def test_choose_follows_the_rule(data) -> None:
    sizes = data.draw(st.lists(st.integers(1, 3), min_size=1, max_size=3))
    groups = data.draw(st.lists(st.sampled_from("ab"), min_size=len(sizes), max_size=len(sizes)))
    topology = frontier(1).lay_out(sizes, groups=groups)
    num_ranks, num_experts = topology.num_ranks, data.draw(st.integers(1, 5))
    base = [data.draw(st.integers(0, num_ranks - 1)) for _ in range(num_experts)]
    sets = [{e for e in range(num_experts) if base[e] == r} for r in range(num_ranks)]
    for r in range(num_ranks):
        sets[r] |= data.draw(st.sets(st.integers(0, num_experts - 1)))
    slots = tuple(tuple(data.draw(st.permutations(sorted(s)))) for s in sets)
    placement = PlacementMap(num_experts=num_experts, slots=slots)
    rank = data.draw(st.integers(0, num_ranks - 1))
    ids = np.array([[data.draw(st.integers(0, num_experts)) for _ in range(2)] for _ in range(6)])
    physical = placement.choose(topology, rank, ids)
    for token in range(6):
        for k in range(2):
            got = physical[token, k]
            if ids[token, k] == num_experts:
                assert got == placement.num_slots
                continue
            place = (placement.maps.physical_to_rank[got], placement.maps.physical_to_slot[got])
            assert place == choose_slowly(placement, topology, rank, ids[token, k], token)


def test_choose_instructs() -> None:
    placement = PlacementMap.contiguous(4, 2)
    with pytest.raises(ConfigError, match=r"expert_ids must be in 0 .. 4, .*got 0 .. 5\."):
        placement.choose(one_box(2), 0, [[0, 5]])
    with pytest.raises(ConfigError, match="experts on the 3 ranks of the topology, got 2 ranks"):
        placement.choose(one_box(3), 0, [[0]])


def test_sum_copies_counts_in_logical_ids() -> None:
    # field report A85: loads are counted by logical id wherever a copy lives
    rng = np.random.default_rng(0)
    placement = PlacementMap(num_experts=4, slots=((0, 1, 3), (2, 3), (3, 1)))
    topology = one_box(3)
    ids = rng.integers(0, 4, (3, 50, 2))
    counts = np.zeros(placement.num_slots + 1, dtype=np.int64)
    for rank in range(3):
        physical = placement.choose(topology, rank, ids[rank])
        counts += np.bincount(physical.ravel(), minlength=placement.num_slots + 1)
    logical = placement.sum_copies(counts[:-1])
    np.testing.assert_array_equal(logical, np.bincount(ids.ravel(), minlength=4))
    with pytest.raises(ConfigError, match=r"physical_counts must have a last dim of S = 7"):
        placement.sum_copies([1, 2])


def test_many_replicas_of_a_hot_expert() -> None:
    # field report A84: one hot expert with 31 more copies spreads over 32 ranks
    slots = [list(range(r * 8, r * 8 + 8)) for r in range(32)]
    for rank in range(1, 32):
        slots[rank].append(0)
    placement = PlacementMap(num_experts=256, slots=tuple(map(tuple, slots)))
    assert placement.num_slots == 256 + 31
    topology = frontier(4)
    for rank in (0, 9, 31):
        physical = placement.choose(topology, rank, np.zeros((5, 1), dtype=int))
        assert (placement.maps.physical_to_rank[physical] == rank).all()
