"""The process that holds an emulated cluster: it builds the network, carries packets, counts.

All namespaces and devices belong to this process alone and have no names outside, so they end with
it. It ends when told to, or when the process that asked for the cluster is gone.
"""

import multiprocessing
import os
import select
import signal
import traceback
from dataclasses import dataclass
from multiprocessing.connection import Connection

from piper_kernels.testing.cluster.bridge_engine import BridgeEngine
from piper_kernels.testing.cluster.node_network import ClusterError
from piper_kernels.testing.cluster.shape import ClusterShape
from piper_kernels.testing.cluster.tun_engine import TunEngine


@dataclass(frozen=True, kw_only=True, slots=True)
class Ready:
    """What the host says when the network stands.

    Attributes:
        namespaces: path of each node's namespace.
    """

    namespaces: tuple[str, ...]


@dataclass(frozen=True, kw_only=True, slots=True)
class Failed:
    """What the host says when it cannot go on.

    Attributes:
        reason: one line, or a traceback where we are at fault.
    """

    reason: str


def run_host(shape: ClusterShape, client: Connection) -> None:
    """Entry point of the process."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    try:
        engine = BridgeEngine(shape) if shape.engine == "bridge" else TunEngine(shape)
        paths = tuple(f"/proc/{os.getpid()}/fd/{fd}" for fd in engine.node_descriptors)
        client.send(Ready(namespaces=paths))
        _serve(engine, client)
    except (ClusterError, OSError) as error:
        client.send(Failed(reason=str(error)))
    except Exception:
        client.send(Failed(reason=traceback.format_exc()))


def _serve(engine: BridgeEngine | TunEngine, client: Connection) -> None:
    """Work until the client has had enough, or is gone."""
    parent = multiprocessing.parent_process()
    assert parent is not None, "a host is always started by multiprocessing"
    request, gone = client.fileno(), parent.sentinel
    assert isinstance(gone, int)
    called: list[int] = []

    def wait_s(timeout_s: float | None, descriptors: list[int]) -> list[int]:
        ready, _, _ = select.select([*descriptors, request, gone], [], [], timeout_s)
        called[:] = [fd for fd in ready if fd in (request, gone)]
        return [fd for fd in ready if fd not in (request, gone)]

    while gone not in called:
        engine.serve(wait_s)
        if request in called:
            try:
                word = client.recv()
            except EOFError:
                return
            if word == "close":
                return
            client.send(engine.counters())
