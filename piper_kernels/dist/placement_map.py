"""Placement map: where each logical expert lives, as data.

Users only ever see logical ids. A *slot* here is a position in a rank's stack of local experts. A
*physical id* numbers all slots, rank after rank, so sorting rows by physical id sorts them by rank
and, on each rank, by local expert.

Pure: no torch, no process group. Letters: E logical experts, P ranks, S physical slots, C copies of
the most copied expert, T tokens, K experts per token.
"""

import functools
from dataclasses import dataclass
from typing import Any, Self

import numpy as np
from numpy.typing import ArrayLike

from piper_kernels.dist.topology import IntArray, Topology
from piper_kernels.errors import require
from piper_kernels.strict_model import NonNegativeInt, PositiveInt, StrictModel


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class SlotMaps:
    """A placement's index arrays, all int64.

    Attributes:
        physical_to_logical: ``[S]`` expert in each slot.
        physical_to_rank: ``[S]``.
        physical_to_slot: ``[S]`` position in the rank's stack.
        physical_offsets: ``[P + 1]`` exclusive: rank r owns physical ids
            ``physical_offsets[r]:physical_offsets[r + 1]``.
        num_copies: ``[E]``.
        copies: ``[E, C]`` physical ids of an expert's copies, rising, padded with S.
    """

    physical_to_logical: IntArray
    physical_to_rank: IntArray
    physical_to_slot: IntArray
    physical_offsets: IntArray
    num_copies: IntArray
    copies: IntArray


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class CopyChoices:
    """Which copies the tokens of one rank may go to; token t takes ``t mod num_candidates``.

    Attributes:
        candidates: ``[E + 1, C]`` int64 physical ids, padded with S; row E is for sentinel ids.
        num_candidates: ``[E + 1]`` int64, at least 1.
    """

    candidates: IntArray
    num_candidates: IntArray


class PlacementMap(StrictModel):
    """Logical expert id -> (rank, slot), with replicas if an expert occurs on several ranks.

    Attributes:
        num_experts: E.
        slots: for each rank the logical experts that it holds, in slot order.

    Example:
        >>> PlacementMap.contiguous(8, 3).slots
        ((0, 1, 2), (3, 4, 5), (6, 7))
    """

    num_experts: PositiveInt
    slots: tuple[tuple[NonNegativeInt, ...], ...]

    def model_post_init(self, _: Any) -> None:
        """Check that every expert has a slot, and that no rank holds two copies of one."""
        name, num_experts = "PlacementMap", self.num_experts
        require(bool(self.slots), name, "slots", "list the experts of a rank at least", self.slots)
        placed = {expert for experts in self.slots for expert in experts}
        foreign = sorted(expert for expert in placed if expert >= num_experts)
        requirement = f"hold ids below num_experts = {num_experts}"
        require(not foreign, name, "slots", requirement, foreign)
        homeless = sorted(set(range(num_experts)) - placed)
        requirement = f"place each of the {num_experts} experts"
        require(not homeless, name, "slots", requirement, f"no slot for {homeless}")
        for rank, experts in enumerate(self.slots):
            twice = sorted({expert for expert in experts if experts.count(expert) > 1})
            remedy = "A second copy on one rank adds nothing: put it on another."
            requirement = "hold an expert once per rank"
            fits = not twice
            require(fits, name, f"slots[{rank}]", requirement, f"{twice} twice", remedy)

    @classmethod
    def contiguous(cls, num_experts: int, num_ranks: int) -> Self:
        """Blocks of consecutive experts; the first ``E mod P`` ranks hold one more.

        Raises:
            ConfigError: more ranks than experts.
        """
        name = "PlacementMap.contiguous"
        require(num_ranks >= 1, name, "num_ranks", "be at least 1", num_ranks)
        remedy = "Use a smaller expert-parallel group; num_ranks is its size, not the world's."
        requirement = f"be at most num_experts = {num_experts}"
        require(num_ranks <= num_experts, name, "num_ranks", requirement, num_ranks, remedy)
        small, num_large = divmod(num_experts, num_ranks)
        ends = [(rank + 1) * small + min(rank + 1, num_large) for rank in range(num_ranks)]
        starts = [0, *ends[:-1]]
        slots = tuple(tuple(range(a, b)) for a, b in zip(starts, ends, strict=True))
        return cls(num_experts=num_experts, slots=slots)

    @property
    def num_ranks(self) -> int:
        """P."""
        return len(self.slots)

    @property
    def num_slots(self) -> int:
        """S."""
        return len(self.maps.physical_to_logical)

    @property
    def has_replicas(self) -> bool:
        """Whether an expert lives on several ranks."""
        return self.num_slots > self.num_experts

    @functools.cached_property
    def maps(self) -> SlotMaps:
        """The index arrays, built once."""
        sizes = np.array([len(experts) for experts in self.slots])
        physical_offsets = np.concatenate([[0], np.cumsum(sizes)])
        logical = np.array([e for experts in self.slots for e in experts], dtype=np.int64)
        ranks = np.repeat(np.arange(len(sizes)), sizes)
        num_slots = len(logical)
        num_copies = np.bincount(logical, minlength=self.num_experts)
        by_expert = np.argsort(logical, kind="stable")
        first = np.cumsum(num_copies) - num_copies
        copies = np.full((self.num_experts, int(num_copies.max())), num_slots)
        nth = np.arange(num_slots) - first[logical[by_expert]]
        copies[logical[by_expert], nth] = by_expert
        return SlotMaps(
            physical_to_logical=logical,
            physical_to_rank=ranks,
            physical_to_slot=np.arange(num_slots) - physical_offsets[ranks],
            physical_offsets=physical_offsets,
            num_copies=num_copies,
            copies=copies,
        )

    def copies_of(self, expert: int) -> tuple[tuple[int, int], ...]:
        """``(rank, slot)`` of each copy of a logical expert, by rank.

        Raises:
            ConfigError: no such expert.

        Example:
            >>> PlacementMap(num_experts=2, slots=((0, 1), (0,))).copies_of(0)
            ((0, 0), (1, 0))
        """
        fits = 0 <= expert < self.num_experts
        requirement = f"be in 0 .. {self.num_experts - 1}"
        require(fits, "PlacementMap.copies_of", "expert", requirement, expert)
        maps = self.maps
        physical = maps.copies[expert, : maps.num_copies[expert]]
        ranks, slots = maps.physical_to_rank[physical], maps.physical_to_slot[physical]
        return tuple(zip(ranks.tolist(), slots.tolist(), strict=True))

    def check_topology(self, function: str, topology: Topology) -> None:
        """Raise ``ConfigError`` unless ``topology`` has as many ranks as this placement."""
        remedy = "Both describe the expert-parallel group: Topology.select gives a sub-group's."
        requirement = f"place experts on the {topology.num_ranks} ranks of the topology"
        fits = self.num_ranks == topology.num_ranks
        require(fits, function, "placement", requirement, f"{self.num_ranks} ranks", remedy)

    def choices(self, topology: Topology, rank: int) -> CopyChoices:
        """The copies that tokens of ``rank`` go to: on its own rank, else its own node, else all.

        Raises:
            ConfigError: the topology has another number of ranks.
        """
        self.check_topology("PlacementMap.choices", topology)
        maps, num_slots = self.maps, self.num_slots
        is_copy = maps.copies < num_slots
        home = np.append(maps.physical_to_rank, -1)[maps.copies]
        distances = np.where(is_copy, topology.distances(rank, home), 4)
        # beyond the own node all copies count alike
        distances = np.where(is_copy, np.minimum(distances, 2), 4)
        is_candidate = distances == distances.min(axis=1, keepdims=True)
        order = np.argsort(~is_candidate, axis=1, kind="stable")
        kept = np.where(is_candidate, maps.copies, num_slots)
        candidates = np.take_along_axis(kept, order, axis=1)
        sentinel = np.full((1, candidates.shape[1]), num_slots)
        return CopyChoices(
            candidates=np.concatenate([candidates, sentinel]),
            num_candidates=np.append(is_candidate.sum(axis=1), 1),
        )

    def choose(self, topology: Topology, rank: int, expert_ids: ArrayLike) -> IntArray:
        """Physical id for each (token, k) of one rank.

        Args:
            topology: of the expert-parallel group.
            rank: where the tokens are.
            expert_ids: ``[T, K]`` logical ids; E is the sentinel.

        Returns:
            ``[T, K]`` int64; S for a sentinel.

        Raises:
            ConfigError: an id is below 0 or above E, or the topology has another number of ranks.

        Example:
            >>> from piper_kernels.dist.topology_presets import frontier
            >>> placement = PlacementMap(num_experts=2, slots=((0, 1), (0,)))
            >>> topology = frontier(1).lay_out((1, 1))
            >>> placement.choose(topology, 1, [[0], [1]]).tolist()  # physical 2 is on rank 1
            [[2], [1]]
        """
        ids = np.asarray(expert_ids, dtype=np.int64)
        fits = ids.size == 0 or (ids.min() >= 0 and ids.max() <= self.num_experts)
        requirement = (
            f"be in 0 .. {self.num_experts}, where {self.num_experts} marks a dropped slot"
        )
        found = "" if fits else f"{ids.min()} .. {ids.max()}"
        require(bool(fits), "PlacementMap.choose", "expert_ids", requirement, found)
        choices = self.choices(topology, rank)
        tokens = np.arange(len(ids))[:, None]
        return choices.candidates[ids, tokens % choices.num_candidates[ids]]

    def sum_copies(self, physical_counts: ArrayLike) -> IntArray:
        """Rows per logical expert from rows per physical slot.

        Args:
            physical_counts: ``[..., S]``.

        Returns:
            ``[..., E]`` int64.

        Example:
            >>> placement = PlacementMap(num_experts=2, slots=((0, 1), (0,)))
            >>> placement.sum_copies([3, 4, 5]).tolist()
            [8, 4]
        """
        counts = np.asarray(physical_counts, dtype=np.int64)
        fits = counts.shape[-1:] == (self.num_slots,)
        requirement = f"have a last dim of S = {self.num_slots}"
        shape = counts.shape
        require(fits, "PlacementMap.sum_copies", "physical_counts", requirement, shape)
        padded = np.concatenate([counts, np.zeros((*shape[:-1], 1), dtype=np.int64)], axis=-1)
        return padded[..., self.maps.copies].sum(axis=-1)
