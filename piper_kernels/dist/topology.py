"""Topology: which rank sits on which node, NIC and switch group, and how fast each level is.

A *level* is how far two ranks are apart: ``self``, ``node`` (one machine), ``group`` (one switch
group or rack) or ``far``. A *rail* is the set of ranks with one local rank, one a node: a message
along a rail leaves by the sender's own NIC and arrives at the receiver's own NIC.

Pure: no torch, no process group. Letters: P ranks, N nodes.
"""

import collections
import functools
import itertools
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Self

import numpy as np
from numpy.typing import ArrayLike, NDArray

from piper_kernels.dist.links import LEVELS, Fabric, Level, Link, Links
from piper_kernels.errors import ConfigError, instruction, require
from piper_kernels.strict_model import NonNegativeInt, StrictModel

IntArray = NDArray[np.int64]


class Node(StrictModel):
    """One machine of the job.

    Attributes:
        host: its name.
        group: name of its switch group or rack.
        ranks: ranks on it; the position in this list is the local rank.
        nics: for each of ``ranks``, which of the node's NICs (from 0) is nearest to its GPU.
    """

    host: str
    group: str
    ranks: tuple[NonNegativeInt, ...]
    nics: tuple[NonNegativeInt, ...]

    def model_post_init(self, _: Any) -> None:
        """Check that there are ranks, and a NIC for each."""
        require(bool(self.ranks), "Node", "ranks", "name a rank at least", self.ranks)
        requirement = f"have one entry for each of the {len(self.ranks)} ranks"
        fits = len(self.nics) == len(self.ranks)
        require(fits, "Node", "nics", requirement, self.nics, "Give each rank its nearest NIC.")


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class RankMaps:
    """A topology's index arrays, all int64.

    Attributes:
        rank_to_node: ``[P]`` index into ``Topology.nodes``.
        rank_to_local: ``[P]`` position in the node's list of ranks.
        rank_to_nic: ``[P]`` NIC, counted over all nodes.
        rank_to_group: ``[P]`` index into ``Topology.group_names``.
        node_to_group: ``[N]``.
        node_sizes: ``[N]`` ranks on each node.
        nic_to_node: ``[num_nics]``.
        ranks_by_node: ``[P]`` ranks, node after node, by local rank.
        node_offsets: ``[N + 1]`` exclusive: node n owns
            ``ranks_by_node[node_offsets[n]:node_offsets[n + 1]]``.
    """

    rank_to_node: IntArray
    rank_to_local: IntArray
    rank_to_nic: IntArray
    rank_to_group: IntArray
    node_to_group: IntArray
    node_sizes: IntArray
    nic_to_node: IntArray
    ranks_by_node: IntArray
    node_offsets: IntArray


class Topology(StrictModel):
    """The network as one job sees it, and the schema of the topology file.

    Attributes:
        name: of the machine.
        source: where the numbers come from: a probe, a data sheet, an assumption.
        links: speed of each level.
        fabric: what switch groups share; ``None``: nothing but the NICs limits far traffic.
        nodes: the machines; their ranks together are 0 .. P-1, each once.
    """

    name: str
    source: str
    links: Links
    fabric: Fabric | None = None
    nodes: tuple[Node, ...]

    def model_post_init(self, _: Any) -> None:
        """Check ranks, hosts, and that every level that occurs has a speed."""
        ranks = sorted(rank for node in self.nodes for rank in node.ranks)
        missing = sorted(set(range(len(ranks))) - set(ranks))
        twice = sorted({a for a, b in itertools.pairwise(ranks) if a == b})
        name = "Topology"
        require(bool(ranks), name, "nodes", "name a node at least", self.nodes)
        requirement = f"place each of the ranks 0 .. {len(ranks) - 1} once"
        problem = f"{len(ranks)} ranks, missing {missing}, twice {twice}"
        require(not missing and not twice, name, "nodes", requirement, problem)
        times = collections.Counter(node.host for node in self.nodes)
        repeated = sorted(host for host, count in times.items() if count > 1)
        remedy = "List all ranks of a host in one node."
        require(not repeated, name, "nodes", "name each host once", repeated, remedy)
        remedy = "Give the speed between nodes (links.group) and between groups (links.far)."
        fits = len(self.nodes) == 1 or self.links.group is not None
        require(fits, name, "links.group", "be given for 2 or more nodes", None, remedy)
        num_groups = len(self.group_names)
        fits = num_groups == 1 or self.links.far is not None
        require(fits, name, "links.far", "be given for 2 or more groups", None, remedy)
        most = self.fabric.num_groups if self.fabric is not None else None
        requirement = f"lie in at most fabric.num_groups = {most} groups"
        require(most is None or num_groups <= most, name, "nodes", requirement, num_groups)

    @property
    def num_ranks(self) -> int:
        """P."""
        return len(self.maps.rank_to_node)

    @property
    def num_nodes(self) -> int:
        """N."""
        return len(self.nodes)

    @property
    def num_groups(self) -> int:
        """Switch groups that the job touches."""
        return len(self.group_names)

    @functools.cached_property
    def group_names(self) -> tuple[str, ...]:
        """Names of the groups in the order in which the nodes name them first."""
        return tuple(dict.fromkeys(node.group for node in self.nodes))

    @functools.cached_property
    def maps(self) -> RankMaps:
        """The index arrays, built once."""
        sizes = np.array([len(node.ranks) for node in self.nodes])
        ranks_by_node = np.concatenate([np.array(node.ranks) for node in self.nodes])
        node_offsets = np.concatenate([[0], np.cumsum(sizes)])
        nodes = np.repeat(np.arange(len(sizes)), sizes)
        num_nics = np.array([max(node.nics) + 1 for node in self.nodes])
        first_nic = np.cumsum(num_nics) - num_nics
        nics = np.concatenate([np.array(node.nics) for node in self.nodes]) + first_nic[nodes]
        groups = {name: index for index, name in enumerate(self.group_names)}
        node_to_group = np.array([groups[node.group] for node in self.nodes])
        # from node order to rank order
        where = np.argsort(ranks_by_node)
        return RankMaps(
            rank_to_node=nodes[where],
            rank_to_local=where - node_offsets[nodes[where]],
            rank_to_nic=nics[where],
            rank_to_group=node_to_group[nodes[where]],
            node_to_group=node_to_group,
            node_sizes=sizes,
            nic_to_node=np.repeat(np.arange(len(sizes)), num_nics),
            ranks_by_node=ranks_by_node,
            node_offsets=node_offsets,
        )

    @property
    def rails(self) -> tuple[tuple[int, ...], ...]:
        """For each local rank, the ranks that have it, node after node; a small node has none."""
        width = int(self.maps.node_sizes.max())
        return tuple(
            tuple(node.ranks[local] for node in self.nodes if local < len(node.ranks))
            for local in range(width)
        )

    def group_nodes(self, group: str) -> tuple[int, ...]:
        """Indices of the nodes in a switch group."""
        known = self.group_names
        require(group in known, "Topology.group_nodes", "group", f"be one of {known}", group)
        return tuple(index for index, node in enumerate(self.nodes) if node.group == group)

    def level_of(self, a: int, b: int) -> Level:
        """How far ranks ``a`` and ``b`` are apart.

        Raises:
            ConfigError: a rank is not in the topology.
        """
        for name, rank in (("a", a), ("b", b)):
            fits = 0 <= rank < self.num_ranks
            require(fits, "Topology.level_of", name, f"be in 0 .. {self.num_ranks - 1}", rank)
        return LEVELS[int(self.distances(a, b))]

    def distances(self, a: ArrayLike, b: ArrayLike) -> IntArray:
        """Index into :data:`LEVELS` for pairs of ranks, elementwise with broadcasting."""
        a, b, maps = np.asarray(a), np.asarray(b), self.maps
        other_group = maps.rank_to_group[a] != maps.rank_to_group[b]
        other_node = maps.rank_to_node[a] != maps.rank_to_node[b]
        return np.where(other_node, 2 + other_group, (a != b).astype(np.int64))

    def link(self, level: Level) -> Link:
        """The speed of a level other than ``self``.

        Raises:
            ConfigError: the topology does not give it.
        """
        link: Link | None = getattr(self.links, level, None)
        if link is None:
            requirement = "be a level whose speed is given"
            sentence = instruction(
                "Topology.link", "level", requirement, level, f"Add links.{level}."
            )
            raise ConfigError(sentence)
        return link

    def select(self, ranks: Sequence[int]) -> Self:
        """The topology of a sub-group, or of another rank order: new rank i is old ``ranks[i]``.

        Raises:
            ConfigError: a rank is unknown or named twice.
        """
        new_of = {old: new for new, old in enumerate(ranks)}
        name = "Topology.select"
        require(len(new_of) == len(ranks), name, "ranks", "name no rank twice", list(ranks))
        unknown = sorted(set(new_of) - set(range(self.num_ranks)))
        require(not unknown, name, "ranks", f"be below {self.num_ranks} ranks", unknown)
        kept = []
        for node in self.nodes:
            both = zip(node.ranks, node.nics, strict=True)
            pairs = [(new_of[rank], nic) for rank, nic in both if rank in new_of]
            if pairs:
                mine, nics = zip(*pairs, strict=True)
                kept.append(node.replace(ranks=mine, nics=nics))
        return self.replace(nodes=tuple(kept))

    def lay_out(
        self,
        ranks_per_node: Sequence[int],
        *,
        hosts: Sequence[str] | None = None,
        groups: Sequence[str] | None = None,
    ) -> Self:
        """The same machine with other nodes, ranks numbered node after node.

        NICs follow the first node of this topology: local rank l of a new node gets the NIC of
        local rank l there.

        Args:
            ranks_per_node: ranks on each node; sizes may differ.
            hosts: names, default ``node0``, ``node1``, ...
            groups: name of each node's switch group, default all in one.

        Raises:
            ConfigError: lists of different lengths, or a node larger than the first one here.

        Example:
            >>> from piper_kernels.dist.topology_presets import frontier
            >>> ragged = frontier(1).lay_out((3, 2, 2))
            >>> ragged.num_ranks, ragged.rails
            (7, ((0, 3, 5), (1, 4, 6), (2,)))
        """
        name, count = "Topology.lay_out", len(ranks_per_node)
        hosts = [f"node{n}" for n in range(count)] if hosts is None else hosts
        groups = [self.nodes[0].group] * count if groups is None else groups
        for argument, given in (("hosts", hosts), ("groups", groups)):
            require(len(given) == count, name, argument, f"name {count} nodes", len(given))
        nics, first, nodes = self.nodes[0].nics, 0, []
        for host, group, size in zip(hosts, groups, ranks_per_node, strict=True):
            fits = 1 <= size <= len(nics)
            remedy = "Describe a larger first node: it says which NIC each local rank uses."
            requirement = f"be in 1 .. {len(nics)}, the ranks of {self.nodes[0].host}"
            require(fits, name, "ranks_per_node", requirement, size, remedy)
            ranks = tuple(range(first, first + size))
            nodes.append(Node(host=host, group=group, ranks=ranks, nics=nics[:size]))
            first += size
        return self.replace(nodes=tuple(nodes))
