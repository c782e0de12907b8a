"""An emulated cluster for tests and benches: real processes on real, slow, separate networks.

Nodes are network namespaces, so ranks of one node share its addresses and loopback, and everything
between nodes crosses links whose speed was chosen. Nothing of it is visible outside, and nothing is
left when the caller ends, in whatever way.
"""

import multiprocessing
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from typing import Any

from piper_kernels.dist.links import Links
from piper_kernels.dist.topology import Topology
from piper_kernels.testing.cluster.counters import Counters
from piper_kernels.testing.cluster.host import Failed, Ready, run_host
from piper_kernels.testing.cluster.node_network import ClusterError
from piper_kernels.testing.cluster.shape import ClusterShape
from piper_kernels.testing.namespaces import why_no_namespaces
from piper_kernels.testing.rank_group import PRELOADED, RankOutcome
from piper_kernels.testing.rank_process import RankPlace
from piper_kernels.testing.ranks import rank_outcomes, run_ranks

_START_WAIT_S = 30.0
_ANSWER_WAIT_S = 10.0


class Cluster:
    """A running emulated cluster; :func:`emulated_cluster` makes one."""

    def __init__(self, shape: ClusterShape, process: Any, connection: Any) -> None:
        self.shape = shape
        self._process, self._connection = process, connection
        self._namespaces = self._answer(_START_WAIT_S, Ready).namespaces

    @property
    def pid(self) -> int:
        """Of the process that holds the network."""
        return int(self._process.pid)

    def places(self) -> list[RankPlace]:
        """Where each rank runs."""
        shape = self.shape
        places = []
        for rank in range(shape.num_ranks):
            node, local = shape.node_of(rank), shape.local_rank_of(rank)
            place = RankPlace(
                namespace=self._namespaces[node],
                host=f"node{node}",
                interface=f"eth{shape.nic_of(local)}",
                local_rank=local,
                num_local_ranks=shape.ranks_per_node[node],
            )
            places.append(place)
        return places

    def run_ranks(
        self, function: Callable[..., Any], *args: Any, timeout_s: float = 60.0
    ) -> list[Any]:
        """Call ``function(*args)`` on every rank, each in its node: as :func:`run_ranks`.

        Each rank sees ``node0``, ``node1``, ... as its host name and has its NIC's name in
        ``GLOO_SOCKET_IFNAME``.

        Raises:
            ClusterError: there are several nodes, and a node's NICs carried nothing: whatever the
                ranks did, the emulated network had no part in it.
            RankError, ConfigError: as :func:`run_ranks`.
        """
        before = self.counters()
        places = self.places()
        results = run_ranks(function, len(places), *args, timeout_s=timeout_s, places=places)
        _check_crossed(self.shape, self.counters().since(before))
        return results

    def rank_outcomes(
        self, function: Callable[..., Any], *args: Any, timeout_s: float = 60.0
    ) -> list[RankOutcome]:
        """Like :meth:`run_ranks`, but let each rank end in its own way and tell how it did."""
        places = self.places()
        return rank_outcomes(function, len(places), *args, timeout_s=timeout_s, places=places)

    def counters(self) -> Counters:
        """What the links have carried so far.

        Raises:
            ClusterError: the process that holds the network is gone.
        """
        # whether there is anybody shows in the answer
        with suppress(ConnectionError):
            self._connection.send("counters")
        return self._answer(_ANSWER_WAIT_S, Counters)

    def topology(self, links: Links | None = None) -> Topology:
        """The cluster as the planner sees it: :meth:`ClusterShape.topology`."""
        return self.shape.topology(links)

    def _answer(self, timeout_s: float, kind: type[Any]) -> Any:
        """What the host says."""
        try:
            said = self._connection.recv() if self._connection.poll(timeout_s) else None
        except (EOFError, ConnectionError):
            said = None
        if isinstance(said, kind):
            return said
        reason = said.reason if isinstance(said, Failed) else "its process does not answer"
        raise ClusterError(f"emulated_cluster: the network is not there: {reason}")


@contextmanager
def emulated_cluster(shape: ClusterShape) -> Iterator[Cluster]:
    """An emulated cluster, for as long as the context lasts.

    Raises:
        ClusterError: this process has no right to make one (see :func:`why_no_cluster`), or a tool
            failed, or a link did not get the rate that was asked for.

    Example:
        Two nodes of one rank, joined by 10 MB/s::

            shape = ClusterShape(ranks_per_node=(1, 1), nic=LinkShape(rate_bytes_per_s=10e6))
            with emulated_cluster(shape) as cluster:
                cluster.run_ranks(my_exchange)
                print(cluster.counters().nic_out_bytes)
    """
    reason = why_no_cluster()
    if reason:
        raise ClusterError(f"emulated_cluster: {reason}")
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(PRELOADED)
    here, there = context.Pipe()
    process = context.Process(target=run_host, args=(shape, there), daemon=True)
    process.start()
    there.close()
    try:
        yield Cluster(shape, process, here)
    finally:
        # closing our end tells it to end
        here.close()
        process.join(2.0)
        process.kill()
        process.join()
        process.close()


def why_no_cluster() -> str:
    """Why no cluster can be emulated here; empty if one can. A test skips with this reason."""
    return why_no_namespaces()


def _check_crossed(shape: ClusterShape, crossed: Counters) -> None:
    if shape.num_nodes == 1:
        return
    silent: Sequence[int] = [
        node for node, sent in enumerate(crossed.nic_out_bytes.sum(axis=1).tolist()) if not sent
    ]
    if silent:
        raise ClusterError(
            f"emulated_cluster: nothing has left nodes {list(silent)} by their NICs, so the ranks "
            "there talked past the emulated network. Did they set GLOO_SOCKET_IFNAME?"
        )
