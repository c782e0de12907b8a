"""bench.roofline: what it models for a small layer, what it writes, and the kept table."""

import json
from pathlib import Path

import pytest

from bench import roofline
from bench.machines import H100, H200, MACHINES, MI300X
from bench.shapes import GRANITE, QWEN3_30B

ROOT = Path(__file__).resolve().parents[2]
KEPT = ROOT / "bench" / "results" / "roofline.json"
REMEDY = "run python -m bench.roofline --out bench/results and copy roofline.md to docs/kernels.md"


def test_model_passes_of_a_small_layer() -> None:
    passes = roofline.model_passes(GRANITE, 256, H100)
    found = {(entry.layer, entry.direction): entry for entry in passes}
    assert len(found) == 4
    forward, unfused = found["piper", "forward"], found["unfused", "forward"]
    assert forward.flops == pytest.approx(6 * 256 * 8 * 1536 * 512, rel=0.01)
    assert forward.plan_bytes <= forward.compulsory_bytes <= forward.dram_bytes
    assert forward.dram_bytes < forward.issued_bytes
    assert forward.kept_bytes < unfused.kept_bytes
    assert forward.bound_s == pytest.approx(sum(one[-1] for one in forward.launches.values()))
    # the launches together cannot beat the whole at both roofs
    assert forward.bound_s >= forward.flops / H100.flops_per_s
    assert forward.bound_s >= forward.dram_bytes / H100.bytes_per_s
    assert forward.kind == "modelled"


def test_model_passes_differ_in_time_alone_between_h100_and_h200() -> None:
    first, second = (roofline.model_passes(GRANITE, 256, machine)[0] for machine in (H100, H200))
    assert first.dram_bytes == second.dram_bytes
    assert first.bound_s > second.bound_s


def test_main_writes_results_and_counts_targets(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    words = ["--shape", "granite_moe_3b", "--tokens", "64", "--out", str(tmp_path), "--launches"]
    assert roofline.main(words) == 0
    printed = capsys.readouterr().out
    # the targets belong to another layer: not modelled is missed
    assert printed.splitlines()[-1] == "targets: 0 met, 9 missed"
    assert "grad_act" in printed
    entries = json.loads((tmp_path / "roofline.json").read_text())
    assert len(entries) == 4 * len(MACHINES)
    assert {entry["kind"] for entry in entries} == {"modelled"}
    table = (tmp_path / "roofline.md").read_text()
    assert table.count("`granite_moe_3b` T=64") == 4
    assert (tmp_path / "roofline.png").read_bytes()[:4] == b"\x89PNG"
    assert roofline.main([*words, "--strict"]) == 1


def test_main_names_the_nearest_shape(capsys: pytest.CaptureFixture[str]) -> None:
    assert roofline.main(["--shape", "qwen3_30b_a3"]) == 2
    assert "qwen3_30b_a3b" in capsys.readouterr().err


@pytest.mark.parametrize("machine", [H100, MI300X], ids=lambda machine: machine.name)
def test_kept_results_are_those_of_the_code(machine: roofline.Machine) -> None:
    kept = {
        (entry["layer"], entry["direction"]): entry
        for entry in json.loads(KEPT.read_text())
        if (entry["shape"], entry["machine"]) == (QWEN3_30B.name, machine.name)
    }
    for entry in roofline.model_passes(QWEN3_30B, 32768, machine):
        old = kept[entry.layer, entry.direction]
        for name in ("flops", "issued_bytes", "compulsory_bytes", "dram_bytes", "kept_bytes"):
            # the routing is drawn at random, and generators may change
            assert getattr(entry, name) == pytest.approx(old[name], rel=2e-3), f"{name}: {REMEDY}"


def test_docs_hold_the_kept_table() -> None:
    table = KEPT.with_suffix(".md").read_text()
    assert table in (ROOT / "docs" / "kernels.md").read_text(), REMEDY
