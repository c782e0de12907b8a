"""The plan file: contradictions are refused with their numbers, old files stay readable."""

from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from piper_kernels.errors import ConfigError, PlanError
from piper_kernels.pipeline.plan import Exchange, Mesh, Optimizer, Plan, Predicted, split_layers

VECTORS = Path(__file__).parent / "plans"


def plan(**changes: object) -> Plan:
    fields: dict[str, object] = {
        "model_digest": "0123456789abcdef0123456789abcdef",
        "world_size": 16,
        "mesh": Mesh(pp=4, ep=4),
        "layers_per_stage": (8, 8, 8, 8),
        "schedule": "1f1b",
        "num_microbatches": 8,
        "microbatch_size": 2,
        "seq_len": 4096,
    }
    return Plan(**{**fields, **changes})


FULL = plan(
    world_size=32,
    mesh=Mesh(pp=2, dp=2, ep=4, tp=2),
    layers_per_stage=(6, 7, 7, 7),
    schedule="dualpipev",
    num_microbatches=12,
    checkpointing="selective",
    experts_save="x",
    exchange=Exchange(algorithm="halo_dedup", num_chunks=4),
    optimizer=Optimizer(kind="adamw_8bit", is_sharded=True),
    predicted=Predicted(
        step_s=1.5,
        tokens_per_s=1e5,
        mfu=0.4,
        bubble_share=0.1,
        peak_bytes=(7, 6),
        cost_per_million_tokens=0.25,
    ),
)


@pytest.mark.parametrize(("name", "expected"), [("small", plan()), ("full", FULL)])
def test_plan_reads_the_committed_files(name: str, expected: Plan) -> None:
    # a plan written by this version must stay readable: files are kept beside the runs they made
    assert Plan.load(VECTORS / f"{name}.json") == expected
    assert Plan.from_json(expected.to_json()) == expected


def test_plan_digests_are_stable() -> None:
    assert plan().digest() == "47e23fa242a746390c42c9b76c0e5fc6"
    assert FULL.digest() == "fed6c7fb31dd3c8fe72a1c6f917aa783"


@pytest.mark.parametrize(
    ("changes", "match"),
    [
        (
            {"world_size": 24},
            r"world_size must be pp \* dp \* ep \* tp = 4 \* 1 \* 4 \* 1 = 16, got 24",
        ),
        ({"layers_per_stage": (16, 16)}, r"4 entries: pp = 4 ranks of 1 under 1f1b, got 2"),
        (
            {"schedule": "interleaved_1f1b", "layers_per_stage": (4,) * 9},
            r"8 entries: pp = 4 ranks of 2 under interleaved_1f1b, got 9",
        ),
        ({"schedule": "zbv"}, r"8 entries: pp = 4 ranks of 2 under zbv, got 4"),
        ({"num_microbatches": 3}, r"1f1b needs at least as many .* 3 < 4\. Use more microbatches"),
        ({"rank_order": ("pp", "ep", "dp", "tp")}, "rank_order must be"),
        (
            {
                "predicted": Predicted(
                    step_s=1, tokens_per_s=1, mfu=0, bubble_share=0, peak_bytes=(1,)
                )
            },
            r"predicted\.peak_bytes must have pp = 4 entries, got 1",
        ),
    ],
)
def test_plan_refuses_contradictions(changes: dict[str, object], match: str) -> None:
    with pytest.raises(ConfigError, match=match):
        plan(**changes)


@pytest.mark.parametrize(
    ("old", "new", "match"),
    [
        ('"seq_len": 4096', '"seq_length": 4096', r"Did you mean 'seq_len'"),
        ('"version": 1', '"version": 2', r"version must be 1, got 2"),
        ('"pp": 4', '"pp": 0', r"mesh\.pp must be greater than 0, got 0"),
        ('"schedule": "1f1b"', '"schedule": "1f1"', r"schedule must be 'gpipe', '1f1b'"),
        (
            '"world_size": 16',
            '"world_size": 12',
            r"small\.json: Plan: world_size must be .* got 12",
        ),
    ],
)
def test_plan_words_what_is_wrong_in_a_file(old: str, new: str, match: str) -> None:
    text = (VECTORS / "small.json").read_text()
    assert old in text
    with pytest.raises(ConfigError, match=match):
        Plan.from_json(text.replace(old, new), source="small.json")


def test_plan_interleaves_any_number_of_stages() -> None:
    three = plan(schedule="interleaved_1f1b", layers_per_stage=(2,) * 12)
    assert three.num_layers == 24


def test_plan_counts_its_batch() -> None:
    assert (FULL.num_layers, FULL.global_batch, FULL.tokens_per_step) == (27, 192, 786432)
    assert FULL.mesh.stage_width == 16
    assert FULL.mesh.num_replicas == 8
    assert FULL.stage_layers()[1] == range(6, 13)


def test_check_model_names_both_sides() -> None:
    digest = plan().model_digest
    plan().check_model(digest, 32, 8)
    with pytest.raises(PlanError, match="be the model's 30 layers in all, got 32"):
        plan().check_model(digest, 30, 8)
    with pytest.raises(PlanError, match="be at most the model's 2 experts, got 4"):
        plan().check_model(digest, 32, 2)
    with pytest.raises(PlanError, match=r"model_digest must be f+, .*Plan again for this model"):
        plan().check_model("f" * 32, 32, 8)


@given(num_layers=st.integers(1, 130), num_stages=st.integers(1, 40))
def test_split_layers_loses_none(num_layers: int, num_stages: int) -> None:
    # field report A72: 30 layers over 4 stages built 28
    if num_layers < num_stages:
        with pytest.raises(
            PlanError, match=f"be at least the {num_stages} stages, got {num_layers}"
        ):
            split_layers(num_layers, num_stages)
        return
    split = split_layers(num_layers, num_stages)
    assert sum(split) == num_layers
    assert len(split) == num_stages
    assert max(split) - min(split) <= 1
