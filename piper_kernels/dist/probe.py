"""Measure the network at hand and describe it as a :class:`Topology`.

Every rank takes part, and all send at once: an exchange will not have the network to itself either.
At each level (inside nodes, between nodes of a group, between groups) each rank sends ``k``
messages of ``b`` bytes to a partner and receives as many from another; the slowest rank's time is
the point. Points are fitted by :mod:`probe_fit`, and compared with a flat all-to-all of several
sizes.
"""

import functools
import os
import socket
import time
from collections.abc import Callable, Mapping, Sequence
from statistics import median
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor

from piper_kernels.dist.halo_plan import make_plan
from piper_kernels.dist.links import Level, Link, Links
from piper_kernels.dist.phase_time import phase_time
from piper_kernels.dist.probe_fit import Point, fit_link
from piper_kernels.dist.probe_nics import number_nics, seen_nic
from piper_kernels.dist.topology import Node, Topology
from piper_kernels.errors import require
from piper_kernels.strict_model import PositiveFloat, PositiveInt, StrictModel

SIZES_BYTES = tuple(4**power for power in range(3, 13))
NUM_MESSAGES = (1, 2, 8)
ALL_TO_ALL_BYTES = (1 << 10, 1 << 14, 1 << 18)
# A size is the last one if its messages took this long: larger ones tell nothing new.
_LONGEST_S = 0.1
_NUM_BATCHES = 5
_BATCH_S = 0.02
_MOST_ROUNDS = 20

# called with (level or "all-to-all", bytes of a message, how many) before each measurement
OnProgress = Callable[[str, int, int], None]
Partners = tuple[int, int] | None


class AllToAll(StrictModel):
    """One flat all-to-all.

    Attributes:
        size_bytes: from each rank to each other.
        seconds: measured, median.
        predicted_s: what the fitted topology says.
    """

    size_bytes: PositiveInt
    seconds: PositiveFloat
    predicted_s: PositiveFloat


class ProbeReport(StrictModel):
    """What a probe found.

    Attributes:
        topology: for the planner.
        points: what its links were fitted to.
        all_to_all: a check of the fit.
        notes: what could not be measured, in words.
    """

    topology: Topology
    points: tuple[Point, ...]
    all_to_all: tuple[AllToAll, ...]
    notes: tuple[str, ...]


def probe(
    *,
    name: str = "probed",
    host_to_group: Mapping[str, str] | None = None,
    sizes_bytes: Sequence[int] = SIZES_BYTES,
    on_progress: OnProgress | None = None,
) -> ProbeReport:
    """Measure the network of the default process group; every rank calls it and gets the same.

    Args:
        name: of the machine, for the topology.
        host_to_group: switch group of each host; ``None``: all in one.
        sizes_bytes: of the messages, rising; a level stops where they take long.
        on_progress: called before each measurement.

    Raises:
        ConfigError: no process group, or a host without a group.
    """
    fits = dist.is_available() and dist.is_initialized()
    remedy = "Call torch.distributed.init_process_group first, or start with torchrun."
    require(fits, "probe", "process group", "exist", "none", remedy)
    layout = _gather_layout(name, host_to_group)
    say = on_progress or (lambda *_: None)
    points: list[Point] = []
    links: dict[Level, Link] = {}
    levels: tuple[Level, ...] = ("node", "group", "far")
    for level in levels:
        partners = partners_at(layout, level)
        if any(partner is not None for partner in partners):
            measured = _measure_level(layout, level, partners, sizes_bytes, say)
            links[level] = fit_link(measured)
            points += measured
    notes = []
    if "node" not in links:
        links["node"] = _copy_link()
        notes.append("no node has two ranks: links.node is what copying inside a rank takes")
    if layout.num_nodes > 1 and "group" not in links:
        links["group"] = links["far"]
        notes.append("no switch group has two nodes: links.group is links.far")
    version = torch.__version__
    source = f"piper probe: {layout.num_ranks} ranks, {dist.get_backend()}, torch {version}"
    topology = layout.replace(links=Links(**links), source=source)
    checks = _check_all_to_all(topology, say)
    return ProbeReport(
        topology=topology, points=tuple(points), all_to_all=checks, notes=tuple(notes)
    )


def partners_at(topology: Topology, level: Level) -> list[Partners]:
    """For each rank whom it sends to and whom it receives from at a level; ``None``: it rests.

    Inside a node ranks form a ring. Between nodes and groups the rails do, as far as all nodes have
    them: each rank sends by its own NIC.
    """
    rings: list[list[int]] = []
    if level == "node":
        rings = [list(node.ranks) for node in topology.nodes]
    else:
        groups = [topology.group_nodes(group) for group in topology.group_names]
        # far: the first node of each group
        circles = groups if level == "group" else [tuple(nodes[0] for nodes in groups)]
        for nodes in circles:
            width = min(len(topology.nodes[node].ranks) for node in nodes)
            rings += [
                [topology.nodes[node].ranks[local] for node in nodes] for local in range(width)
            ]
    found: list[Partners] = [None] * topology.num_ranks
    for ring in rings:
        for place, rank in enumerate(ring):
            if len(ring) > 1:
                found[rank] = ring[(place + 1) % len(ring)], ring[place - 1]
    return found


def _gather_layout(name: str, host_to_group: Mapping[str, str] | None) -> Topology:
    """Who sits where, with speeds yet to be measured."""
    device = _device()
    bus = ""
    if device.type == "cuda":
        properties: Any = torch.cuda.get_device_properties(device)
        domain, number = properties.pci_domain_id, properties.pci_bus_id
        bus = f"{domain:04x}:{number:02x}:{properties.pci_device_id:02x}.0"
    mine = socket.gethostname(), seen_nic(dist.get_backend(), bus)
    everyone: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(everyone, mine)
    hosts = [host for host, _ in everyone]
    nics = number_nics(hosts, [nic for _, nic in everyone])
    groups = dict.fromkeys(hosts, "group0") if host_to_group is None else host_to_group
    homeless = sorted(set(hosts) - set(groups))
    requirement = "name the group of each host"
    require(not homeless, "probe", "host_to_group", requirement, f"none for {homeless}")
    nodes = []
    for host in dict.fromkeys(hosts):
        ranks = tuple(rank for rank, there in enumerate(hosts) if there == host)
        theirs = tuple(nics[rank] for rank in ranks)
        nodes.append(Node(host=host, group=groups[host], ranks=ranks, nics=theirs))
    unknown = Link(latency_s=0.0, bandwidth_bytes_per_s=1.0)
    links = Links(node=unknown, group=unknown, far=unknown)
    return Topology(name=name, source="not measured yet", links=links, nodes=tuple(nodes))


def _measure_level(
    topology: Topology,
    level: Level,
    partners: Sequence[Partners],
    sizes_bytes: Sequence[int],
    say: OnProgress,
) -> list[Point]:
    """Every number and size of messages at one level."""
    mine, points = partners[dist.get_rank()], []
    # outside a node the port is a NIC, which ranks may share
    nics = [int(topology.maps.rank_to_nic[rank]) for rank, p in enumerate(partners) if p]
    shared = 1 if level == "node" else max(map(nics.count, nics))
    for count in NUM_MESSAGES:
        for size in sizes_bytes:
            say(level, size, count)
            seconds = _time(functools.partial(_send, mine, size, count))
            points.append(
                Point(level=level, num_messages=count * shared, size_bytes=size, seconds=seconds)
            )
            if seconds > _LONGEST_S:
                break
    return points


def _send(partners: Partners, size_bytes: int, num_messages: int) -> Callable[[], None]:
    """A function that sends the messages to one partner and awaits those of the other."""
    if partners is None:
        return lambda: None
    to, of = partners
    device = _device()
    sent = torch.zeros(size_bytes, dtype=torch.uint8, device=device)
    received = [torch.empty_like(sent) for _ in range(num_messages)]

    def run() -> None:
        # receives first: gloo then tells the sender that it may begin, and that word must not wait
        # behind our own bytes; the other way round the two directions of a pair take turns
        operations = [dist.P2POp(dist.irecv, into, of) for into in received]
        operations += [dist.P2POp(dist.isend, sent, to) for _ in received]
        for work in dist.batch_isend_irecv(operations):
            work.wait()

    return run


def _time(prepare: Callable[[], Callable[[], None]]) -> float:
    """Seconds that a round takes on the slowest rank, the same number on every rank.

    Rounds follow one another without a barrier, so that what barriers cost is shared by many.
    """
    run, device = prepare(), _device()

    def seconds_of(num_rounds: int) -> float:
        dist.barrier()
        start = time.perf_counter()
        for _ in range(num_rounds):
            run()
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        slowest = torch.tensor([time.perf_counter() - start], dtype=torch.float64, device=device)
        dist.all_reduce(slowest, dist.ReduceOp.MAX)
        return float(slowest) / num_rounds

    first = seconds_of(1)
    num_rounds = min(_MOST_ROUNDS, max(2, round(_BATCH_S / first)))
    return median(seconds_of(num_rounds) for _ in range(_NUM_BATCHES))


def _copy_link() -> Link:
    """Copying inside a rank, for a topology in which no two ranks share a node."""
    size = 1 << 22
    source = torch.zeros(size, dtype=torch.uint8, device=_device())
    target = torch.empty_like(source)

    def copy(num_bytes: int) -> float:
        return _time(lambda: lambda: _copy(target[:num_bytes], source[:num_bytes]))

    small, large = copy(64), copy(size)
    rate = size / max(large - small, 1e-9)
    return Link(latency_s=small, bandwidth_bytes_per_s=rate)


def _copy(target: Tensor, source: Tensor) -> None:
    target.copy_(source)


def _check_all_to_all(topology: Topology, say: OnProgress) -> tuple[AllToAll, ...]:
    """A flat all-to-all of several sizes, beside what the topology predicts."""
    num_ranks, checks = topology.num_ranks, []
    if num_ranks == 1:
        return ()
    for size in ALL_TO_ALL_BYTES:
        say("all-to-all", size, num_ranks - 1)
        seconds = _time(functools.partial(_all_to_all, num_ranks * size))
        rows = np.ones((num_ranks, num_ranks), dtype=np.int64)
        plan = make_plan(topology, rows, size, "flat", has_blocks=False)
        predicted = phase_time(topology, plan.phases[0], size).seconds
        checks.append(AllToAll(size_bytes=size, seconds=seconds, predicted_s=predicted))
    return tuple(checks)


def _all_to_all(size_bytes: int) -> Callable[[], None]:
    """A function that exchanges ``size_bytes`` from each rank with all, itself too."""
    sent = torch.zeros(size_bytes, dtype=torch.uint8, device=_device())
    received = torch.empty_like(sent)

    def run() -> None:
        dist.all_to_all_single(received, sent)

    return run


def _device() -> torch.device:
    """Where tensors of the process group's backend live."""
    if "nccl" in dist.get_backend():
        return torch.device("cuda", int(os.environ.get("LOCAL_RANK", 0)))
    return torch.device("cpu")
