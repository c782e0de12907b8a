"""The network as resources that flows share: ports of GPUs and NICs, and links between groups.

Messages become flows. A message's gap counts as time on the ports at both ends, so a port's total
is that of the closed form (:mod:`phase_time`); links between groups carry bytes only. Flows may be
aggregated: all messages from one NIC to another are one flow of as many shares.

Pure: no torch, no process group. Letters: F flows, H hops, R resources.
"""

from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from piper_kernels.dist.fair_share import Flows
from piper_kernels.dist.halo_phases import Phase
from piper_kernels.dist.links import FloatArray
from piper_kernels.dist.phase_time import Costs, message_costs
from piper_kernels.dist.topology import IntArray, Topology


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class Network:
    """The resources of one topology, numbered kind after kind.

    Attributes:
        topology: whose they are.
        background_share: of the links between groups that other jobs use up.
        kinds: name and number of each kind, in order.
    """

    topology: Topology
    background_share: float
    kinds: tuple[tuple[str, int], ...]

    @property
    def num_resources(self) -> int:
        """R."""
        return sum(count for _, count in self.kinds)

    def first(self, kind: str) -> int:
        """Number of the first resource of a kind."""
        start = 0
        for name, count in self.kinds:
            if name == kind:
                return start
            start += count
        raise KeyError(kind)

    def parts(self) -> IntArray:
        """``[R]`` the node of each GPU's port; all other resources are one more part."""
        maps, num_nodes = self.topology.maps, self.topology.num_nodes
        others = self.num_resources - 2 * self.topology.num_ranks
        return np.concatenate([maps.rank_to_node, maps.rank_to_node, np.full(others, num_nodes)])

    def name(self, resource: int) -> str:
        """A resource in words."""
        topology = self.topology
        starts = {kind: self.first(kind) for kind, _ in self.kinds}
        kind = max((kind for kind in starts if starts[kind] <= resource), key=starts.__getitem__)
        index = resource - starts[kind]
        what, _, way = kind.partition(" ")
        if what == "uplink":
            return f"uplink of {topology.group_names[index]} {way}"
        if what == "pair":
            src, dst = divmod(index, topology.num_groups)
            return f"link {topology.group_names[src]} to {topology.group_names[dst]}"
        node_of = topology.maps.rank_to_node if what == "GPU" else topology.maps.nic_to_node
        return f"{what} {index} {way} on {topology.nodes[int(node_of[index])].host}"


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class PhaseFlows:
    """A phase's messages as flows.

    Attributes:
        flows: what is shared.
        latency_s: ``[F]`` from a flow's end to its arrival.
        dst_node: ``[F]`` node where it arrives.
    """

    flows: Flows
    latency_s: FloatArray
    dst_node: IntArray


def make_network(topology: Topology, background_share: float) -> Network:
    """The resources of ``topology``: its ports, and those links between groups that may limit.

    A kind of link that could carry all that the NICs of any group can send is left out.
    """
    maps, fabric, num_groups = topology.maps, topology.fabric, topology.num_groups
    num_ranks, num_nics = topology.num_ranks, len(maps.nic_to_node)
    kinds = [
        ("GPU out", num_ranks),
        ("GPU in", num_ranks),
        ("NIC out", num_nics),
        ("NIC in", num_nics),
    ]
    if fabric is not None and num_groups > 1:
        per_group = np.bincount(maps.node_to_group[maps.nic_to_node])
        sent = float(per_group.max()) * topology.link("far").bandwidth_bytes_per_s
        left = 1 - background_share
        if sent > fabric.uplink_capacity(num_groups) * left:
            kinds += [("uplink out", num_groups), ("uplink in", num_groups)]
        if sent > fabric.pair_capacity(num_groups) * left:
            kinds.append(("pair", num_groups**2))
    return Network(topology=topology, background_share=background_share, kinds=tuple(kinds))


def make_flows(
    network: Network,
    phase: Phase,
    row_bytes: float,
    *,
    is_exact: bool,
    flat_far_efficiency: float = 1.0,
) -> PhaseFlows:
    """Flows of a phase; moves inside a rank cost nothing and are left out.

    Args:
        network: the resources.
        phase: of a plan.
        row_bytes: of one row.
        is_exact: one flow for each message, rather than for each pair of ports.
        flat_far_efficiency: as in :func:`message_costs`.
    """
    topology, maps = network.topology, network.topology.maps
    costs = message_costs(topology, phase, row_bytes, flat_far_efficiency=flat_far_efficiency)
    is_near = costs.level == 1
    nic = maps.rank_to_nic
    # a GPU's port inside its node, a NIC outside
    src = np.where(is_near, phase.src, network.first("NIC out") + nic[phase.src])
    dst = np.where(
        is_near, topology.num_ranks + phase.dst, network.first("NIC in") + nic[phase.dst]
    )
    sent = np.flatnonzero(costs.level > 0)
    if is_exact:
        first, group = sent, np.arange(len(sent))
    else:
        key = src[sent].astype(np.int64) * network.num_resources + dst[sent]
        _, first, group = np.unique(key, return_index=True, return_inverse=True)
        first = sent[first]

    def total(values: FloatArray | None) -> FloatArray:
        weights = None if values is None else values[sent]
        return np.bincount(group, weights=weights, minlength=len(first)).astype(np.float64)

    size = total(costs.size_bytes)
    port_s = total(costs.gap_s + costs.transfer_s)
    hops, cost = [src[first], dst[first]], [port_s / size, port_s / size]
    shared = _shared_hops(network, phase, costs, first)
    hops += [at for at, _ in shared]
    cost += [np.where(at < network.num_resources, each, 0.0) for at, each in shared]
    flows = Flows(
        size_bytes=size,
        weight=total(None),
        hops=np.array(hops, dtype=np.int32),
        cost_s_per_byte=np.array(cost),
        num_resources=network.num_resources,
    )
    nodes = maps.rank_to_node[phase.dst[first]]
    return PhaseFlows(flows=flows, latency_s=costs.latency_s[first], dst_node=nodes)


def _shared_hops(
    network: Network, phase: Phase, costs: Costs, chosen: NDArray[Any]
) -> list[tuple[IntArray, float]]:
    """Resources between groups that each flow crosses, and seconds per byte there."""
    topology, kinds = network.topology, dict(network.kinds)
    fabric, num_groups, nowhere = topology.fabric, topology.num_groups, network.num_resources
    far = costs.level[chosen] == 3
    if fabric is None or not far.any():
        return []
    groups, left = topology.maps.rank_to_group, 1 - network.background_share
    src, dst = groups[phase.src[chosen]], groups[phase.dst[chosen]]
    uplink, pair = (
        fabric.uplink_capacity(num_groups) * left,
        fabric.pair_capacity(num_groups) * left,
    )
    hops = (
        ("uplink out", src, uplink),
        ("uplink in", dst, uplink),
        ("pair", src * num_groups + dst, pair),
    )
    return [
        (np.where(far, network.first(kind) + at, nowhere), 1 / rate)
        for kind, at, rate in hops
        if kind in kinds
    ]
