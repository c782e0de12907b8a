"""A flow-level simulator: how long a plan takes when its messages share the network's links.

Where the closed form (:mod:`phase_time`) looks at each port alone, here flows that share NICs and
links between groups hold one another up (max-min fair sharing). Messages of one phase start
together. A phase inside nodes starts on a node when the node has what it waits for; one between
nodes when all nodes have. Phases I and III use the same ports and follow one another.

Results are modelled, not measured. Pure: no torch, no process group. Letters: N nodes.
"""

from dataclasses import dataclass
from typing import Literal

import numpy as np

from piper_kernels.dist.fair_share import end_times
from piper_kernels.dist.flow_network import Network, PhaseFlows, make_flows, make_network
from piper_kernels.dist.halo_phases import Phase
from piper_kernels.dist.halo_plan import HaloPlan
from piper_kernels.dist.link_loads import link_loads
from piper_kernels.dist.links import FloatArray, Level
from piper_kernels.errors import require

# dials of the approximation, set by comparing with exact flows: tests/dist/test_simulate.py
AGGREGATE_TOLERANCE = 0.02
REST_SHARE = 0.3
NODE_PHASES = ("I", "III")


@dataclass(frozen=True, kw_only=True, slots=True)
class LinkUse:
    """How much one resource had to do.

    Attributes:
        name: in words.
        busy_s: seconds of work.
        share: of the whole time.
    """

    name: str
    busy_s: float
    share: float


@dataclass(frozen=True, kw_only=True, slots=True)
class PhaseResult:
    """When a phase ran, over all nodes.

    Attributes:
        name: of the phase.
        start_s: on the first node.
        end_s: on the last node.
        seconds: the longest on any one node.
    """

    name: str
    start_s: float
    end_s: float
    seconds: float


@dataclass(frozen=True, kw_only=True, slots=True)
class SimulationResult:
    """What the simulator found.

    Attributes:
        label: says that these numbers are modelled.
        algorithm: of the plan.
        seconds: from the start to the last arrival.
        phases: in order of the plan.
        level_bytes: sent at each level.
        links: the busiest first, at most ten.
        num_flows: that were simulated.
    """

    label: Literal["modelled"]
    algorithm: str
    seconds: float
    phases: tuple[PhaseResult, ...]
    level_bytes: dict[Level, float]
    links: tuple[LinkUse, ...]
    num_flows: int

    def describe(self) -> str:
        """A few lines, at most 100 columns wide."""
        lines = [f"{self.label}: {self.algorithm} takes {self.seconds * 1e3:.3f} ms"]
        lines += [
            f"phase {phase.name:<4} {phase.start_s * 1e3:>10.3f} .. {phase.end_s * 1e3:>10.3f} ms"
            for phase in self.phases
        ]
        sizes = [f"{level} {size / 1e6:.3f} MB" for level, size in self.level_bytes.items() if size]
        lines.append(f"sent: {', '.join(sizes) or 'nothing'}")
        lines += [f"busy {link.share:>4.0%}  {link.name}"[:100] for link in self.links]
        return "\n".join(lines)


def simulate(
    plan: HaloPlan,
    *,
    background_share: float = 0.0,
    flat_far_efficiency: float = 1.0,
    is_exact: bool = False,
) -> SimulationResult:
    """Run a plan on the network of its topology.

    Args:
        plan: made by :func:`make_plan`, blocks not needed.
        background_share: of the links between switch groups that other jobs use.
        flat_far_efficiency: share of a NIC's bandwidth that a flat exchange gets between switch
            groups: the calibration constant of the traffic model; 1.0 is physics.
        is_exact: a flow for each message and a new sharing at each end, for a few hundred ranks at
            most. Otherwise messages between two NICs are one flow, and ends that cost less than
            ``AGGREGATE_TOLERANCE`` of the bytes are taken together.

    Raises:
        ConfigError: a share out of range.

    Example:
        Two ranks send 5 MB each to one rank of another node: its NIC takes 400 us for them, and 10
        us for two messages, after 10 us of latency.

        >>> from piper_kernels.dist.halo_plan import make_plan
        >>> from piper_kernels.dist.topology_presets import frontier
        >>> topology = frontier(3).select([0, 8, 16])
        >>> plan = make_plan(topology, [[0, 0, 5], [0, 0, 5], [0, 0, 0]], 1e6, "flat")
        >>> result = simulate(plan)
        >>> round(result.seconds * 1e6), result.links[0].name
        (420, 'NIC 2 in on node2')
    """
    name = "simulate"
    fits = 0 <= background_share < 1
    require(fits, name, "background_share", "be in [0, 1)", background_share)
    fits = 0 < flat_far_efficiency <= 1
    requirement = "be above 0, at most 1"
    require(fits, name, "flat_far_efficiency", requirement, flat_far_efficiency)
    network = make_network(plan.topology, background_share)
    num_nodes = plan.topology.num_nodes
    arrived: dict[str, FloatArray] = {}
    ports_free, busy_s = np.zeros(num_nodes), np.zeros(network.num_resources)
    results, num_flows = [], 0
    for phase in sorted(plan.phases, key=lambda phase: len(phase.after)):
        sharing = make_flows(
            network,
            phase,
            plan.row_bytes,
            is_exact=is_exact,
            flat_far_efficiency=flat_far_efficiency,
        )
        takes_s = _node_times(network, phase, sharing, is_exact)
        starts = _starts(plan, phase, arrived, ports_free)
        arrived[phase.name] = starts + takes_s
        if phase.name in NODE_PHASES:
            ports_free = np.maximum(ports_free, arrived[phase.name])
        results.append(_result(phase, starts, takes_s))
        busy_s += sharing.flows.busy_s()
        num_flows += len(sharing.latency_s)
    seconds = max((float(times.max()) for times in arrived.values()), default=0.0)
    order = {str(phase.name): index for index, phase in enumerate(plan.phases)}
    return SimulationResult(
        label="modelled",
        algorithm=plan.algorithm,
        seconds=seconds,
        phases=tuple(sorted(results, key=lambda result: order[result.name])),
        level_bytes=link_loads(plan.topology, plan.phases, plan.row_bytes).level_bytes,
        links=_busiest(network, busy_s, seconds),
        num_flows=num_flows,
    )


def _node_times(network: Network, phase: Phase, sharing: PhaseFlows, is_exact: bool) -> FloatArray:
    """``[N]`` seconds from the start of the phase to the last arrival on each node."""
    # inside nodes each node's own last end counts, elsewhere the last of all
    parts = network.parts() if phase.name in NODE_PHASES else None
    tolerance = 0.0 if is_exact else AGGREGATE_TOLERANCE
    ends = end_times(sharing.flows, tolerance, rest_share=REST_SHARE, parts=parts)
    times = np.zeros(network.topology.num_nodes)
    np.maximum.at(times, sharing.dst_node, ends + sharing.latency_s)
    return times


def _starts(
    plan: HaloPlan, phase: Phase, arrived: dict[str, FloatArray], ports_free: FloatArray
) -> FloatArray:
    """``[N]`` when the phase starts on each node."""
    starts = np.zeros(plan.topology.num_nodes)
    for name in phase.after:
        starts = np.maximum(starts, arrived[name])
    if phase.name in NODE_PHASES:
        return np.maximum(starts, ports_free)
    return np.full_like(starts, starts.max())


def _result(phase: Phase, starts: FloatArray, takes_s: FloatArray) -> PhaseResult:
    return PhaseResult(
        name=phase.name,
        start_s=float(starts.min()),
        end_s=float((starts + takes_s).max()),
        seconds=float(takes_s.max()),
    )


def _busiest(network: Network, busy_s: FloatArray, seconds: float) -> tuple[LinkUse, ...]:
    """The ten resources with most to do."""
    order = np.argsort(-busy_s, kind="stable")[:10]
    return tuple(
        LinkUse(
            name=network.name(int(r)), busy_s=float(busy_s[r]), share=float(busy_s[r]) / seconds
        )
        for r in order
        if busy_s[r] > 0
    )
