"""How long a phase takes in closed form: the busiest port decides.

Every port works through its messages one after the other, all ports side by side (LogGP). Ports are
GPUs inside a node, NICs outside, and what switch groups share. The last byte arrives one latency
after the busiest port is done. No port waits for another here: the simulator knows that.

Pure: no torch, no process group.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from piper_kernels.dist.halo_phases import Phase
from piper_kernels.dist.links import LEVELS, FloatArray
from piper_kernels.dist.topology import IntArray, Topology


@dataclass(frozen=True, kw_only=True, slots=True)
class PhaseTime:
    """What a phase takes, and why.

    Attributes:
        seconds: latency + gap + transfer.
        latency_s: of the furthest level that occurs.
        gap_s: what the messages cost the busiest port, apart from their bytes.
        transfer_s: what the bytes cost the busiest port.
        port: the busiest port, in words; empty if nothing is sent.
    """

    seconds: float
    latency_s: float
    gap_s: float
    transfer_s: float
    port: str


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class Costs:
    """What each message costs the ports that it passes.

    Attributes:
        level: ``[M]`` index into ``LEVELS``.
        size_bytes: ``[M]``.
        latency_s: ``[M]``.
        gap_s: ``[M]`` on the ports at both ends.
        transfer_s: ``[M]`` on the ports at both ends.
    """

    level: IntArray
    size_bytes: FloatArray
    latency_s: FloatArray
    gap_s: FloatArray
    transfer_s: FloatArray


def message_costs(
    topology: Topology, phase: Phase, row_bytes: float, *, flat_far_efficiency: float = 1.0
) -> Costs:
    """Price each message of a phase by the link of its level; moves inside a rank are free.

    Args:
        topology: of the group.
        phase: of a plan.
        row_bytes: of one row.
        flat_far_efficiency: share of the NIC's bandwidth that messages of a flat exchange to other
            switch groups get; a calibration constant for collectives of vendors, not physics.
    """
    level = topology.distances(phase.src, phase.dst)
    size = phase.num_rows * float(row_bytes)
    latency, gap, transfer = np.zeros((3, len(size)))
    for index, name in list(enumerate(LEVELS))[1:]:
        at = level == index
        if not at.any():
            continue
        link = topology.link(name)
        latency[at], gap[at] = link.latency_s, link.message_gap_s
        slowed = flat_far_efficiency if name == "far" and phase.name == "flat" else 1.0
        transfer[at] = (link.busy_s(size[at]) - link.message_gap_s) / slowed
    return Costs(level=level, size_bytes=size, latency_s=latency, gap_s=gap, transfer_s=transfer)


def phase_time(
    topology: Topology, phase: Phase, row_bytes: float, *, flat_far_efficiency: float = 1.0
) -> PhaseTime:
    """Price one phase.

    Example:
        Two nodes of one rank exchange 5 MB over NICs of 25 GB/s: 200 us, after 10 us of latency and
        5 us for the message.

        >>> from piper_kernels.dist.halo_plan import make_plan
        >>> from piper_kernels.dist.topology_presets import frontier
        >>> topology = frontier(1).lay_out((1, 1))
        >>> flat = make_plan(topology, [[0, 5], [5, 0]], 1e6, "flat").phase("flat")
        >>> time = phase_time(topology, flat, 1e6)
        >>> round(time.seconds * 1e6), time.port
        (215, 'NIC 0 out')
    """
    return chunk_times(topology, phase, row_bytes, (1,), flat_far_efficiency=flat_far_efficiency)[0]


def chunk_times(
    topology: Topology,
    phase: Phase,
    row_bytes: float,
    chunk_options: Sequence[int],
    *,
    flat_far_efficiency: float = 1.0,
) -> tuple[PhaseTime, ...]:
    """Price one chunk of a phase whose messages are cut into n equal parts, for several n."""
    links = (topology.links.node, topology.links.group, topology.links.far)
    has_curve = any(link is not None and link.efficiency for link in links)
    times: list[PhaseTime] = []
    for num_chunks in chunk_options:
        # without efficiency curves a part costs 1/n of the transfer: price whole messages, once
        if has_curve or not times:
            part = replace(phase, num_rows=phase.num_rows / (num_chunks if has_curve else 1))
            costs = message_costs(
                topology, part, row_bytes, flat_far_efficiency=flat_far_efficiency
            )
            latency_s = float(costs.latency_s.max(initial=0.0))
            ports = tuple(_ports(topology, part, costs))
        times.append(_busiest(ports, latency_s, 1 if has_curve else num_chunks))
    return tuple(times)


def _busiest(ports: Sequence["_Ports"], latency_s: float, num_chunks: int) -> PhaseTime:
    """The port that needs longest for its messages with 1 / ``num_chunks`` of their bytes."""
    gap_s, transfer_s, port = 0.0, 0.0, ""
    for kind in ports:
        total = kind.gap_s + kind.transfer_s / num_chunks
        which = int(np.argmax(total))
        if total[which] > gap_s + transfer_s:
            gap_s, transfer_s = float(kind.gap_s[which]), float(kind.transfer_s[which]) / num_chunks
            port = kind.name(which)
    return PhaseTime(
        seconds=latency_s + gap_s + transfer_s,
        latency_s=latency_s,
        gap_s=gap_s,
        transfer_s=transfer_s,
        port=port,
    )


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class _Ports:
    """All ports of one kind: seconds of each, and how to name one."""

    gap_s: FloatArray
    transfer_s: FloatArray
    name: Callable[[int], str]


def _ports(topology: Topology, phase: Phase, costs: Costs) -> Iterator[_Ports]:
    """Every kind of port that the phase may use."""
    maps, fabric = topology.maps, topology.fabric
    near, leaves = costs.level == 1, costs.level >= 2
    for ends, way in ((phase.src, "out"), (phase.dst, "in")):
        yield _own_ports(costs, near, ends, f"GPU {{}} {way}".format)
        nics = maps.rank_to_nic[ends]
        yield _own_ports(costs, leaves, nics, f"NIC {{}} {way}".format)
    if fabric is None:
        return
    names, num_groups = topology.group_names, topology.num_groups
    src, dst = maps.rank_to_group[phase.src], maps.rank_to_group[phase.dst]
    rate = fabric.uplink_capacity(num_groups)
    yield _shared(costs, src, rate, lambda port: f"uplink of {names[port]} out")
    yield _shared(costs, dst, rate, lambda port: f"uplink of {names[port]} in")

    def pair_name(port: int) -> str:
        return f"link {names[port // num_groups]} to {names[port % num_groups]}"

    yield _shared(costs, src * num_groups + dst, fabric.pair_capacity(num_groups), pair_name)


def _own_ports(
    costs: Costs, chosen: NDArray[np.bool_], ports: NDArray[Any], name: Callable[[int], str]
) -> _Ports:
    """Ports of ranks: messages occupy them for gap and transfer."""
    at = ports[chosen]
    gap = np.bincount(at, weights=costs.gap_s[chosen], minlength=1).astype(np.float64)
    transfer = np.bincount(at, weights=costs.transfer_s[chosen], minlength=1).astype(np.float64)
    return _Ports(gap_s=gap, transfer_s=transfer, name=name)


def _shared(costs: Costs, links: IntArray, rate: float, name: Callable[[int], str]) -> _Ports:
    """Links between groups: far bytes share them, messages cost them nothing."""
    far = costs.level == 3
    size = np.bincount(links[far], weights=costs.size_bytes[far], minlength=1)
    return _Ports(gap_s=np.zeros_like(size), transfer_s=size / rate, name=name)
