"""The picture of a probe exists, and shows every point and curve."""

from pathlib import Path

import pytest

from piper_kernels.dist.links import Link, Links
from piper_kernels.dist.probe import AllToAll, ProbeReport
from piper_kernels.dist.probe_fit import Point
from piper_kernels.dist.probe_picture import draw_probe
from piper_kernels.dist.topology_presets import frontier

LINK = Link(latency_s=1e-4, bandwidth_bytes_per_s=1e9, message_gap_s=2e-5)


def make_report(has_checks: bool) -> ProbeReport:
    points = [
        Point(level=level, num_messages=n, size_bytes=size, seconds=LINK.seconds(n * size, n))
        for level in ("node", "group")
        for n in (1, 8)
        for size in (64, 65_536)
    ]
    checks = (AllToAll(size_bytes=1024, seconds=2e-3, predicted_s=1e-3),) if has_checks else ()
    topology = frontier(2).replace(links=Links(node=LINK, group=LINK), source="made up")
    return ProbeReport(topology=topology, points=tuple(points), all_to_all=checks, notes=())


@pytest.mark.parametrize(("has_checks", "num_panels"), [(True, 3), (False, 2)])
def test_draw_probe_shows_every_point(
    has_checks: bool, num_panels: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from matplotlib.figure import Figure

    drawn = []
    monkeypatch.setattr(Figure, "savefig", lambda self, path, **_: drawn.append(self))
    draw_probe(tmp_path / "probe.png", make_report(has_checks))
    (figure,) = drawn
    assert len(figure.axes) == num_panels
    for axes in figure.axes[:2]:
        dots = [line for line in axes.lines if line.get_marker() == "o"]
        curves = [line for line in axes.lines if line.get_marker() != "o"]
        assert [list(line.get_xdata()) for line in dots] == [[64, 65_536]] * 2
        # the curve ends where the last point is: the points were made by it
        for dot, curve in zip(dots, curves, strict=True):
            assert curve.get_ydata()[-1] == pytest.approx(dot.get_ydata()[-1])


def test_draw_probe_writes_a_png(tmp_path: Path) -> None:
    path = tmp_path / "probe.png"
    draw_probe(path, make_report(has_checks=True))
    assert path.read_bytes().startswith(b"\x89PNG")
