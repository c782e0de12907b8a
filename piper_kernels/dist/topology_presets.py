"""Topologies of known machines, to plan with before there is a probe of the machine at hand.

Bandwidths come from data sheets, so they are peaks. Latencies and gaps that no source gives are
assumptions, and each topology's ``source`` says so: `piper probe` replaces them.
"""

from collections.abc import Callable

from piper_kernels.dist.links import Fabric, Link, Links
from piper_kernels.dist.topology import Node, Topology
from piper_kernels.errors import ConfigError, did_you_mean, instruction, require

FRONTIER_SOURCE = (
    "OLCF user guide: 8 GCDs and 4 NICs of 25 GB/s per node, 2 GCDs per NIC, at least 50 GB/s "
    "inside. Dragonfly of 74 groups of 128 nodes, 7.3 TB/s between groups; share of detours "
    "chosen so that a full-machine all-to-all gives the known 30 GB/s per node. ASSUMED: 10 us "
    "latency, and 10 us per message and GCD (so 5 us at a NIC, which serves two)."
)
DGX_H100_SOURCE = (
    "DGX H100 data sheet: 450 GB/s NVLink per GPU and direction, 8 NICs of 50 GB/s, groups of 32 "
    "nodes, fat tree without oversubscription. ASSUMED: 20 us latency on every level, no gap."
)
ONE_BOX_SOURCE = (
    "Measured with gloo batch_isend_irecv on a 2-core machine, torch 2.13: 0.23 ms for 64 B "
    "and 0.96 ms for 1 MiB between 2 ranks; 0.8 ms for each further message at 4 to 8 ranks."
)


def _spread(num_nodes: int, nodes_per_group: int) -> list[str]:
    """Group names of nodes that fill one group after the other."""
    return [f"group{n // nodes_per_group}" for n in range(num_nodes)]


def frontier(num_nodes: int, *, nodes_per_group: int = 128) -> Topology:
    """Frontier at Oak Ridge: MI250X nodes on a Slingshot dragonfly.

    Args:
        num_nodes: of the job.
        nodes_per_group: of the job in one dragonfly group; 128 is a whole group, less is a job
            that is scattered over the machine.

    Raises:
        ConfigError: more nodes than 74 such groups hold, or fewer than 1.

    Example:
        >>> frontier(2).level_of(0, 8), frontier(2).maps.rank_to_nic[:8].tolist()
        ('group', [0, 0, 1, 1, 2, 2, 3, 3])
    """
    _check_nodes("frontier", num_nodes)
    fits = 1 <= nodes_per_group <= 128
    require(fits, "frontier", "nodes_per_group", "be in 1 .. 128", nodes_per_group)
    most = 74 * nodes_per_group
    require(num_nodes <= most, "frontier", "num_nodes", f"be at most {most}", num_nodes)
    nic = Link(latency_s=10e-6, bandwidth_bytes_per_s=25e9, message_gap_s=5e-6)
    gpu = Link(latency_s=10e-6, bandwidth_bytes_per_s=50e9, message_gap_s=10e-6)
    one = Topology(
        name="frontier",
        source=FRONTIER_SOURCE,
        links=Links(node=gpu, group=nic, far=nic),
        # (7.3 TB/s / 128 nodes) / 30 GB/s = 1.9 links crossed by a far byte
        fabric=Fabric(
            kind="dragonfly", uplink_bytes_per_s=7.3e12, num_groups=74, non_minimal_share=0.9
        ),
        nodes=(_node(8, nics=(0, 0, 1, 1, 2, 2, 3, 3)),),
    )
    return one.lay_out([8] * num_nodes, groups=_spread(num_nodes, nodes_per_group))


def dgx_h100_like(num_nodes: int) -> Topology:
    """Nodes of eight H100s with a NIC each, in groups of 32 nodes on a full fat tree.

    Raises:
        ConfigError: ``num_nodes`` is below 1.
    """
    _check_nodes("dgx_h100_like", num_nodes)
    nic = Link(latency_s=20e-6, bandwidth_bytes_per_s=50e9)
    gpu = Link(latency_s=20e-6, bandwidth_bytes_per_s=450e9)
    one = Topology(
        name="dgx_h100_like",
        source=DGX_H100_SOURCE,
        links=Links(node=gpu, group=nic, far=nic),
        fabric=Fabric(kind="fat_tree", uplink_bytes_per_s=32 * 8 * 50e9),
        nodes=(_node(8, nics=tuple(range(8))),),
    )
    return one.lay_out([8] * num_nodes, groups=_spread(num_nodes, 32))


def one_box(num_ranks: int) -> Topology:
    """All ranks on one machine that talk through its memory, as gloo does without a network.

    Raises:
        ConfigError: ``num_ranks`` is below 1.
    """
    _check_nodes("one_box", num_ranks, argument="num_ranks")
    box = Link(latency_s=0.23e-3, bandwidth_bytes_per_s=2**20 / 0.73e-3, message_gap_s=0.8e-3)
    return Topology(
        name="one_box",
        source=ONE_BOX_SOURCE,
        links=Links(node=box),
        nodes=(_node(num_ranks, nics=(0,) * num_ranks),),
    )


PRESETS: dict[str, Callable[[int], Topology]] = {
    "frontier": frontier,
    "dgx_h100_like": dgx_h100_like,
    "one_box": one_box,
}


def preset(name: str, size: int) -> Topology:
    """A preset by name; ``size`` is its number of nodes (of ranks for ``one_box``).

    Raises:
        ConfigError: the name is unknown (the nearest is suggested), or the size impossible.
    """
    if name not in PRESETS:
        requirement = f"be one of {', '.join(PRESETS)}"
        sentence = instruction("preset", "name", requirement, name, did_you_mean(name, PRESETS))
        raise ConfigError(sentence)
    return PRESETS[name](size)


def _node(num_ranks: int, *, nics: tuple[int, ...]) -> Node:
    return Node(host="node0", group="group0", ranks=tuple(range(num_ranks)), nics=nics)


def _check_nodes(function: str, count: int, argument: str = "num_nodes") -> None:
    require(count >= 1, function, argument, "be at least 1", count)
