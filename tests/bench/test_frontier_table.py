"""The Frontier table: what physics must give, and the three files."""

import json
from pathlib import Path

import pytest

from bench import frontier_table
from bench.frontier_table import make_points, markdown, speedups


def test_make_points_obey_physics() -> None:
    """HALO saves messages, not bytes: it wins by less than the 8 ranks of a node, on many nodes."""
    points = make_points((2, 8, 16), (0.1, 1000.0))
    for num_nodes in (2, 8, 16):
        physics = speedups(points, num_nodes, "halo", is_calibrated=False)
        # two nodes: nothing to save, and two phases instead of one
        assert (physics[0.1] > 1) == (num_nodes > 2)
        assert max(physics.values()) < 8
        assert 0.3 < physics[1000.0] <= 1.0
        dedup = speedups(points, num_nodes, "halo_dedup", is_calibrated=False)
        assert dedup[1000.0] > physics[1000.0]
        calibrated = speedups(points, num_nodes, "halo", is_calibrated=True)
        # up to 8 nodes all are in one switch group: nothing is far
        assert (calibrated == physics) == (num_nodes <= 8)
    far = speedups(points, 16, "halo", is_calibrated=True)[1000.0]
    assert 1.0 < far < 4.0


def test_markdown_names_the_constant_and_every_node_count() -> None:
    table = markdown(make_points((2, 4), (0.1, 1.0)))
    assert table.startswith("Modelled")
    assert "flat_far_efficiency = 0.25" in table
    assert [line.split("|")[1].strip() for line in table.splitlines()[4:]] == ["2", "4"]


def test_main_writes_three_files(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert frontier_table.main(["--out", str(tmp_path), "--most-nodes", "4"]) == 0
    told = json.loads((tmp_path / "frontier.json").read_text())
    assert told["label"] == "modelled"
    assert len(told["points"]) == 2 * 5 * 4
    assert (tmp_path / "frontier.md").read_text() in capsys.readouterr().out
    assert (tmp_path / "frontier.png").read_bytes().startswith(b"\x89PNG")
