"""Network namespaces by system call: make one, enter one, say why that is not possible here.

A namespace lives as long as a process or an open file refers to it. The ones made here have no name
in the file system, so whatever happens to their makers, the kernel leaves nothing behind.
"""

import ctypes
import os
import shutil
import socket
import subprocess
import sys
from pathlib import Path

CLONE_NEWUTS = 0x04000000
CLONE_NEWNET = 0x40000000
# what a cluster needs: a namespace, and to change its settings
_TRY = f"""
import ctypes
assert not ctypes.CDLL(None).unshare({CLONE_NEWNET}), "unshare was refused"
open("/proc/sys/net/ipv4/conf/all/rp_filter", "w").write("0")
"""
OWN_NETWORK = Path("/proc/self/ns/net")


def make_network() -> int:
    """Move this thread into a new network namespace and return an open file that keeps it alive.

    Raises:
        OSError: the system refuses.
    """
    _call("unshare", CLONE_NEWNET)
    return os.open(OWN_NETWORK, os.O_RDONLY | os.O_CLOEXEC)


def enter_network(descriptor: int) -> None:
    """Move this thread into the namespace of an open file; threads that it starts follow.

    Raises:
        OSError: the system refuses, or the file is no network namespace.
    """
    _call("setns", descriptor, CLONE_NEWNET)


def enter_network_at(path: str) -> None:
    """Like :func:`enter_network`, by path: ``/proc/PID/fd/N`` or ``/run/netns/NAME``."""
    descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    try:
        enter_network(descriptor)
    finally:
        os.close(descriptor)


def take_host_name(name: str) -> None:
    """Give this thread, and what it starts, a host name of their own.

    Raises:
        OSError: the system refuses.
    """
    _call("unshare", CLONE_NEWUTS)
    socket.sethostname(name)


def why_no_namespaces() -> str:
    """Why this process cannot make network namespaces and shape them; empty if it can."""
    if sys.platform != "linux":
        return "network namespaces exist on Linux only"
    missing = [tool for tool in ("ip", "tc") if shutil.which(tool) is None]
    if missing:
        return f"{' and '.join(missing)} not found: install iproute2"
    if not os.access("/dev/net/tun", os.R_OK | os.W_OK):
        return "/dev/net/tun is not there or may not be opened"
    # in a process of its own: one that has moved could not always come back
    tried = subprocess.run(
        [sys.executable, "-I", "-S", "-c", _TRY], capture_output=True, check=False
    )
    if tried.returncode:
        said = tried.stderr.decode(errors="replace").strip().rpartition("\n")[2]
        return f"this process may not make network namespaces, run as root: {said}"
    return ""


def _call(name: str, *arguments: int) -> None:
    libc = ctypes.CDLL(None, use_errno=True)
    if getattr(libc, name)(*arguments):
        number = ctypes.get_errno()
        raise OSError(number, f"{name}: {os.strerror(number)}")
