"""The roofline's targets are ratios of what was modelled, and missed where nothing was."""

from dataclasses import replace

from bench.machines import H100, MI300X
from bench.roofline import model_passes
from bench.roofline_targets import list_targets, tokens_lost_bytes
from bench.shapes import GRANITE, QWEN3_30B


def test_list_targets_divides_by_the_plan() -> None:
    passes = [
        replace(
            entry,
            shape=QWEN3_30B.name,
            T=32768,
            plan_bytes=100,
            compulsory_bytes=101,
            dram_bytes=120 if entry.layer == "piper" else 240,
            largest_kept_bytes=2**40,
        )
        for entry in model_passes(GRANITE, 8, H100)
    ]
    targets = {target.name: target for target in list_targets(passes, [H100])}
    assert targets["forward: compulsory over the plan"].measured == 1.01
    dram = targets["backward: modelled DRAM over the plan (H100 SXM, 50 MB)"]
    assert (dram.measured, dram.is_met) == (1.2, False)
    unfused = targets["forward: modelled DRAM over the unfused layer's (H100 SXM, 50 MB)"]
    assert unfused.measured == 0.5
    assert not targets["kept for backward: tensors as large as R * H"].is_met


def test_list_targets_misses_what_was_not_modelled() -> None:
    targets = list_targets([], [H100, MI300X])
    assert len(targets) == 9
    assert not any(target.is_met for target in targets)


def test_tokens_lost_bytes_is_none_where_all_tokens_fit() -> None:
    # 134 MB of tokens
    assert tokens_lost_bytes(MI300X) == 0.0
    assert 0.58e9 < tokens_lost_bytes(H100) < 0.60e9
