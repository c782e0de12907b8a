"""The exchange bench: its problems, its table, and one short run on emulated nodes."""

import json
from pathlib import Path

import numpy as np
import pytest

from bench import bench_exchange
from bench.bench_exchange import Comparison, make_rows, make_tasks, print_comparisons
from bench.report import make_console
from piper_kernels.testing.cluster import ClusterShape, LinkShape, why_no_cluster

NIC = LinkShape(rate_bytes_per_s=1e7)


def test_make_rows_keeps_the_mean() -> None:
    assert (make_rows("uniform", 4, 10) == 10).all()
    skewed = make_rows("skewed", 4, 10)
    assert skewed[0].tolist() == [4, 8, 12, 16]
    assert skewed.dtype == np.int64


def test_make_tasks_leaves_flat_out_where_the_emulation_chooses_nics() -> None:
    names = [task.name for task in make_tasks(ClusterShape(ranks_per_node=(2, 2), nic=NIC), 4)]
    assert names == ["uniform flat", "uniform halo", "skewed flat", "skewed halo"]
    shape = ClusterShape(ranks_per_node=(2, 2), nic=NIC, nics_per_node=2)
    assert [task.algorithm for task in make_tasks(shape, 4)] == ["halo", "halo"]


def test_print_comparisons_shows_the_error(capsys: pytest.CaptureFixture[str]) -> None:
    each = Comparison(
        nodes="2x2", nics=1, counts="skewed", algorithm="halo", measured_s=0.1, modelled_s=0.11
    )
    assert each.error == pytest.approx(0.1)
    print_comparisons([each], make_console())
    shown = capsys.readouterr().out
    assert "+10%" in shown
    assert max(map(len, shown.splitlines())) <= 100


def test_main_says_why_nothing_was_measured(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(bench_exchange, "why_no_cluster", lambda: "no right")
    assert bench_exchange.main([]) == 1
    assert capsys.readouterr().out == "nothing was measured: no right\n"


@pytest.mark.slow
@pytest.mark.skipif(bool(why_no_cluster()), reason=why_no_cluster())
def test_main_measures_and_counts_targets(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert bench_exchange.main(["--rounds", "1", "--rows", "16", "--out", str(tmp_path)]) == 0
    assert capsys.readouterr().out.splitlines()[-1].startswith("targets: ")
    told = json.loads((tmp_path / "exchange.json").read_text())
    assert told["kind"] == "measured"
    assert len(told["plans"]) == 4 + 2 + 4
    assert (tmp_path / "probe.png").read_bytes().startswith(b"\x89PNG")
