"""Engine ``bridge``: a kernel bridge in a namespace of its own, and veth pairs shaped by tbf.

Each NIC is a veth pair whose two ends are shaped, so both directions have the rate. A switch group
is a bridge; the groups hang on a core bridge by shaped pairs.
"""

import os
from collections.abc import Callable

import numpy as np

from piper_kernels.testing.cluster.counters import Counters
from piper_kernels.testing.cluster.node_network import (
    ClusterError,
    run_ip,
    run_tool,
    set_up_namespace,
    set_up_node,
    shaper_of,
)
from piper_kernels.testing.cluster.shape import ClusterShape, LinkShape
from piper_kernels.testing.namespaces import enter_network, make_network

# A shaper may send this many seconds' worth at once after a pause. Less costs kernel time, more
# lets short transfers through unshaped.
_BURST_S = 0.002
_LEAST_BURST_BYTES = 16_384
# What a shaper may queue before it drops.
_QUEUE_BYTES = 32 << 20


class BridgeEngine:
    """Built by the constructor; gone when the process ends."""

    def __init__(self, shape: ClusterShape) -> None:
        self.shape = shape
        self.switch = make_network()
        set_up_namespace()
        self.node_descriptors = []
        for _ in range(shape.num_nodes):
            self.node_descriptors.append(make_network())
            set_up_namespace()
        enter_network(self.switch)
        self._build_bridges()
        for node, descriptor in enumerate(self.node_descriptors):
            self._plug_in(node, descriptor)

    def counters(self) -> Counters:
        """Read the shapers' own counts."""
        shape = self.shape
        size = (shape.num_nodes, shape.nics_per_node)
        out, into = np.zeros(size, dtype=np.int64), np.zeros(size, dtype=np.int64)
        for node, nic in np.ndindex(size):
            out[node, nic] = self._bytes_of(self.node_descriptors[node], f"eth{nic}")
            into[node, nic] = self._bytes_of(self.switch, f"n{node}k{nic}")
        groups = range(shape.num_groups) if shape.num_groups > 1 else ()
        uplinks = [self._bytes_of(self.switch, f"up{group}") for group in groups]
        return Counters(
            nic_out_bytes=out,
            nic_in_bytes=into,
            uplink_out_bytes=np.array(uplinks, dtype=np.int64) if uplinks else None,
        )

    def serve(self, wait_s: Callable[[float | None, list[int]], list[int]]) -> None:
        """The kernel does the work: wait for requests."""
        wait_s(None, [])

    def _build_bridges(self) -> None:
        shape, lines = self.shape, []
        names = [f"br{group}" for group in range(shape.num_groups)]
        if shape.num_groups > 1:
            names.append("core")
        for name in names:
            lines += [f"link add {name} type bridge mcast_snooping 0", f"link set {name} up"]
        uplink = shape.uplink
        for group in range(shape.num_groups) if uplink is not None else ():
            lines += [
                f"link add up{group} type veth peer name down{group}",
                f"link set up{group} master br{group} up",
                f"link set down{group} master core up",
            ]
        run_ip(lines)
        for group in range(shape.num_groups) if uplink is not None else ():
            assert uplink is not None
            _shape_device(f"up{group}", uplink)
            _shape_device(f"down{group}", uplink)

    def _plug_in(self, node: int, descriptor: int) -> None:
        """Give a node its NICs."""
        shape, path = self.shape, f"/proc/{os.getpid()}/fd/{descriptor}"
        bridge, lines = f"br{shape.group_of(node)}", []
        for nic in range(shape.nics_per_node):
            port = f"n{node}k{nic}"
            lines += [
                f"link add {port} type veth peer name eth{nic} netns {path}",
                f"link set {port} master {bridge} up",
            ]
        run_ip(lines)
        for nic in range(shape.nics_per_node):
            _shape_device(f"n{node}k{nic}", shape.nic)
        enter_network(descriptor)
        set_up_node(shape, node)
        for nic in range(shape.nics_per_node):
            _shape_device(f"eth{nic}", shape.nic)
        enter_network(self.switch)

    def _bytes_of(self, descriptor: int, device: str) -> int:
        enter_network(descriptor)
        queue = shaper_of(device)
        enter_network(self.switch)
        return int(queue["bytes"])


def _shape_device(device: str, link: LinkShape) -> None:
    """Limit what a device sends, and make sure that the kernel has understood."""
    rate = round(link.rate_bytes_per_s)
    burst = max(_LEAST_BURST_BYTES, round(rate * _BURST_S))
    words = f"tc qdisc replace dev {device} root tbf rate {rate * 8}bit burst {burst}"
    run_tool(*words.split(), "limit", str(_QUEUE_BYTES))
    queue = shaper_of(device)
    has = queue.get("options", {}).get("rate")
    if queue.get("kind") != "tbf" or has is None or abs(has - rate) > 0.01 * rate:
        raise ClusterError(
            f"emulated_cluster: {device} must be shaped to {rate} bytes/s by tbf, got {queue}. "
            "Is the module sch_tbf there?"
        )
