"""Which NIC a rank sends by: what the environment says, what PCI paths say, and numbers."""

from pathlib import Path

import pytest

from piper_kernels.dist import probe_nics
from piper_kernels.dist.probe_nics import named_nic, nearest_nic, number_nics, seen_nic

ROOT = "/sys/devices"


@pytest.mark.parametrize(
    ("environment", "backend", "expected"),
    [
        ({"GLOO_SOCKET_IFNAME": "eth1"}, "gloo", "eth1"),
        ({"NCCL_SOCKET_IFNAME": "eth1"}, "gloo", ""),
        ({"NCCL_SOCKET_IFNAME": "eth1"}, "nccl", "eth1"),
        ({"NCCL_SOCKET_IFNAME": "eth1", "NCCL_IB_HCA": "=mlx5_2:1"}, "nccl", "mlx5_2"),
        ({"NCCL_IB_HCA": "mlx5_0,mlx5_1"}, "nccl", ""),
        ({"NCCL_SOCKET_IFNAME": "^docker0"}, "nccl", ""),
        ({}, "gloo", ""),
    ],
)
def test_named_nic_takes_one_name(environment: dict[str, str], backend: str, expected: str) -> None:
    assert named_nic(environment, backend) == expected


def test_nearest_nic_shares_most_of_the_path() -> None:
    nics = {
        "far": f"{ROOT}/pci0000:80/0000:80:01/nic",
        "near": f"{ROOT}/pci0000:00/0000:00:02/0000:02:00/nic",
        "same_root": f"{ROOT}/pci0000:00/0000:00:09/nic",
    }
    assert nearest_nic(f"{ROOT}/pci0000:00/0000:00:02/0000:01:00", nics) == "near"
    assert nearest_nic(f"{ROOT}/pci0000:80/0000:80:07", nics) == "far"
    assert nearest_nic(f"{ROOT}/pci0000:c0/0000:c0:01", nics) == ""
    assert nearest_nic(f"{ROOT}/pci0000:c0/0000:c0:01", {}) == ""


def test_seen_nic_follows_the_tree_of_devices(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("NCCL_IB_HCA", "NCCL_SOCKET_IFNAME"):
        monkeypatch.delenv(name, raising=False)
    devices = tmp_path / "devices"
    for place in ("pci0/a/gpu", "pci0/b/gpu", "pci0/a/nic", "pci0/b/nic"):
        (devices / place).mkdir(parents=True)
    buses = tmp_path / "bus/pci/devices"
    buses.mkdir(parents=True)
    for name, place in (("0000:0a:00.0", "pci0/a/gpu"), ("0000:0b:00.0", "pci0/b/gpu")):
        (buses / name).symlink_to(devices / place)
    for name, place in (("mlx5_0", "pci0/b/nic"), ("mlx5_1", "pci0/a/nic")):
        (tmp_path / "class/infiniband" / name).mkdir(parents=True)
        (tmp_path / "class/infiniband" / name / "device").symlink_to(devices / place)
    (tmp_path / "class/net/lo").mkdir(parents=True)
    monkeypatch.setattr(probe_nics, "_SYSTEM", tmp_path)
    assert seen_nic("nccl", "0000:0A:00.0") == "mlx5_1"
    assert seen_nic("nccl", "0000:0b:00.0") == "mlx5_0"
    assert seen_nic("nccl") == ""
    monkeypatch.setenv("NCCL_IB_HCA", "mlx5_7")
    assert seen_nic("nccl", "0000:0b:00.0") == "mlx5_7"


def test_number_nics_counts_on_each_host() -> None:
    hosts = ["a", "b", "a", "b", "c", "c"]
    assert number_nics(hosts, ["eth1", "eth0", "eth0", "eth0", "eth0", ""]) == [1, 0, 0, 0, 0, 0]
