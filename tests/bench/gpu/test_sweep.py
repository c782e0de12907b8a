"""A sweep's case on the CPU: wrong contestants are refused, absent ones listed, rates are right."""

from pathlib import Path
from typing import Any

import pytest
import torch

from bench.gpu import contestants, sweep
from bench.gpu.budget import TimeBudget
from bench.gpu.device import find_device
from bench.gpu.part_log import NotMeasured, PartLog
from bench.gpu.problem import gemm_flops, make_problem
from bench.shapes import DEEPSEEK_V3


def run_case(tmp_path: Path, mode: str) -> dict[str, dict[str, Any]]:
    log = PartLog(tmp_path / "rows.json", TimeBudget(60.0), lambda line: None)
    sweep.run_case(log, find_device(is_dry=True), sweep.TINY, 24, mode)
    return {row["variant"]: row for row in log.rows}


def test_run_case_times_those_who_are_here_and_lists_the_others(tmp_path: Path) -> None:
    rows = run_case(tmp_path, "forward_backward")
    assert rows["liger"]["status"] == rows["scattermoe"]["status"] == "not measured"
    assert "liger_kernel" in rows["liger"]["detail"]
    for name in ("piper", "hf_grouped_mm", "torch_grouped_mm_gemms", "dense_gemm"):
        assert rows[name]["status"] == "ok", rows[name]
    piper = rows["piper"]
    flops = gemm_flops(sweep.TINY, 24, has_backward=True)
    assert piper["tflops"] == pytest.approx(flops / piper["time_us"] / 1e6)
    assert piper["piper_speedup"] == 1.0


def test_run_case_refuses_a_wrong_rival_and_needs_piper(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def make_wrong(problem: Any, shape: Any) -> Any:
        layer = contestants.piper_layer(problem, shape)
        return lambda: layer() * 1.5

    monkeypatch.setitem(sweep.LAYERS, "hf_grouped_mm", make_wrong)
    rows = run_case(tmp_path, "forward")
    assert rows["hf_grouped_mm"]["status"] == "wrong"
    assert "disagrees with the oracle" in rows["hf_grouped_mm"]["detail"]
    monkeypatch.setitem(sweep.LAYERS, "piper", make_wrong)
    with pytest.raises(AssertionError, match="Piper itself was refused"):
        run_case(tmp_path, "forward")


def test_peers_come_from_a_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    package = tmp_path / "liger_kernel" / "ops"
    package.mkdir(parents=True)
    source = "class LigerFusedMoEFunction:\n    apply = staticmethod(lambda *args: args)\n"
    (package / "fused_moe.py").write_text(source)
    monkeypatch.setenv(contestants.PEERS_VARIABLE, str(tmp_path))
    monkeypatch.setattr("sys.path", ["unchanged", *__import__("sys").path])
    problem = make_problem(sweep.TINY, 5, find_device(is_dry=True))
    x, gate_up, down, ids, gates = contestants.liger_layer(problem, sweep.TINY)()
    assert (x is problem.x, gates is problem.gates) == (True, True)
    assert ids.dtype == torch.int32
    assert gate_up.shape == (4, 32, 32)
    assert down.shape == (4, 32, 16)


def test_shrink_to_fit_halves_experts_until_they_fit() -> None:
    whole = sweep.shrink_to_fit(DEEPSEEK_V3, 10**12, 0)
    assert whole is DEEPSEEK_V3
    # weights and gradients: 22.5 GB each with all experts
    quarter = sweep.shrink_to_fit(DEEPSEEK_V3, 30 * 10**9, 10**9)
    assert (quarter.E, quarter.name) == (128, "deepseek_v3_e128")
    with pytest.raises(NotMeasured, match="too few"):
        sweep.shrink_to_fit(DEEPSEEK_V3, 10**9, 0)
