"""Which algorithm an exchange takes: the traffic model's choice, remembered for alike counts.

Pure: no torch, no process group. Ranks that ask with the same counts, in the same order, get the
same answers.
"""

import math
from collections import OrderedDict
from collections.abc import Sequence

from piper_kernels.dist.exchange_counts import CountArray, ExchangeCounts, sum_by_node
from piper_kernels.dist.halo_phases import ALGORITHMS, Algorithm
from piper_kernels.dist.topology import Topology
from piper_kernels.dist.traffic import Choice, choose
from piper_kernels.dist.traffic_tasks import Traffic

_MOST_KEPT = 64


class AlgorithmChoice:
    """The choice for one group, worked out once for each kind of counts.

    Counts are alike if the largest number of rows that a node sends or receives, that a rank sends
    or receives, and the saving by de-duplication agree to within a fifth or so.

    Args:
        topology: of the group.
        algorithms: those allowed.

    Attributes:
        last: the last choice that was worked out, with its reason; ``None`` before, and where
            there is nothing to choose.

    Example:
        >>> from piper_kernels.dist.exchange_counts import plain_counts
        >>> from piper_kernels.dist.topology_presets import one_box
        >>> topology = one_box(2)
        >>> counts = plain_counts(topology, [[1, 2], [3, 4]])
        >>> AlgorithmChoice(topology).choose(counts, 8.0, 8.0)
        'flat'
    """

    def __init__(self, topology: Topology, algorithms: Sequence[Algorithm] = ALGORITHMS) -> None:
        self.topology, self.algorithms = topology, tuple(algorithms)
        self.last: Choice | None = None
        self._known: OrderedDict[tuple[int, ...], Algorithm] = OrderedDict()

    def choose(
        self, counts: ExchangeCounts, dispatch_row_bytes: float, combine_row_bytes: float
    ) -> Algorithm:
        """The fastest algorithm, modelled.

        Args:
            counts: all ranks'.
            dispatch_row_bytes: of one row there.
            combine_row_bytes: of one row back.
        """
        if self.topology.num_nodes == 1:
            # one message to each rank is what every algorithm comes to
            return "flat"
        key = _kind_of(self.topology, counts, dispatch_row_bytes)
        if key not in self._known:
            traffic = Traffic(
                topology=self.topology,
                counts=counts,
                dispatch_row_bytes=dispatch_row_bytes,
                combine_row_bytes=combine_row_bytes,
            )
            self.last = choose(traffic, algorithms=self.algorithms, chunk_options=(1,))
            self._known[key] = self.last.best.algorithm
            if len(self._known) > _MOST_KEPT:
                self._known.popitem(last=False)
        return self._known[key]


def _kind_of(topology: Topology, counts: ExchangeCounts, row_bytes: float) -> tuple[int, ...]:
    """What decides between algorithms, in steps of about a fifth."""
    nodes = topology.maps.rank_to_node
    crosses = nodes[:, None] != nodes
    crossing = counts.rows * crosses
    by_node = sum_by_node(topology, crossing)
    sizes: tuple[CountArray, ...] = (
        by_node,
        crossing.sum(axis=1),
        crossing.sum(axis=0),
        by_node.sum(axis=0),
    )
    most = [float(size.max(initial=0)) for size in sizes]
    steps = [round(4 * math.log2(1 + size)) for size in (*most, row_bytes)]
    return (*steps, round(8 * math.log2(counts.dedup_factor(topology))))
