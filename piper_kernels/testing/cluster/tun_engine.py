"""Engine ``tun``: every NIC is a TUN device, and a loop in user space is the switch.

What the kernel's shapers cannot do here: delay, a cost per packet, exact bytes between each pair of
nodes. The loop needs CPU time of its own (about 20 us per packet), and packets are as large as the
device allows (65,000 bytes), so that there are few.
"""

import ctypes
import fcntl
import os
import struct
import time
from collections.abc import Callable
from contextlib import suppress

import numpy as np

from piper_kernels.testing.cluster.counters import Counters
from piper_kernels.testing.cluster.node_network import run_ip, set_up_namespace, set_up_node
from piper_kernels.testing.cluster.packet_queue import PacketQueue, QueuedLink
from piper_kernels.testing.cluster.shape import ClusterShape, LinkShape
from piper_kernels.testing.namespaces import make_network

_MTU = 65_000
_TUNSETIFF = 0x400454CA
_IFF_TUN_NO_PI = 0x1001
_PR_SET_TIMERSLACK = 29
# Packets wait in the kernel once a link has this much to do: what is read is out of TCP's sight.
_MOST_QUEUED_S = 0.02
_TCP = 6


class TunEngine:
    """Built by the constructor; gone when the process ends."""

    def __init__(self, shape: ClusterShape) -> None:
        self.shape = shape
        self.node_descriptors: list[int] = []
        # a device's descriptor -> (node, its outgoing link)
        self._devices: dict[int, tuple[int, QueuedLink]] = {}
        size = (shape.num_nodes, shape.nics_per_node)
        self._out = [[_link(shape.nic) for _ in range(size[1])] for _ in range(size[0])]
        # the way between two NICs of a group is charged once, on arrival
        self._into = [
            [_link(shape.nic, shape.nic.delay_s) for _ in range(size[1])] for _ in range(size[0])
        ]
        self._tuns: list[list[int]] = []
        uplink, groups = shape.uplink, range(shape.num_groups)
        self._up = [_link(uplink) for _ in groups] if uplink is not None else []
        self._down = [_link(uplink, uplink.delay_s) for _ in groups] if uplink is not None else []
        self._pairs = np.zeros((3, shape.num_nodes, shape.num_nodes), dtype=np.int64)
        self._queue: PacketQueue[tuple[int, bytes]] = PacketQueue()
        for node in range(shape.num_nodes):
            self.node_descriptors.append(make_network())
            set_up_namespace()
            self._tuns.append([self._open_nic(node, nic) for nic in range(size[1])])
            set_up_node(shape, node)
        # wake up when told to, not 50 us later
        ctypes.CDLL(None).prctl(_PR_SET_TIMERSLACK, 1000, 0, 0, 0)
        with suppress(PermissionError):
            os.nice(-10)

    def counters(self) -> Counters:
        """What the switch has carried."""
        return Counters(
            nic_out_bytes=_bytes(self._out),
            nic_in_bytes=_bytes(self._into),
            node_pair_bytes=self._pairs[0].copy(),
            node_pair_payload=self._pairs[1].copy(),
            node_pair_messages=self._pairs[2].copy(),
            uplink_out_bytes=_bytes([self._up])[0] if self._up else None,
        )

    def serve(self, wait_s: Callable[[float | None, list[int]], list[int]]) -> None:
        """Carry packets until ``wait_s`` finds a request.

        Args:
            wait_s: waits so many seconds (``None``: for ever) until one of some descriptors can be
                read, and returns those that can.
        """
        now = time.monotonic()
        for descriptor, packet in self._queue.due(now):
            # a node whose ranks are gone takes no more packets
            with suppress(OSError):
                os.write(descriptor, packet)
        ready_s = now + _MOST_QUEUED_S
        open_to = [tun for tun, (_, link) in self._devices.items() if link.free_s <= ready_s]
        next_s = self._queue.next_s()
        if len(open_to) < len(self._devices):
            full = [link.free_s for _, link in self._devices.values() if link.free_s > ready_s]
            next_s = min(next_s, min(full) - _MOST_QUEUED_S)
        timeout = None if next_s == float("inf") else max(0.0, next_s - time.monotonic())
        for tun in wait_s(timeout, open_to):
            self._take(tun)

    def _open_nic(self, node: int, nic: int) -> int:
        """A TUN device in this thread's namespace."""
        tun = os.open("/dev/net/tun", os.O_RDWR | os.O_NONBLOCK | os.O_CLOEXEC)
        fcntl.ioctl(tun, _TUNSETIFF, struct.pack("16sH", f"eth{nic}".encode(), _IFF_TUN_NO_PI))
        run_ip([f"link set eth{nic} mtu {_MTU} txqueuelen 4096"])
        self._devices[tun] = node, self._out[node][nic]
        return tun

    def _take(self, tun: int) -> None:
        """Read what a node sends and put it on its way."""
        try:
            packet = os.read(tun, _MTU)
        except BlockingIOError:
            return
        src, out = self._devices[tun]
        # IPv4 only; addresses are 10.(64 + node).nic.1
        if packet[0] >> 4 != 4 or packet[16] != 10:
            return
        dst, nic = packet[17] - 64, packet[18]
        if not (0 <= dst < self.shape.num_nodes and nic < self.shape.nics_per_node):
            return
        payload = _payload_bytes(packet)
        self._pairs[:, src, dst] += (len(packet), payload, payload > 0)
        src_group, dst_group = self.shape.group_of(src), self.shape.group_of(dst)
        far = [self._up[src_group], self._down[dst_group]] if src_group != dst_group else []
        path = [out, *far, self._into[dst][nic]]
        target = self._tuns[dst][nic]
        self._queue.accept(time.monotonic(), (target, packet), len(packet), payload > 0, path)


def _link(shape: LinkShape, delay_s: float = 0.0) -> QueuedLink:
    return QueuedLink(rate_bytes_per_s=shape.rate_bytes_per_s, delay_s=delay_s, gap_s=shape.gap_s)


def _bytes(links: list[list[QueuedLink]]) -> np.ndarray:
    return np.array([[link.num_bytes for link in row] for row in links], dtype=np.int64)


def _payload_bytes(packet: bytes) -> int:
    """Bytes behind the IP and TCP headers; of other protocols all behind the IP header."""
    header = 4 * (packet[0] & 15)
    if packet[9] == _TCP:
        header += 4 * (packet[header + 12] >> 4)
    return len(packet) - header
