"""Is a plan right?

:func:`check_plan` follows every block of rows from its origin through the phases and trusts nothing
but the topology and the counts.

Pure: no torch, no process group.
"""

import numpy as np

from piper_kernels.dist.exchange_counts import CountArray, sum_by_node
from piper_kernels.dist.halo_phases import Blocks, Phase
from piper_kernels.dist.halo_plan import HaloPlan
from piper_kernels.dist.links import LEVELS
from piper_kernels.dist.topology import IntArray
from piper_kernels.errors import PlanError


def check_plan(plan: HaloPlan) -> None:
    """Verify that the plan delivers every row exactly once and moves no byte too many.

    Raises:
        PlanError: naming phase, ranks and both numbers.
    """
    wanted = plan.block_rows
    num_ranks = len(wanted)
    # where the rows of block (origin, target) are now
    holder = np.repeat(np.arange(num_ranks)[:, None], num_ranks, axis=1)
    moved_by: dict[str, np.ndarray] = {}
    for phase in plan.phases:
        blocks = _check_messages(plan, phase)
        _check_sums(plan, phase, blocks)
        _check_blocks(phase, blocks, wanted)
        _move(phase, blocks, holder, moved_by)
    _check_arrival(wanted, holder)
    _check_crossing(plan)


def _check_messages(plan: HaloPlan, phase: Phase) -> Blocks:
    """Messages are between known ranks, one per pair, none empty, in range of the phase."""
    num_ranks = plan.topology.num_ranks
    if phase.blocks is None:
        raise PlanError(
            f"check_plan: phase {phase.name} lists no blocks. Make the plan with has_blocks=True."
        )
    ends = np.concatenate([phase.src, phase.dst])
    if ends.size and not 0 <= ends.min() <= ends.max() < num_ranks:
        found = f"{ends.min()} .. {ends.max()}"
        raise _fault(phase, f"ranks must be in 0 .. {num_ranks - 1}, got {found}")
    pairs, times = np.unique(phase.src.astype(np.int64) * num_ranks + phase.dst, return_counts=True)
    if (times > 1).any():
        src, dst = divmod(int(pairs[times > 1][0]), num_ranks)
        raise _fault(phase, f"rank {src} sends rank {dst} {times.max()} messages, must be one")
    if (phase.num_rows <= 0).any():
        which = int(np.argmax(phase.num_rows <= 0))
        raise _fault(phase, f"{_name(phase, which)} is empty and must not be sent")
    level = plan.topology.distances(phase.src, phase.dst)
    wrong = {"flat": level < 0, "II": level < 2}.get(phase.name, level > 1)
    if wrong.any():
        which = int(np.argmax(wrong))
        where = LEVELS[int(level[which])]
        raise _fault(phase, f"{_name(phase, which)} spans level {where}, which is another phase's")
    return phase.blocks


def _check_sums(plan: HaloPlan, phase: Phase, blocks: Blocks) -> None:
    """A message is as long as its blocks together; a shared row counts once, not less."""
    num_blocks = np.diff(blocks.offsets)
    if len(num_blocks) != phase.num_messages or blocks.offsets[-1] != len(blocks.origin):
        raise _fault(phase, "the blocks' offsets must cover its messages and blocks")
    if (num_blocks <= 0).any():
        raise _fault(phase, f"{_name(phase, int(np.argmin(num_blocks)))} must carry a block")
    if not phase.num_messages:
        return
    total = np.add.reduceat(blocks.num_rows, blocks.offsets[:-1])
    largest = np.maximum.reduceat(blocks.num_rows, blocks.offsets[:-1])
    is_shared = plan.algorithm == "halo_dedup" and phase.name == "II"
    wrong = (phase.num_rows > total) | (phase.num_rows < (largest if is_shared else total))
    if wrong.any():
        which = int(np.argmax(wrong))
        least = largest[which] if is_shared else total[which]
        asked = f"{least} .. {total[which]}" if is_shared else f"{total[which]}"
        found = phase.num_rows[which]
        raise _fault(phase, f"{_name(phase, which)} has {found} rows, its blocks need {asked}")


def _check_blocks(phase: Phase, blocks: Blocks, wanted: CountArray) -> None:
    """Each block of a phase is one that the counts ask for, whole and once."""
    asked = wanted[blocks.origin, blocks.target]
    if (asked != blocks.num_rows).any():
        which = int(np.argmax(asked != blocks.num_rows))
        block = f"block {blocks.origin[which]} -> {blocks.target[which]}"
        found = blocks.num_rows[which]
        raise _fault(phase, f"{block} has {found} rows, the counts say {asked[which]}")
    keys = blocks.origin.astype(np.int64) * len(wanted) + blocks.target
    pairs, times = np.unique(keys, return_counts=True)
    if (times > 1).any():
        origin, target = divmod(int(pairs[times > 1][0]), len(wanted))
        raise _fault(phase, f"block {origin} -> {target} is sent {times.max()} times, must be once")


def _move(phase: Phase, blocks: Blocks, holder: IntArray, moved_by: dict[str, np.ndarray]) -> None:
    """Carry the blocks of one phase from senders to receivers."""
    src = np.repeat(phase.src, np.diff(blocks.offsets))
    dst = np.repeat(phase.dst, np.diff(blocks.offsets))
    origin, target = blocks.origin, blocks.target
    is_here = holder[origin, target] == src
    if not is_here.all():
        which = int(np.argmin(is_here))
        block = f"block {origin[which]} -> {target[which]}"
        place = holder[origin[which], target[which]]
        raise _fault(phase, f"rank {src[which]} sends {block}, which is at rank {place}")
    for name, earlier in moved_by.items():
        if name not in phase.after and earlier[origin, target].any():
            raise _fault(phase, f"it sends on what phase {name} brings and must wait for it")
    holder[origin, target] = dst
    moved = np.zeros(holder.shape, dtype=bool)
    moved[origin, target] = True
    moved_by[phase.name] = moved


def _check_arrival(wanted: CountArray, holder: IntArray) -> None:
    """Every row is at its target."""
    targets = np.arange(len(wanted))[None, :]
    lost = (wanted > 0) & (holder != targets)
    if lost.any():
        origin, target = (int(i[0]) for i in np.nonzero(lost))
        rows, place = wanted[origin, target], holder[origin, target]
        raise PlanError(
            f"check_plan: the {rows} rows from rank {origin} to rank {target} end at rank {place}. "
            f"{int(lost.sum())} blocks are not delivered."
        )


def _check_crossing(plan: HaloPlan) -> None:
    """The rows that cross between nodes are those of the counts: all, or each token once."""
    nodes, counts = plan.topology.maps.rank_to_node, plan.counts
    is_dedup = plan.algorithm == "halo_dedup"
    node_rows = counts.node_rows if is_dedup else sum_by_node(plan.topology, counts.rows)
    leaves = nodes[:, None] != np.arange(plan.topology.num_nodes)
    asked = node_rows[leaves].sum()
    phases = [(phase, nodes[phase.src] != nodes[phase.dst]) for phase in plan.phases]
    crossing = sum(phase.num_rows[crosses].sum() for phase, crosses in phases)
    if crossing != asked:
        sentence = f"{crossing} rows cross between nodes, the counts need {asked}"
        raise PlanError(f"check_plan: {sentence}.")
    if is_dedup:
        _check_tokens(plan, plan.phase("II"))


def _check_tokens(plan: HaloPlan, phase: Phase) -> None:
    """Each message of phase II has a row for each token that its node needs."""
    nodes = plan.topology.maps.rank_to_node
    source, there = (phase.dst, phase.src) if plan.is_reversed else (phase.src, phase.dst)
    asked = plan.counts.node_rows[source, nodes[there]]
    if (asked != phase.num_rows).any():
        which = int(np.argmax(asked != phase.num_rows))
        found = phase.num_rows[which]
        raise _fault(phase, f"{_name(phase, which)} has {found} rows, for {asked[which]} tokens")


def _fault(phase: Phase, sentence: str) -> PlanError:
    return PlanError(f"check_plan: phase {phase.name}: {sentence}.")


def _name(phase: Phase, which: int) -> str:
    return f"the message from rank {phase.src[which]} to rank {phase.dst[which]}"
