"""`piper probe --platform`: real ranks and a device, in the file that `plan` reads."""

from pathlib import Path

import pytest

from piper_kernels.cli import main
from piper_kernels.dist.topology_presets import frontier
from piper_kernels.pipeline import probe_compute
from piper_kernels.pipeline.platform import Device, Platform
from piper_kernels.pipeline.probe_command import describe_machine

DEVICE = Device(
    name="made up", memory_bytes=10**12, peak_flops_per_s=1e12, memory_bandwidth_bytes_per_s=1e10
)


def test_describe_machine_counts_the_nodes_of_a_group() -> None:
    topology = frontier(3).replace(name="mine")
    platform = describe_machine(topology, DEVICE)
    assert (platform.name, platform.device, platform.topology) == ("mine", DEVICE, topology)
    assert platform.nodes_per_group == sum(n.group == "group0" for n in topology.nodes) > 0
    assert platform.source.startswith("piper probe, 20")


def test_probe_writes_a_platform_that_plan_reads(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.delenv("RANK", raising=False)
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "lo")
    monkeypatch.setattr(probe_compute, "probe_rank", lambda: DEVICE)
    files = ["--out", str(tmp_path / "net.json"), "--platform", str(tmp_path / "box.json")]
    assert main(["probe", *files, "--ranks", "2", "--largest", "4096", "--name", "box"]) == 0
    platform = Platform.load(tmp_path / "box.json")
    assert (platform.gpus_per_node, platform.device) == (2, DEVICE)
    words = ["--platform", str(tmp_path / "box.json"), "--gpus", "2", "--global-batch", "2"]
    assert main(["plan", "--model", "olmoe-1b-7b", *words, "--seq", "128", "--top", "1"]) == 0
    assert "olmoe-1b-7b on 2 GPUs of box" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("platform", "words"),
    [
        ("box.txt", "end in .json"),
        ("nowhere/box.json", "lie in a folder that exists"),
        ("net.json", "be another file than --out"),
    ],
)
def test_probe_refuses_a_platform_file_before_it_measures(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], platform: str, words: str
) -> None:
    files = ["--out", str(tmp_path / "net.json"), "--platform", str(tmp_path / platform)]
    assert main(["probe", *files]) == 2
    assert words in capsys.readouterr().err
    assert not list(tmp_path.iterdir())
