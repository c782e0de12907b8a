"""Which NIC a rank sends by, as far as a rank can see.

What the user has told the communication library counts first. Without that, on a machine with GPUs,
the NIC is taken whose place in the tree of PCI devices is nearest to the GPU's.
"""

import os
from collections.abc import Mapping, Sequence
from pathlib import Path

_SYSTEM = Path("/sys")
# where drivers list NICs: InfiniBand and RoCE, Slingshot, plain Ethernet
_CLASSES = ("infiniband", "cxi", "net")
_NAMES = ("NCCL_IB_HCA", "NCCL_SOCKET_IFNAME", "GLOO_SOCKET_IFNAME")


def named_nic(environment: Mapping[str, str], backend: str) -> str:
    """The one NIC that the environment names for a backend; empty if it names none or several.

    Example:
        >>> named_nic({"GLOO_SOCKET_IFNAME": "eth1", "NCCL_IB_HCA": "mlx5_0:1"}, "nccl")
        'mlx5_0'
    """
    names = _NAMES[2:] if backend == "gloo" else _NAMES[:2]
    for name in names:
        value = environment.get(name, "").lstrip("=").partition(":")[0]
        if value and "," not in value and not value.startswith("^"):
            return value
    return ""


def nearest_nic(device: str, nics: Mapping[str, str]) -> str:
    """The NIC that shares most of its path with a device; ties go to the first name.

    Args:
        device: path of the device below ``/sys/devices``.
        nics: name -> path of each NIC there.

    Returns:
        A name; empty if no NIC shares more than the root with the device.

    Example:
        >>> nics = {"a": "/sys/devices/pci0000:00/0000:01/nic", "b": "/sys/devices/pci0000:80/nic"}
        >>> nearest_nic("/sys/devices/pci0000:80/0000:81/gpu", nics)
        'b'
    """
    depths = {name: _common_parts(device, path) for name, path in sorted(nics.items())}
    root = _common_parts(device, "/sys/devices")
    best = max(depths, key=lambda name: depths[name], default="")
    return best if best and depths[best] > root else ""


def seen_nic(backend: str, pci_bus_id: str = "") -> str:
    """Name of this rank's NIC, or empty if it cannot be seen.

    Args:
        backend: of the process group.
        pci_bus_id: of the rank's GPU, e.g. ``0000:c1:00.0``; empty without one.
    """
    named = named_nic(os.environ, backend)
    if named or not pci_bus_id:
        return named
    device = os.path.realpath(_SYSTEM / "bus/pci/devices" / pci_bus_id.lower())
    for kind in _CLASSES:
        near = nearest_nic(device, _nic_paths(_SYSTEM / "class" / kind))
        if near:
            return near
    return ""


def number_nics(hosts: Sequence[str], names: Sequence[str]) -> list[int]:
    """From names to numbers, on each host from 0 in the order of names.

    On a host where a rank's NIC is not known, all ranks get NIC 0.

    Example:
        >>> number_nics(["a", "a", "b", "b"], ["eth1", "eth0", "", "eth1"])
        [1, 0, 0, 0]
    """
    known: dict[str, set[str]] = {}
    for host, name in zip(hosts, names, strict=True):
        known.setdefault(host, set()).add(name)
    numbers = []
    for host, name in zip(hosts, names, strict=True):
        there = sorted(known[host])
        numbers.append(0 if "" in there else there.index(name))
    return numbers


def _nic_paths(folder: Path) -> dict[str, str]:
    """Name -> device path of the NICs that have a device."""
    if not folder.is_dir():
        return {}
    devices = {entry.name: entry / "device" for entry in folder.iterdir()}
    return {name: os.path.realpath(path) for name, path in devices.items() if path.exists()}


def _common_parts(a: str, b: str) -> int:
    both = zip(Path(a).parts, Path(b).parts, strict=False)
    count = 0
    for left, right in both:
        if left != right:
            break
        count += 1
    return count
