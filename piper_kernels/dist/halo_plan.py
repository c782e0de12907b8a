"""HALO plan: an exchange as data that can be printed, checked, compared and simulated.

A plan says for one counts matrix which messages go where, in which phase and order, by which rail
and NIC. It is a pure function of (topology, counts, algorithm, order), so ranks that agree on those
agree on the plan; its digest lets them make sure.

HALO without de-duplication moves exactly the bytes between nodes that a flat exchange moves, in
fewer messages; de-duplication is what saves bytes.

Pure: no torch, no process group. Letters: P ranks, N nodes, M messages.
"""

from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import ArrayLike

from piper_kernels.config import check_choice
from piper_kernels.dist.exchange_counts import (
    CountArray,
    ExchangeCounts,
    plain_counts,
    sum_by_node,
)
from piper_kernels.dist.halo_phases import (
    Algorithm,
    Phase,
    PhaseName,
    flat_phase,
    halo_phases,
    missing_rails,
    relay_ranks,
    with_blocks,
)
from piper_kernels.dist.topology import Topology
from piper_kernels.errors import ConfigError, PlanError, require
from piper_kernels.strict_model import digest_of


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class HaloPlan:
    """One exchange.

    Attributes:
        topology: of the group that exchanges.
        algorithm: ``flat``; ``halo``; ``halo_dedup``: a token crosses once per destination node and
            is sent once per destination rank.
        counts: rows of the forward exchange (dispatch), also in a reversed plan.
        row_bytes: of one row, with whatever travels beside it.
        is_far_first: phase II sends to other switch groups first.
        is_reversed: the way back (combine, or the gradient of the exchange).
        phases: one (flat), or I, II, III.
        notes: what fell back, in words.
    """

    topology: Topology
    algorithm: Algorithm
    counts: ExchangeCounts
    row_bytes: float
    is_far_first: bool
    is_reversed: bool
    phases: tuple[Phase, ...]
    notes: tuple[str, ...]

    @property
    def block_rows(self) -> CountArray:
        """``[P, P]`` rows that the plan takes from each origin to each target."""
        is_dedup = self.algorithm == "halo_dedup"
        rows = self.counts.rank_rows if is_dedup else self.counts.rows
        return rows.T if self.is_reversed else rows

    def phase(self, name: PhaseName) -> Phase:
        """A phase by name.

        Raises:
            PlanError: the plan has no such phase.
        """
        for phase in self.phases:
            if phase.name == name:
                return phase
        have = ", ".join(phase.name for phase in self.phases)
        raise PlanError(f"HaloPlan.phase: a {self.algorithm} plan has {have}, not {name}.")

    def reverse(self) -> "HaloPlan":
        """The way back: every message turned round, phases in the opposite order.

        With de-duplication a node row of phase II is then the sum over its blocks.
        """
        before = {phase.name: phase.after for phase in self.phases}
        turned = []
        for phase in reversed(self.phases):
            after = tuple(name for name, waits in before.items() if phase.name in waits)
            turned.append(_turned(phase, after))
        return replace(self, phases=tuple(turned), is_reversed=not self.is_reversed)

    def digest(self) -> str:
        """32 hexadecimal digits that two ranks with equal plans share."""
        recipe = recipe_digest(self.topology, self.algorithm, is_far_first=self.is_far_first)
        sizes = [self.counts.rows, self.counts.rank_rows, self.counts.node_rows]
        parts = [np.ascontiguousarray(rows).tobytes() for rows in sizes]
        return digest_of(recipe, repr((self.is_reversed, float(self.row_bytes))), *parts)


def make_plan(
    topology: Topology,
    counts: ExchangeCounts | ArrayLike,
    row_bytes: float,
    algorithm: Algorithm = "halo",
    *,
    is_far_first: bool = False,
    has_blocks: bool = True,
) -> HaloPlan:
    """Plan one exchange.

    Args:
        topology: of the group that exchanges.
        counts: ``[P, P]`` rows from source to destination, or :class:`ExchangeCounts`; expected
            (float) counts give a plan that can be priced but not executed.
        row_bytes: of one row.
        algorithm: ``flat``, ``halo`` or ``halo_dedup``; the last needs ``ExchangeCounts``.
        is_far_first: begin phase II with other switch groups rather than with the own one.
        has_blocks: also list what each message carries, P^2 entries per phase; pricing and
            simulation need it not.

    Raises:
        ConfigError: counts of another group, negative, or no more than a matrix for ``halo_dedup``.

    Example:
        Two nodes of two ranks, one row from each rank to each: rank 0 sends 2 rows to rank 2 of the
        other node, which keeps one and passes one on to rank 3.

        >>> from piper_kernels.dist.topology_presets import frontier
        >>> plan = make_plan(frontier(1).lay_out((2, 2)), [[1] * 4] * 4, row_bytes=8)
        >>> second = plan.phase("II")
        >>> list(zip(second.src.tolist(), second.dst.tolist(), second.num_rows.tolist()))
        [(0, 2, 2), (1, 3, 2), (2, 0, 2), (3, 1, 2)]
    """
    check_choice("make_plan", "algorithm", algorithm, Algorithm)
    require(row_bytes > 0, "make_plan", "row_bytes", "be above 0", row_bytes)
    if not isinstance(counts, ExchangeCounts):
        remedy = "Count rank_rows and node_rows too: exchange_counts.count_rows."
        fits = algorithm != "halo_dedup"
        requirement = "be ExchangeCounts for halo_dedup"
        require(fits, "make_plan", "counts", requirement, "a matrix", remedy)
        counts = plain_counts(topology, counts)
    counts.check("make_plan", topology)
    is_dedup = algorithm == "halo_dedup"
    rank_rows = counts.rank_rows if is_dedup else counts.rows
    if algorithm == "flat":
        phases: tuple[Phase, ...] = (flat_phase(topology, rank_rows),)
    else:
        node_rows = counts.node_rows if is_dedup else sum_by_node(topology, rank_rows)
        phases = halo_phases(topology, rank_rows, node_rows, is_far_first=is_far_first)
    return HaloPlan(
        topology=topology,
        algorithm=algorithm,
        counts=counts,
        row_bytes=row_bytes,
        is_far_first=is_far_first,
        is_reversed=False,
        phases=_list_blocks(topology, phases, rank_rows) if has_blocks else phases,
        notes=() if algorithm == "flat" else missing_rails(topology),
    )


def recipe_digest(topology: Topology, algorithm: Algorithm, *, is_far_first: bool = False) -> str:
    """Digest of all that a plan depends on besides counts; ranks compare it before they exchange.

    Example:
        >>> from piper_kernels.dist.topology_presets import frontier
        >>> recipe_digest(frontier(2), "flat") == recipe_digest(frontier(2), "halo")
        False
    """
    return digest_of("exchange", topology.digest(), algorithm, str(is_far_first))


def _list_blocks(
    topology: Topology, phases: tuple[Phase, ...], rank_rows: CountArray
) -> tuple[Phase, ...]:
    """The phases with the blocks that take part in each."""
    if rank_rows.dtype.kind == "f":
        raise ConfigError(
            "make_plan: counts must be integers for a plan with blocks, got expected counts. "
            "Pass has_blocks=False to price it."
        )
    origin, target = np.nonzero(rank_rows)
    nodes = topology.maps.rank_to_node
    relay = relay_ranks(topology)[origin, nodes[target]]
    stays = nodes[origin] == nodes[target]
    listed = []
    for phase in phases:
        own = {"flat": slice(None), "I": stays, "II": ~stays, "III": ~stays}[phase.name]
        listed.append(with_blocks(phase, rank_rows, origin[own], target[own], relay[own]))
    return tuple(listed)


def _turned(phase: Phase, after: tuple[PhaseName, ...]) -> Phase:
    """The messages of ``phase`` from receiver to sender, sorted by the new sender."""
    order = np.lexsort((phase.step, phase.dst))
    blocks = phase.blocks
    if blocks is not None:
        sizes = np.diff(blocks.offsets)[order]
        offsets = np.concatenate([[0], np.cumsum(sizes)])
        # where each block of the new order was in the old one
        shift = np.repeat(blocks.offsets[:-1][order] - offsets[:-1], sizes)
        where = np.arange(len(blocks.origin)) + shift
        blocks = replace(
            blocks,
            offsets=offsets,
            origin=blocks.target[where],
            target=blocks.origin[where],
            num_rows=blocks.num_rows[where],
        )
    return replace(
        phase,
        after=after,
        src=phase.dst[order],
        dst=phase.src[order],
        num_rows=phase.num_rows[order],
        step=phase.step[order],
        blocks=blocks,
    )
