"""Piper's formulas as printed: identities, the numbers that follow from them, valid strategies."""

import pytest

from piper_kernels.errors import ConfigError
from piper_kernels.pipeline.paper_memory import (
    PaperModel,
    stage_bytes,
    stage_skew_bytes,
    unpartitioned_bytes,
    valid_strategies,
)


def family(num_experts: int) -> PaperModel:
    # facts/papers.md 1.10, Fig. 14: d 5120, d_ffn 20480, L 32, k 2; sizes come out with 2 matrices
    return PaperModel(
        hidden_size=5120,
        expert_size=20480,
        num_layers=32,
        num_experts=num_experts,
        top_k=2,
        num_matrices=2,
    )


SMALL = PaperModel(
    hidden_size=64, expert_size=128, num_layers=8, num_experts=16, top_k=2, num_heads=4
)


@pytest.mark.parametrize(
    ("num_experts", "num_gpus", "pairs"),
    # facts/papers.md 1.10 and 4.6: derived, exact under EP <= 32, PP | L
    [
        (256, 1024, {(32, 32)}),
        (128, 512, {(32, 16), (16, 32)}),
        (16, 64, {(32, 2), (16, 4), (8, 8), (4, 16)}),
    ],
)
def test_valid_strategies_of_the_scaling_family(
    num_experts: int, num_gpus: int, pairs: set[tuple[int, int]]
) -> None:
    model = family(num_experts)
    sizes = [
        (pp, ep, stage_bytes(model, pp, 4096, pp=pp, ep=ep, stage=0, num_microbatches=pp))
        for pp, ep in valid_strategies(model, num_gpus)
    ]
    fitting = valid_strategies(model, num_gpus, stage_0_bytes=sizes, memory_bytes=64e9)
    assert set(fitting) == pairs


def test_valid_strategies_drop_what_does_not_fit() -> None:
    sizes = [(32, 16, 70e9), (16, 32, 60e9)]
    assert valid_strategies(family(128), 512, stage_0_bytes=sizes, memory_bytes=64e9) == [(16, 32)]


def test_stage_bytes_of_the_trillion_point() -> None:
    # facts/papers.md 1.10: 26.84 GB of expert state and 60.7 GB in stage 0 of (32, 32), s = 4096,
    # one sequence a GPU and microbatch, flash attention
    model = family(256)
    assert model.experts_state_bytes / 32 == pytest.approx(26.84e9, rel=1e-3)
    # one sequence on each rank: nothing is divided by EP, which is the printed formula for EP = 1
    # with a 32nd of the experts
    local = PaperModel(
        hidden_size=5120,
        expert_size=20480,
        num_layers=32,
        num_experts=8,
        top_k=2,
        num_matrices=2,
    )
    first = stage_bytes(local, 64, 4096, pp=32, ep=1, stage=0, num_microbatches=64)
    assert first == pytest.approx(60.7e9, rel=1e-3)
    assert first < 64e9
    # the consistent reading: b of the group, 32 times as many sequences
    group = stage_bytes(
        model, 64 * 32, 4096, pp=32, ep=32, stage=0, num_microbatches=64, is_as_printed=False
    )
    assert group == pytest.approx(first)


def test_stage_bytes_identities() -> None:
    sizes = {"pp": 4, "ep": 2, "num_microbatches": 8}
    stages = [stage_bytes(SMALL, 8, 32, stage=i, **sizes) for i in range(4)]
    assert stages == sorted(stages, reverse=True)
    skew = stage_skew_bytes(SMALL, 8, 32, **sizes)
    assert stages[0] - stages[3] == pytest.approx(skew)
    whole = stage_bytes(SMALL, 8, 32, pp=1, ep=1, stage=0, num_microbatches=1)
    assert whole == unpartitioned_bytes(SMALL, 8, 32)
    gpipe = [stage_bytes(SMALL, 8, 32, stage=i, schedule="gpipe", **sizes) for i in range(4)]
    # all microbatches alive: the whole batch, in every stage
    assert len(set(gpipe)) == 1
    assert gpipe[0] > stages[0]


def test_stage_bytes_flash_leaves_the_square_out() -> None:
    sizes = {"pp": 2, "ep": 2, "num_microbatches": 2, "stage": 1}
    flash = stage_bytes(SMALL, 2, 32, **sizes)
    plain = stage_bytes(SMALL, 2, 32, has_flash=False, **sizes)
    # 4 b H s^2 for each of L / PP layers, b / M = 1, one alive
    assert plain - flash == 4 * 4 * 4 * 32 * 32


def test_stage_bytes_refuse() -> None:
    with pytest.raises(ConfigError, match=r"stage must be in 0 .. 3, got 4"):
        stage_bytes(SMALL, 8, 32, pp=4, ep=2, stage=4, num_microbatches=8)
    with pytest.raises(ConfigError, match="schedule must be 1f1b or gpipe, got 'zbv'"):
        stage_bytes(SMALL, 8, 32, pp=4, ep=2, stage=0, num_microbatches=8, schedule="zbv")
