"""From one placement to another: which copies move, how many bytes, how long.

Pure: no torch, no process group. Letters: E experts, P ranks, H hidden_size, I intermediate_size.
"""

from collections.abc import Collection, Sequence
from dataclasses import dataclass

import numpy as np

from piper_kernels.dist.links import LEVELS
from piper_kernels.dist.placement_map import PlacementMap
from piper_kernels.dist.topology import Topology
from piper_kernels.errors import PlanError, require


@dataclass(frozen=True, slots=True, order=True)
class Move:
    """One copy of an expert that a rank gets.

    Attributes:
        expert: logical id.
        source_rank: who sends it, or the target itself where only the slot changes.
        source_slot: where it lies there before.
        target_rank: who gets it.
        target_slot: where it will lie.
    """

    expert: int
    source_rank: int
    source_slot: int
    target_rank: int
    target_slot: int


def place_sets(before: PlacementMap, experts_of: Sequence[Collection[int]]) -> PlacementMap:
    """The placement with given sets of experts in which whoever stays on a rank keeps its slot.

    Args:
        before: the present placement.
        experts_of: for each rank the experts that it shall hold.

    Raises:
        ConfigError: an expert has no rank, or a rank one twice.

    Example:
        >>> before = PlacementMap(num_experts=4, slots=((0, 1), (2, 3)))
        >>> place_sets(before, [{1, 3}, {0, 2}]).slots
        ((3, 1), (2, 0))
    """
    slots = []
    for old, wanted in zip(before.slots, experts_of, strict=True):
        size = len(wanted)
        stays = {expert: slot for slot, expert in enumerate(old[:size]) if expert in wanted}
        filled: list[int | None] = [None] * size
        for expert, slot in stays.items():
            filled[slot] = expert
        newcomers = iter(sorted(expert for expert in wanted if expert not in stays))
        slots.append(tuple(next(newcomers) if e is None else e for e in filled))
    return PlacementMap(num_experts=before.num_experts, slots=tuple(slots))


def placement_moves(
    before: PlacementMap, after: PlacementMap, topology: Topology | None = None
) -> tuple[Move, ...]:
    """What must be sent. A copy comes from the nearest rank that has one, and from none twice over.

    All moves read the old placement, so they can be made in one round: nothing is forwarded.

    Args:
        before: the present placement.
        after: the wanted one, of the same experts and ranks.
        topology: says who is near; without it every other rank is equally far.

    Returns:
        Moves by target rank and slot.

    Raises:
        PlanError: the placements have different experts or ranks.

    Example:
        >>> before = PlacementMap(num_experts=2, slots=((0,), (1,)))
        >>> [(m.expert, m.source_rank, m.target_rank)
        ...  for m in placement_moves(before, before.replace(slots=((1,), (0,))))]
        [(1, 1, 0), (0, 0, 1)]
    """
    name = "placement_moves"
    sizes = [(placement.num_experts, placement.num_ranks) for placement in (before, after)]
    requirement = f"have the {sizes[0][0]} experts and {sizes[0][1]} ranks of before"
    found = f"{sizes[1][0]} experts and {sizes[1][1]} ranks"
    require(sizes[0] == sizes[1], name, "after", requirement, found, error=PlanError)
    if topology is not None:
        before.check_topology(name, topology)
    num_sent = np.zeros(before.num_ranks, dtype=np.int64)
    moves = []
    for rank, (old, new) in enumerate(zip(before.slots, after.slots, strict=True)):
        for slot, expert in enumerate(new):
            if slot < len(old) and old[slot] == expert:
                continue
            source, source_slot = _nearest(before, expert, rank, topology, num_sent)
            num_sent[source] += source != rank
            moves.append(Move(expert, source, source_slot, rank, slot))
    return tuple(moves)


def _nearest(
    before: PlacementMap, expert: int, rank: int, topology: Topology | None, num_sent: np.ndarray
) -> tuple[int, int]:
    """The copy to send: own rank, else near, else from whoever sends least, else lowest rank."""
    copies = before.copies_of(expert)
    sources = np.array([source for source, _ in copies])
    distances = sources != rank if topology is None else topology.distances(rank, sources)
    return copies[int(np.lexsort((sources, num_sent[sources], distances))[0])]


def expert_state_bytes(
    hidden_size: int,
    intermediate_size: int,
    *,
    num_matrices: int = 3,
    bytes_per_parameter: int = 16,
) -> int:
    """Bytes that travel with one expert.

    Args:
        hidden_size: H.
        intermediate_size: I.
        num_matrices: 3 for gated experts, 2 for plain ones.
        bytes_per_parameter: 16 for mixed precision with AdamW: parameter 2, gradient 2, master
            weight 4, two moments 8.

    Example:
        >>> expert_state_bytes(4096, 14336)  # Mixtral 8x7B, 48 * H * I
        2818572288
    """
    return num_matrices * hidden_size * intermediate_size * bytes_per_parameter


@dataclass(frozen=True, kw_only=True, slots=True)
class MoveCost:
    """What moves cost.

    Attributes:
        num_moves: copies that change ranks.
        num_bytes: in all.
        busiest_bytes: sent or received by the busiest rank, whichever is more.
        seconds: until the busiest port is done; all ports work at once, each in both directions.
    """

    num_moves: int
    num_bytes: int
    busiest_bytes: int
    seconds: float


def move_cost(moves: Sequence[Move], bytes_per_expert: int, topology: Topology) -> MoveCost:
    """Price moves on a machine.

    A rank's port carries one message per expert and level, as ``Link.busy_s`` says; fabric that
    switch groups share is not modelled: ``piper simulate`` does that.

    Args:
        moves: as ``placement_moves`` gives them.
        bytes_per_expert: with gradients, moments and master weights if they move.
        topology: of the P ranks.

    Example:
        >>> from piper_kernels.dist.topology_presets import one_box
        >>> move_cost([Move(0, 0, 0, 1, 0)], 1000, one_box(2)).num_bytes
        1000
    """
    far = [move for move in moves if move.source_rank != move.target_rank]
    busy = np.zeros((2, topology.num_ranks))
    loads = np.zeros((2, topology.num_ranks), dtype=np.int64)
    latency_s = 0.0
    for move in far:
        level = LEVELS[int(topology.distances(move.source_rank, move.target_rank))]
        link = topology.link(level)
        latency_s = max(latency_s, link.latency_s)
        ends = ([0, 1], [move.source_rank, move.target_rank])
        busy[ends] += float(link.busy_s(bytes_per_expert))
        loads[ends] += bytes_per_expert
    return MoveCost(
        num_moves=len(far),
        num_bytes=len(far) * bytes_per_expert,
        busiest_bytes=int(loads.max()),
        seconds=float(busy.max()) + latency_s,
    )
