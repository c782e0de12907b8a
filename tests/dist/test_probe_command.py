"""`piper probe`: alone, its files, its words, and what it refuses."""

import argparse
import json
from pathlib import Path

import pytest

from piper_kernels import cli
from piper_kernels.dist import probe_command
from piper_kernels.dist.links import Link, Links
from piper_kernels.dist.probe import AllToAll, ProbeReport
from piper_kernels.dist.probe_fit import Point
from piper_kernels.dist.topology import Topology
from piper_kernels.dist.topology_presets import frontier
from piper_kernels.errors import BackendError


def make_report() -> ProbeReport:
    """Without measuring."""
    link = Link(latency_s=1e-4, bandwidth_bytes_per_s=1e9, message_gap_s=2e-5)
    topology = frontier(2).replace(links=Links(node=link, group=link), source="made up")
    points = [
        Point(level=level, num_messages=count, size_bytes=size, seconds=count * 1e-3)
        for level in ("node", "group")
        for count in (1, 8)
        for size in (64, 65_536)
    ]
    check = AllToAll(size_bytes=1024, seconds=2e-3, predicted_s=1e-3)
    return ProbeReport(
        topology=topology, points=tuple(points), all_to_all=(check,), notes=("a note",)
    )


@pytest.fixture
def _alone(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("RANK", raising=False)


@pytest.mark.usefixtures("_alone")
def test_probe_starts_ranks_and_writes_three_files(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "lo")
    monkeypatch.setattr("os.getcwd", lambda: str(tmp_path))
    out = tmp_path / "box.json"
    root = str(Path(cli.__file__).parents[1])
    monkeypatch.setenv("PYTHONPATH", root)
    words = ["--out", str(out), "--ranks", "2", "--name", "box", "--largest", "65536"]
    assert cli.main(["probe", *words]) == 0
    topology = Topology.load(out)
    assert topology.name == "box"
    assert topology.num_ranks == 2
    report = ProbeReport.load(tmp_path / "box.points.json")
    assert report.topology == topology
    assert max(point.size_bytes for point in report.points) == 65_536
    assert (tmp_path / "box.png").read_bytes().startswith(b"\x89PNG")
    assert sorted(path.name for path in tmp_path.iterdir()) == [
        "box.json",
        "box.png",
        "box.points.json",
    ]


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--out", "box.txt"], "--out must end in .json, got box.txt"),
        (["--out", "nowhere/box.json"], "--out must lie in a folder that exists"),
        (["--timeout", "0"], "--timeout must be above 0 s"),
        (["--largest", "100"], "--largest must be at least 1024 bytes, got 100"),
        (["--ranks", "0"], "--ranks must be at least 1, got 0"),
        (["--groups", "nowhere.json"], "--groups must be a readable JSON file"),
    ],
)
@pytest.mark.usefixtures("_alone")
def test_probe_refuses(
    words: list[str],
    message: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.chdir(tmp_path)
    assert cli.main(["probe", *words]) == 2
    assert message in capsys.readouterr().err
    assert list(tmp_path.iterdir()) == []


@pytest.mark.usefixtures("_alone")
def test_probe_refuses_groups_of_another_form(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "groups.json"
    path.write_text(json.dumps({"node0": ["rack0"]}))
    assert cli.main(["probe", "--groups", str(path)]) == 2
    assert '--groups must look like {"host": "group"}' in capsys.readouterr().err


def test_probe_says_that_ranks_do_not_meet(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RANK", "0")
    for name in ("WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"):
        monkeypatch.delenv(name, raising=False)
    arguments = argparse.Namespace(out=Path("box.json"), groups=None, timeout=1.0, largest=1024)
    with pytest.raises(BackendError, match=r"the ranks did not find one another.*Do all ranks run"):
        probe_command.run(arguments)


def test_describe_fits_100_columns_and_holds_the_numbers() -> None:
    lines = probe_command.describe(make_report()).splitlines()
    assert max(map(len, lines)) <= 100
    assert lines[0] == "frontier: 16 ranks, 2 nodes, 1 groups"
    assert lines[2].split() == ["node", "100.00", "20.00", "1.0000", "4"]
    assert "2.000 ms measured, 1.000 ms modelled" in lines[4]
    assert lines[5] == "a note"
