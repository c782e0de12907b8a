"""What an exchange puts on each link: bytes and messages per port.

Pure: no torch, no process group. Letters: P ranks, N nodes, G groups.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from piper_kernels.dist.halo_phases import Phase
from piper_kernels.dist.links import LEVELS, FloatArray, Level
from piper_kernels.dist.topology import IntArray, Topology


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class LinkLoads:
    """Bytes and messages per port. A GPU's port carries what stays in the node, a NIC the rest.

    Attributes:
        level_bytes: by how far the two ranks are apart; ``self`` is copied, not sent.
        level_messages: the same for messages.
        gpu_out_bytes: ``[P]``; ``gpu_in_bytes`` likewise.
        gpu_in_bytes: ``[P]``.
        nic_out_bytes: ``[num_nics]`` over all nodes.
        nic_in_bytes: ``[num_nics]``.
        nic_out_messages: ``[num_nics]``.
        group_out_bytes: ``[G]`` to other switch groups.
        group_in_bytes: ``[G]``.
        node_pair_bytes: ``[N, N]`` from node to node; 0 on the diagonal.
        rank_messages: ``[P]`` messages that a rank sends to other nodes.
    """

    level_bytes: dict[Level, float]
    level_messages: dict[Level, int]
    gpu_out_bytes: FloatArray
    gpu_in_bytes: FloatArray
    nic_out_bytes: FloatArray
    nic_in_bytes: FloatArray
    nic_out_messages: IntArray
    group_out_bytes: FloatArray
    group_in_bytes: FloatArray
    node_pair_bytes: FloatArray
    rank_messages: IntArray


def link_loads(topology: Topology, phases: Sequence[Phase], row_bytes: float) -> LinkLoads:
    """What some phases of an exchange put on each port.

    Example:
        >>> from piper_kernels.dist.halo_plan import make_plan
        >>> from piper_kernels.dist.topology_presets import frontier
        >>> topology = frontier(1).lay_out((2, 2))
        >>> rows = [[1] * 4] * 4
        >>> flat = link_loads(topology, make_plan(topology, rows, 8, "flat").phases, row_bytes=8)
        >>> halo = link_loads(topology, make_plan(topology, rows, 8, "halo").phases, row_bytes=8)
        >>> flat.level_bytes["group"], halo.level_bytes["group"]
        (64.0, 64.0)
        >>> flat.rank_messages.tolist(), halo.rank_messages.tolist()
        ([2, 2, 2, 2], [1, 1, 1, 1])
    """
    maps, num_nodes = topology.maps, topology.num_nodes
    src = np.concatenate([phase.src for phase in phases])
    dst = np.concatenate([phase.dst for phase in phases])
    size = np.concatenate([phase.num_rows for phase in phases]) * float(row_bytes)
    level = topology.distances(src, dst)

    def total(at: IntArray, chosen: np.ndarray, length: int) -> FloatArray:
        return np.bincount(at[chosen], weights=size[chosen], minlength=length).astype(np.float64)

    near, leaves, far = level == 1, level >= 2, level == 3
    num_ranks, num_nics = topology.num_ranks, len(maps.nic_to_node)
    pair = maps.rank_to_node[src] * num_nodes + maps.rank_to_node[dst]
    level_bytes = total(level, np.ones_like(near), len(LEVELS)).tolist()
    level_messages = np.bincount(level, minlength=len(LEVELS)).tolist()
    groups, num_groups = maps.rank_to_group, topology.num_groups
    return LinkLoads(
        level_bytes=dict(zip(LEVELS, level_bytes, strict=True)),
        level_messages=dict(zip(LEVELS, level_messages, strict=True)),
        gpu_out_bytes=total(src, near, num_ranks),
        gpu_in_bytes=total(dst, near, num_ranks),
        nic_out_bytes=total(maps.rank_to_nic[src], leaves, num_nics),
        nic_in_bytes=total(maps.rank_to_nic[dst], leaves, num_nics),
        nic_out_messages=np.bincount(maps.rank_to_nic[src[leaves]], minlength=num_nics),
        group_out_bytes=total(groups[src], far, num_groups),
        group_in_bytes=total(groups[dst], far, num_groups),
        node_pair_bytes=total(pair, leaves, num_nodes**2).reshape(num_nodes, num_nodes),
        rank_messages=np.bincount(src[leaves], minlength=num_ranks),
    )
