"""What an emulated cluster looks like: nodes, NICs, switch groups, and how fast each link is.

Letters: N nodes, K NICs per node, P ranks.
"""

from dataclasses import dataclass
from typing import Literal

from piper_kernels.config import check_choice
from piper_kernels.dist.links import Fabric, Link, Links
from piper_kernels.dist.topology import Node, Topology
from piper_kernels.dist.topology_presets import one_box
from piper_kernels.errors import require

Engine = Literal["bridge", "tun"]
MOST_NODES = 64
MOST_NICS = 8


@dataclass(frozen=True, kw_only=True, slots=True)
class LinkShape:
    """One link, the same in both directions.

    Attributes:
        rate_bytes_per_s: of everything on the wire, headers too.
        delay_s: from the first byte sent to the first byte received; engine ``tun`` only.
        gap_s: what each packet that carries data costs the link apart from its bytes, so that a NIC
            sends ``1 / gap_s`` messages a second at most; engine ``tun`` only.
    """

    rate_bytes_per_s: float
    delay_s: float = 0.0
    gap_s: float = 0.0

    def __post_init__(self) -> None:
        rate = self.rate_bytes_per_s
        require(rate >= 1e4, "LinkShape", "rate_bytes_per_s", "be at least 1e4", rate)
        for field in ("delay_s", "gap_s"):
            value = getattr(self, field)
            fits = 0 <= value <= 1
            require(fits, "LinkShape", field, "be in 0 .. 1 s", value, "Give seconds.")


@dataclass(frozen=True, kw_only=True, slots=True)
class ClusterShape:
    """An emulated cluster.

    Attributes:
        ranks_per_node: ranks on each node; sizes may differ.
        nic: of every node.
        nics_per_node: K.
        local_rank_to_nic: NIC of each local rank; empty spreads the ranks over the NICs in blocks.
        node_to_group: switch group of each node; empty is one group.
        uplink: between each group and the others; given exactly if there are 2 groups or more.
        engine: ``bridge`` (kernel speed, rates only) or ``tun`` (a switch in user space: also
            delay, gap, and exact bytes between each pair of nodes; it needs CPU time of its own).

    Raises:
        ConfigError: sizes that do not fit together, or what the engine cannot do.

    Example:
        >>> shape = ClusterShape(
        ...     ranks_per_node=(2, 2), nics_per_node=2, nic=LinkShape(rate_bytes_per_s=1e7))
        >>> shape.num_ranks, shape.nic_of(1), shape.node_of(3)
        (4, 1, 1)
    """

    ranks_per_node: tuple[int, ...]
    nic: LinkShape
    nics_per_node: int = 1
    local_rank_to_nic: tuple[int, ...] = ()
    node_to_group: tuple[int, ...] = ()
    uplink: LinkShape | None = None
    engine: Engine = "bridge"

    def __post_init__(self) -> None:
        name, sizes = "ClusterShape", self.ranks_per_node
        check_choice(name, "engine", self.engine, Engine)
        fits = 1 <= len(sizes) <= MOST_NODES and min(sizes) >= 1
        requirement = f"give 1 .. {MOST_NODES} nodes a rank at least"
        require(fits, name, "ranks_per_node", requirement, sizes)
        num_nics = self.nics_per_node
        fits = 1 <= num_nics <= MOST_NICS
        require(fits, name, "nics_per_node", f"be in 1 .. {MOST_NICS}", num_nics)
        nics = self.local_rank_to_nic
        requirement = f"name one of the NICs 0 .. {num_nics - 1} for each of {max(sizes)} ranks"
        fits = not nics or (len(nics) == max(sizes) and set(nics) <= set(range(num_nics)))
        require(fits, name, "local_rank_to_nic", requirement, nics)
        groups = self.node_to_group
        fits = not groups or (
            len(groups) == len(sizes) and set(groups) == set(range(max(groups) + 1))
        )
        requirement = f"name one of the groups 0, 1, ... for each of {len(sizes)} nodes"
        require(fits, name, "node_to_group", requirement, groups)
        fits = (self.uplink is not None) == (self.num_groups > 1)
        requirement = "be given exactly if there are several groups"
        require(fits, name, "uplink", requirement, self.uplink)
        for field in ("nic", "uplink"):
            link = getattr(self, field)
            is_plain = link is None or not (link.delay_s or link.gap_s)
            fits = is_plain or self.engine == "tun"
            requirement = "have neither delay nor gap on a bridge"
            require(fits, name, field, requirement, link, "Choose engine='tun'.")

    @property
    def num_nodes(self) -> int:
        """N."""
        return len(self.ranks_per_node)

    @property
    def num_ranks(self) -> int:
        """P."""
        return sum(self.ranks_per_node)

    @property
    def num_groups(self) -> int:
        """Switch groups."""
        return max(self.node_to_group, default=0) + 1

    def group_of(self, node: int) -> int:
        """Switch group of a node."""
        return self.node_to_group[node] if self.node_to_group else 0

    def node_of(self, rank: int) -> int:
        """Node of a rank; ranks are numbered node after node."""
        return next(n for n in range(self.num_nodes) if rank < sum(self.ranks_per_node[: n + 1]))

    def local_rank_of(self, rank: int) -> int:
        """Position of a rank on its node."""
        return rank - sum(self.ranks_per_node[: self.node_of(rank)])

    def nic_of(self, local_rank: int) -> int:
        """NIC of a local rank."""
        if self.local_rank_to_nic:
            return self.local_rank_to_nic[local_rank]
        return local_rank * self.nics_per_node // max(self.ranks_per_node)

    def topology(self, links: Links | None = None) -> Topology:
        """The cluster as the planner sees it.

        Args:
            links: measured speeds; ``None`` takes the shape's own for the NICs, and those of
                :func:`one_box` inside a node.
        """
        nic = Link(
            latency_s=self.nic.delay_s,
            bandwidth_bytes_per_s=self.nic.rate_bytes_per_s,
            message_gap_s=self.nic.gap_s,
        )
        far, fabric = None, None
        if self.uplink is not None:
            far = nic.replace(latency_s=self.nic.delay_s + self.uplink.delay_s)
            fabric = Fabric(kind="fat_tree", uplink_bytes_per_s=float(self.uplink.rate_bytes_per_s))
        own = Links(node=one_box(1).links.node, group=nic, far=far)
        nodes, first = [], 0
        for number, size in enumerate(self.ranks_per_node):
            nodes.append(
                Node(
                    host=f"node{number}",
                    group=f"group{self.group_of(number)}",
                    ranks=tuple(range(first, first + size)),
                    nics=tuple(self.nic_of(local) for local in range(size)),
                )
            )
            first += size
        return Topology(
            name=f"emulated cluster, {self.engine}",
            source="rates that were asked for" if links is None else "measured",
            links=own if links is None else links,
            fabric=fabric,
            nodes=tuple(nodes),
        )


def address_of(node: int, nic: int) -> str:
    """IPv4 address of a NIC. Node first: gloo decides by it which end of a pair dials.

    Example:
        >>> address_of(1, 0)
        '10.65.0.1'
    """
    return f"10.{64 + node}.{nic}.1"
