"""The runtime on real ranks gives what a plain loop in one process gives."""

import itertools
from typing import Any

import pytest
import torch

from piper_kernels.pipeline.launch import build_runtime
from piper_kernels.pipeline.schedule import ScheduleName
from piper_kernels.testing import rank_outcomes, run_ranks
from piper_kernels.testing.training import (
    Trained,
    TrainingCase,
    train_on_ranks,
    train_plainly,
    worst_difference,
)


def check(cases: list[TrainingCase], tolerance: float = 1e-9) -> list[list[Trained]]:
    """All cases of one number of ranks in one start of processes."""
    runs = run_ranks(train_on_ranks, cases[0].num_ranks, cases, timeout_s=300.0)
    for index, case in enumerate(cases):
        want = train_plainly(case)
        held: set[str] = set()
        for run in runs:
            assert worst_difference(run[index], want) < tolerance, case
            held |= run[index].parameters.keys()
        # A72: each layer and each expert is somewhere
        assert held == want.parameters.keys(), case
        assert max(want.losses) > 1.0
        check_copies([run[index] for run in runs], case)
    return runs


def check_copies(runs: list[Trained], case: TrainingCase) -> None:
    """What several ranks hold (A70; tied weights, A76) has not drifted apart by a bit."""
    for run, other in itertools.combinations(runs, 2):
        for name in run.parameters.keys() & other.parameters.keys():
            assert torch.equal(run.parameters[name], other.parameters[name]), name
    if case.config.get("tie_word_embeddings"):
        every = {name: tensor for run in runs for name, tensor in run.parameters.items()}
        assert torch.equal(every["model.embed_tokens.weight"], every["lm_head.weight"])
        holds_both = "lm_head.weight" in runs[0].parameters
        assert holds_both == (case.schedule == "zbv"), "on a V one rank has both ends"


def pipelines(pp: int, **options: Any) -> list[TrainingCase]:
    """Every schedule; uneven stages."""
    one = {1: (4,), 2: (1, 3), 4: (1, 1, 1, 1)}[pp]
    two = {1: (1, 3), 2: (1, 1, 1, 1), 4: (1,) * 8}[pp]
    per_rank: list[tuple[ScheduleName, tuple[int, ...]]] = [
        ("gpipe", one),
        ("1f1b", one),
        ("interleaved_1f1b", two),
        ("zbv", two),
        ("dualpipev", two),
    ]
    return [
        TrainingCase(pp=pp, schedule=name, layers=layers, **options) for name, layers in per_rank
    ]


TIED: dict[str, Any] = {"config": {"tie_word_embeddings": True}, "num_microbatches": 4}
DENSE_FIRST: dict[str, Any] = {
    "family": "qwen3_moe",
    "config": {"mlp_only_layers": [0, 1], "decoder_sparse_step": 1},
}


def test_two_ranks() -> None:
    options: dict[str, Any] = {"num_microbatches": 4, "num_steps": 2}
    check(
        [
            # A75, A77, A78: losses, router losses, norms and every parameter, with padding
            *pipelines(2, is_padded=True, **options),
            TrainingCase(ep=2, is_padded=True, optimizer="sgd"),
            TrainingCase(dp=2, layers=(1,), is_padded=True),
            # recomputed once for each part of a split backward
            TrainingCase(pp=2, schedule="1f1b", layers=(1, 1), checkpointing="full"),
            TrainingCase(pp=2, schedule="zbv", layers=(1, 1, 1, 1), checkpointing="full"),
            TrainingCase(ep=2, layers=(2,), checkpointing="full"),
            TrainingCase(pp=2, schedule="1f1b", layers=(1, 1), **TIED),
            TrainingCase(pp=2, schedule="zbv", layers=(1, 1, 1, 1), **TIED),
        ]
    )


def test_four_ranks() -> None:
    check(
        [
            TrainingCase(pp=2, ep=2, schedule="1f1b", layers=(2, 2), is_padded=True),
            TrainingCase(
                pp=2, ep=2, schedule="zbv", layers=(1,) * 4, checkpointing="full", num_steps=2
            ),
            TrainingCase(dp=2, ep=2, layers=(2,), optimizer="sgd", is_padded=True),
            TrainingCase(pp=4, schedule="1f1b", layers=(1,) * 4, num_microbatches=4, **DENSE_FIRST),
            # A80: nobody in the first stage has an expert, and the second stage's are shared out
            TrainingCase(pp=2, ep=2, schedule="1f1b", layers=(2, 2), **DENSE_FIRST),
            # 8 experts, all rows in two of them: three of the four ranks compute nothing
            TrainingCase(ep=4, layers=(2,), is_skewed=True, balance_weight=1e-6, num_steps=2),
        ]
    )


def test_one_rank() -> None:
    check(
        [
            TrainingCase(layers=(2,), is_padded=True),
            TrainingCase(layers=(2,), schedule="1f1b", optimizer="sgd"),
            TrainingCase(layers=(1, 1), schedule="zbv"),
        ]
    )


SHAPES = [(8, 7), (8, 4), (2, 7), (8, 7)]


def change_shapes(pp: int, shapes: list[tuple[int, int]]) -> list[float]:
    """A74: a step for each shape."""
    layers = (1, 1) if pp == 2 else (2,)
    case = TrainingCase(pp=pp, schedule="1f1b", layers=layers, num_microbatches=2)
    runtime = build_runtime(case.plan(), case.build_config(), seed=0, dtype=torch.float64)
    losses = []
    try:
        for rows, length in shapes:
            inputs, targets, _ = TrainingCase(rows=rows, seq_len=length).batch(0)
            losses.append(runtime.forward_backward(inputs, targets).loss)
            losses.append(runtime.evaluate(inputs, targets).loss)
    finally:
        runtime.close()
    return losses


def test_shapes_may_change_between_steps() -> None:
    found, other = run_ranks(change_shapes, 2, 2, SHAPES)
    (want,) = run_ranks(change_shapes, 1, 1, SHAPES)
    assert found == other
    assert found == pytest.approx(want, rel=1e-12)
    # evaluation is the same forward, and adds nothing to anything
    assert found[0::2] == pytest.approx(found[1::2], rel=1e-12)
    assert found[0] == found[6]


def test_rows_that_do_not_divide_are_refused_on_all_ranks() -> None:
    outcomes = rank_outcomes(change_shapes, 2, 2, [(7, 7)])
    for rank, outcome in enumerate(outcomes):
        assert outcome.kind == "raised"
        message = f"rank {rank} (pp={rank}): Runtime.forward_backward: inputs must have rows that "
        assert message + "divide into 2 microbatches, got 7." in outcome.error


@pytest.mark.slow
@pytest.mark.parametrize("optimizer", ["sgd", "adamw"])
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
@pytest.mark.parametrize(
    ("pp", "dp", "ep"),
    [(1, 1, 1), (2, 1, 1), (1, 1, 2), (2, 1, 2), (1, 2, 2), (4, 1, 1), (2, 2, 1), (1, 1, 4)],
)
def test_the_grid(pp: int, dp: int, ep: int, dtype: torch.dtype, optimizer: str) -> None:
    options: dict[str, Any] = {
        "dp": dp,
        "ep": ep,
        "dtype": dtype,
        "optimizer": optimizer,
        "num_steps": 10,
        "rows": 8 * dp * ep,
        "num_microbatches": 8,
        "is_padded": True,
    }
    cases = pipelines(pp, **options)
    if dtype == torch.float64:
        check(cases)
    elif optimizer == "sgd":
        check(cases, 1e-5)
    else:
        runs = run_ranks(train_on_ranks, cases[0].num_ranks, cases, timeout_s=300.0)
        for index, case in enumerate(cases):
            want = train_plainly(case)
            assert runs[0][index].losses == pytest.approx(want.losses, abs=1e-4), case
