"""`piper simulate`: presets and files, its table, its files, and what it refuses."""

import json
from pathlib import Path

import pytest

from piper_kernels import cli
from piper_kernels.dist.topology_presets import frontier

SMALL = ["--tokens", "256", "--hidden", "512"]


def test_simulate_prints_a_table_and_writes_files(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "run.json"
    words = ["simulate", "--preset", "frontier", "--nodes", "4", *SMALL, "--out", str(out)]
    assert cli.main([*words, "--nodes-per-group", "2", "--background", "0.25"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert max(map(len, lines[:-1])) <= 100
    assert lines[0] == "frontier, 32 ranks, 4 nodes, 2 groups"
    assert lines[3].startswith("modelled")
    names = [line.split()[0] for line in lines[4:7]]
    assert names == ["flat", "halo", "halo_dedup"]
    report = json.loads(out.read_text())
    assert report["label"] == "modelled"
    assert report["problem"]["background_share"] == 0.25
    flat, _, dedup = report["results"]
    assert lines[4].split()[1] == f"{flat['seconds'] * 1e3:.3f}"
    assert dedup["level_bytes"]["far"] < 0.5 * flat["level_bytes"]["far"]
    assert (tmp_path / "run.png").read_bytes().startswith(b"\x89PNG")


def test_simulate_reads_a_probed_topology(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "machine.json"
    frontier(2).replace(name="mine").save(path)
    assert cli.main(["simulate", "--topology", str(path), *SMALL, "--algorithms", "flat"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[0] == "mine, 16 ranks, 2 nodes, 1 groups"
    assert "halo" not in "\n".join(lines)


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--preset", "frontir"], "Did you mean 'frontier'?"),
        (["--nodes", "0"], "num_nodes must be at least 1, got 0"),
        (["--nodes", "600"], "topology must have at most 4096 ranks, got 4800"),
        (["--algorithms", "halo,flat,halo"], "--algorithms must be some of flat, halo, halo_dedup"),
        (["--algorithms", "hallo"], "got hallo"),
        (["--out", "run.txt"], "--out must end in .json and lie in a folder that exists"),
        (["--hidden", "0"], "--hidden must be at least 1, got 0"),
        (["--nodes-per-group", "0"], "--nodes-per-group must be at least 1, got 0"),
        (["--background", "1"], "background_share must be in [0, 1), got 1.0"),
        (["--flat-far-efficiency", "0"], "flat_far_efficiency must be above 0"),
        (["--topology", "nowhere.json"], "path must be a readable text file, got nowhere.json"),
    ],
)
def test_simulate_refuses(
    words: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert cli.main(["simulate", *SMALL, *words]) == 2
    assert message in capsys.readouterr().err


def test_simulate_takes_a_preset_or_a_file(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        cli.main(["simulate", "--preset", "frontier", "--topology", "a.json"])
    assert "not allowed with argument" in capsys.readouterr().err
