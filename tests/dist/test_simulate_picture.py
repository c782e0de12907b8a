"""The picture of a simulation holds every phase, level and link."""

from pathlib import Path

import pytest

from piper_kernels.dist.simulate_picture import draw_simulation
from piper_kernels.dist.simulate_problem import Problem
from piper_kernels.dist.topology_presets import frontier


def test_draw_simulation_shows_every_phase(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from matplotlib.figure import Figure

    problem = Problem(
        topology=frontier(2), num_experts=16, num_tokens=64, top_k=2, row_bytes=1024.0
    )
    results = problem.run()
    drawn = []
    monkeypatch.setattr(Figure, "savefig", lambda self, path, **_: drawn.append(self))
    draw_simulation(tmp_path / "run.png", results, "frontier")
    (figure,) = drawn
    times, sizes, links = figure.axes
    phases = [phase for result in results for phase in result.phases]
    assert [bar.get_width() for bar in times.patches] == pytest.approx(
        [(phase.end_s - phase.start_s) * 1e3 for phase in phases]
    )
    sent = sum(sum(r.level_bytes[level] for level in ("node", "group", "far")) for r in results)
    assert sum(bar.get_height() for bar in sizes.patches) == pytest.approx(sent / 1e9)
    assert len(links.patches) == 3 * 3
    assert figure.get_suptitle() == "modelled: frontier"
