"""A plan in words, at most 100 columns wide.

Pure: no torch, no process group.
"""

import numpy as np

from piper_kernels.dist.halo_phases import Paths, Phase, message_paths
from piper_kernels.dist.halo_plan import HaloPlan
from piper_kernels.dist.link_loads import link_loads
from piper_kernels.dist.links import LEVELS
from piper_kernels.errors import require

WIDTH = 100


def describe_plan(plan: HaloPlan) -> str:
    """The plan as a whole: a line for each phase, and what each level and NIC carries.

    Example:
        >>> from piper_kernels.dist.halo_plan import make_plan
        >>> from piper_kernels.dist.topology_presets import frontier
        >>> plan = make_plan(frontier(1).lay_out((2, 2)), [[1] * 4] * 4, 1024)
        >>> print(describe_plan(plan))  # doctest: +ELLIPSIS
        halo plan of 4 ranks on 2 nodes in 1 group of frontier, 1.0 KiB a row, near groups first
        phase  after  messages      rows      bytes  most rows from one rank
        I      -             8         8    8.0 KiB  2
        II     -             4         8    8.0 KiB  2
        III    II            8         8    8.0 KiB  2
        level self 8 messages 8.0 KiB; node 8 messages 8.0 KiB; group 4 messages 8.0 KiB
        busiest NIC sends 4.0 KiB in 2 messages, mean of 2 NICs 4.0 KiB
        a rank sends at most 1 message to other nodes; digest ...
    """
    topology = plan.topology
    loads = link_loads(topology, plan.phases, plan.row_bytes)
    lines = [_title(plan), "phase  after  messages      rows      bytes  most rows from one rank"]
    for phase in plan.phases:
        rows = np.bincount(phase.src, weights=phase.num_rows, minlength=topology.num_ranks)
        waits = ", ".join(phase.after) or "-"
        size = _bytes(float(phase.num_rows.sum()) * plan.row_bytes)
        numbers = f"{phase.num_messages:>8}  {phase.num_rows.sum():>8g}  {size:>9}"
        lines.append(f"{phase.name:<5}  {waits:<5}  {numbers}  {rows.max():g}")
    sizes, counts = loads.level_bytes, loads.level_messages
    used = [level for level in LEVELS if counts[level]]
    parts = [f"{level} {_many(counts[level], 'message')} {_bytes(sizes[level])}" for level in used]
    lines.append("level " + "; ".join(parts))
    if loads.nic_out_bytes.any():
        most = int(np.argmax(loads.nic_out_bytes))
        count = _many(int(loads.nic_out_messages[most]), "message")
        mean = f"mean of {len(loads.nic_out_bytes)} NICs {_bytes(loads.nic_out_bytes.mean())}"
        lines.append(f"busiest NIC sends {_bytes(loads.nic_out_bytes[most])} in {count}, {mean}")
    messages = _many(int(loads.rank_messages.max()), "message")
    lines.append(f"a rank sends at most {messages} to other nodes; digest {plan.digest()}")
    lines += [f"note: {note}" for note in plan.notes]
    return "\n".join(piece for line in lines for piece in _wrapped(line))


def describe_rank(plan: HaloPlan, rank: int) -> str:
    """What one rank sends and receives, in posting order; a star marks a message off its rail.

    Raises:
        ConfigError: unknown rank.

    Example:
        >>> from piper_kernels.dist.halo_plan import make_plan
        >>> from piper_kernels.dist.topology_presets import frontier
        >>> print(describe_rank(make_plan(frontier(1).lay_out((1, 1)), [[0, 5], [2, 1]], 1024), 0))
        rank 0 on node0
        I    nothing
        II   send  step   0  to rank    1 on node1     rail 0  NIC 0 -> 1         5 rows    5.0 KiB
        II   recv  step   0  of rank    1 on node1     rail 0  NIC 1 -> 0         2 rows    2.0 KiB
        III  move  step   0  inside the rank                                      2 rows    2.0 KiB
    """
    topology = plan.topology
    fits = 0 <= rank < topology.num_ranks
    require(fits, "describe_rank", "rank", f"be in 0 .. {topology.num_ranks - 1}", rank)
    node = topology.nodes[int(topology.maps.rank_to_node[rank])]
    lines = [f"rank {rank} on {node.host}"]
    for phase in plan.phases:
        sends, recvs = np.flatnonzero(phase.src == rank), np.flatnonzero(phase.dst == rank)
        # moves inside the rank are listed once, as sends
        recvs = recvs[phase.src[recvs] != rank]
        recvs = recvs[np.argsort(phase.step[recvs], kind="stable")]
        paths = message_paths(topology, phase)
        lines += [_message(plan, phase, paths, int(m), "send") for m in sends]
        lines += [_message(plan, phase, paths, int(m), "recv") for m in recvs]
        if not len(sends) + len(recvs):
            lines.append(f"{phase.name:<4} nothing")
    return "\n".join(lines)


def _title(plan: HaloPlan) -> str:
    topology = plan.topology
    sizes = [
        _many(topology.num_ranks, "rank"),
        f"on {_many(topology.num_nodes, 'node')}",
        f"in {_many(topology.num_groups, 'group')}",
    ]
    direction = ", reversed" if plan.is_reversed else ""
    order = "far groups first" if plan.is_far_first else "near groups first"
    ending = "" if plan.algorithm == "flat" else f", {order}"
    where = f"{' '.join(sizes)} of {topology.name}"
    return f"{plan.algorithm} plan of {where}, {_bytes(plan.row_bytes)} a row{ending}{direction}"


def _message(plan: HaloPlan, phase: Phase, paths: Paths, which: int, verb: str) -> str:
    maps, nodes = plan.topology.maps, plan.topology.nodes
    src, dst = int(phase.src[which]), int(phase.dst[which])
    peer, word = (dst, "to") if verb == "send" else (src, "of")
    host = nodes[int(maps.rank_to_node[peer])].host
    where = f"{word} rank {peer:>4} on {host[:12]:<8}"
    path = ""
    if paths.rail[which] >= 0:
        mark = "" if paths.is_on_rail[which] else "*"
        nics = f"NIC {paths.src_nic[which]} -> {paths.dst_nic[which]}"
        path = f"rail {paths.rail[which]}{mark}  {nics}"
    if src == dst:
        verb, where = "move", "inside the rank"
    size = _bytes(float(phase.num_rows[which]) * plan.row_bytes)
    rows = f"{phase.num_rows[which]:>7g} rows {size:>10}"
    return f"{phase.name:<4} {verb}  step {phase.step[which]:>3}  {where:<25} {path:<20} {rows}"


def _wrapped(line: str) -> list[str]:
    """Lines of at most 100 columns; continuations are indented."""
    pieces = []
    while len(line) > WIDTH:
        cut = line.rfind(" ", 0, WIDTH)
        pieces.append(line[:cut])
        line = "  " + line[cut + 1 :]
    return [*pieces, line]


def _bytes(size: float) -> str:
    for unit in ("B", "KiB", "MiB", "GiB", "TiB"):
        if size < 1024 or unit == "TiB":
            break
        size /= 1024
    return f"{size:.1f} {unit}" if unit != "B" else f"{size:g} B"


def _many(count: int, noun: str) -> str:
    return f"{count} {noun}" if count == 1 else f"{count} {noun}s"
