"""Addresses, routes and settings inside one node's namespace, and running the tools of iproute2.

Every function acts on the namespace that the calling thread is in.
"""

import json
import subprocess
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

from piper_kernels.errors import PiperError
from piper_kernels.testing.cluster.shape import ClusterShape, address_of

# Written below /proc/sys/net; a kernel that lacks one goes without it.
_SETTINGS = {
    # policy routing sends by a NIC that is not the shortest way back
    "ipv4/conf/all/rp_filter": "0",
    "ipv4/conf/default/rp_filter": "0",
    # each NIC answers for its own address only, though all hang on one bridge
    "ipv4/conf/all/arp_ignore": "1",
    "ipv4/conf/all/arp_announce": "2",
    "ipv6/conf/all/disable_ipv6": "1",
    "ipv6/conf/default/disable_ipv6": "1",
    # one transfer must not be slower than the next for TCP's own reasons
    "ipv4/tcp_congestion_control": "reno",
    "ipv4/tcp_slow_start_after_idle": "0",
    "ipv4/tcp_no_metrics_save": "1",
    "ipv4/tcp_rmem": "4096 4194304 33554432",
    "ipv4/tcp_wmem": "4096 1048576 4194304",
}
# packets of a new connection that may be under way at once
_FIRST_WINDOW = 64


class ClusterError(PiperError, RuntimeError):
    """The emulated network could not be built, or does not do what was asked of it."""


def run_tool(*words: str) -> str:
    """Run ``ip`` or ``tc`` and return what it prints.

    Raises:
        ClusterError: it failed; the message holds the command and what it said.
    """
    done = subprocess.run(words, capture_output=True, text=True, check=False)
    if done.returncode:
        said = done.stderr.strip() or done.stdout.strip()
        raise ClusterError(f"emulated_cluster: `{' '.join(words)}` failed: {said}")
    return done.stdout


def run_ip(lines: Sequence[str]) -> None:
    """Run several ``ip`` commands at once; all or an error."""
    done = subprocess.run(
        ["ip", "-batch", "-"], input="\n".join(lines), capture_output=True, text=True, check=False
    )
    if done.returncode:
        raise ClusterError(f"emulated_cluster: `ip` failed: {done.stderr.strip()}")


def set_up_namespace() -> None:
    """Settings of a new namespace, and its loopback."""
    for name, value in _SETTINGS.items():
        with suppress(OSError):
            Path("/proc/sys/net", name).write_text(value)
    run_ip(["link set lo up"])


def set_up_node(shape: ClusterShape, node: int) -> None:
    """Addresses and routes of a node whose NICs ``eth0``, ``eth1``, ... exist.

    What comes from a NIC's address leaves by that NIC; what goes to the address of NIC k elsewhere
    leaves by NIC k, too. So both ends of a connection use NICs of one number: that of the rank
    which was dialled.
    """
    lines = []
    for nic in range(shape.nics_per_node):
        own, device = address_of(node, nic), f"eth{nic}"
        lines += [f"addr add {own}/32 dev {device}", f"link set {device} up"]
        # the rule is looked at before the main table, and after the one of local addresses
        lines += [
            f"rule add from {own} lookup {100 + nic} priority 100",
            f"route add default dev {device} src {own} initcwnd {_FIRST_WINDOW} "
            f"initrwnd {_FIRST_WINDOW} table {100 + nic}",
        ]
        lines += [
            f"route add {address_of(other, nic)}/32 dev {device} src {own} "
            f"initcwnd {_FIRST_WINDOW} initrwnd {_FIRST_WINDOW}"
            for other in range(shape.num_nodes)
            if other != node
        ]
    run_ip(lines)


def shaper_of(device: str) -> dict[str, Any]:
    """The queue of a device as ``tc`` reports it, statistics included."""
    queues = json.loads(run_tool("tc", "-s", "-j", "qdisc", "show", "dev", device))
    roots = [queue for queue in queues if queue.get("root")]
    return dict(roots[0]) if roots else {}
