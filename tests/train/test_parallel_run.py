"""A run on ranks: the same losses on every mesh, resumed on any other, refused with the numbers."""

import argparse
import json
import math
import os
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from safetensors import safe_open

from piper_kernels.errors import PlanError
from piper_kernels.pipeline.model_config import load_model
from piper_kernels.pipeline.plan import Mesh, Plan
from piper_kernels.testing import rank_outcomes, run_ranks
from piper_kernels.train.checkpoint_keys import model_tensors
from piper_kernels.train.metrics import StepRecord, read_metrics
from piper_kernels.train.model import build_config
from piper_kernels.train.parallel_command import run_plan
from piper_kernels.train.parallel_run import check_plan
from piper_kernels.train.parallel_trainer import ParallelTrainer
from piper_kernels.train.settings import TrainSettings

TINY: dict[str, Any] = {
    "hidden_size": 16,
    "intermediate_size": 16,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 2,
    "num_experts": 4,
}
MESHES: dict[str, tuple[int, int, int]] = {"one": (1, 1, 1), "pp": (2, 1, 1), "ep": (1, 1, 2)}


def make_plan(pp: int, dp: int, ep: int, **changes: Any) -> Plan:
    """8 sequences a step, in microbatches of one."""
    config = build_config(TrainSettings(model_override=TINY), 256)
    values: dict[str, Any] = {
        "model_digest": load_model(config.to_dict()).digest(),
        "world_size": pp * dp * ep,
        "mesh": Mesh(pp=pp, dp=dp, ep=ep),
        "layers_per_stage": (2,) if pp == 1 else (1, 1),
        "schedule": "1f1b",
        "num_microbatches": 8 // (dp * ep),
        "microbatch_size": 1,
        "seq_len": 16,
    }
    return Plan(**(values | changes))


def stated(text: Path, out: Path, **changes: Any) -> dict[str, Any]:
    """What a user would say beside the plan."""
    values = {
        "data": [str(text)],
        "model_override": TINY,
        "steps": 6,
        "warmup_fraction": 0.2,
        "checkpoint_every": 3,
        "evaluate_every": 6,
        "timeout_s": 60.0,
        "out": str(out),
    }
    return values | changes


def train(plan: Path, words: dict[str, Any], is_resumed: bool = False) -> int:
    """``piper train --plan``, on one rank of a job that exists."""
    os.environ["WORLD_SIZE"] = str(dist.get_world_size())
    arguments = argparse.Namespace(plan=plan, resume=is_resumed, overwrite=False)
    return run_plan(arguments, words)


def go(plan: Plan, words: dict[str, Any], folder: Path, *, is_resumed: bool = False) -> Path:
    """Run it, and give the folder."""
    path = folder / "plan.json"
    plan.save(path)
    codes = run_ranks(train, plan.world_size, path, words, is_resumed, timeout_s=100.0)
    assert codes == [0] * plan.world_size
    return Path(words["out"])


def losses(out: Path) -> list[float]:
    return [record.loss for record in read_metrics(out / "metrics.jsonl")]


def tensors(checkpoint: Path) -> dict[str, torch.Tensor]:
    found: dict[str, torch.Tensor] = {}
    for path in checkpoint.glob("*.safetensors"):
        with safe_open(path, framework="pt") as file:
            for key in file.keys():  # noqa: SIM118 (no dict)
                assert key not in found, f"{key} is written twice"
                found[key] = file.get_tensor(key)
    return found


@pytest.fixture(scope="module")
def runs(text_file: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """The same run on three meshes."""
    found = {}
    for name, mesh in MESHES.items():
        folder = tmp_path_factory.mktemp(name)
        found[name] = go(make_plan(*mesh), stated(text_file, folder / "run"), folder)
    return found


def test_meshes_give_the_same_run(runs: dict[str, Path]) -> None:
    want = read_metrics(runs["one"] / "metrics.jsonl")
    assert len(want) == 6
    for name in ("pp", "ep"):
        found = read_metrics(runs[name] / "metrics.jsonl")
        assert [r.loss for r in found] == pytest.approx([r.loss for r in want], abs=1e-5)
        assert [r.grad_norm for r in found] == pytest.approx([r.grad_norm for r in want], abs=1e-4)
        assert found[-1].held_out_loss == pytest.approx(want[-1].held_out_loss, abs=1e-5)
        assert found[0].expert_counts == want[0].expert_counts
        lines = (runs[name] / "ranks" / "rank-00001.jsonl").read_text().splitlines()
        assert [json.loads(line)["step"] for line in lines] == [1, 2, 3, 4, 5, 6]
        assert json.loads(lines[0])["stages"] == ([1] if name == "pp" else [0])


def test_checkpoints_do_not_depend_on_the_mesh(runs: dict[str, Path]) -> None:
    want = tensors(runs["one"] / "checkpoints" / "step-00000006")
    assert "experts.1.3.down_proj.exp_avg" in want
    for name in ("pp", "ep"):
        found = tensors(runs[name] / "checkpoints" / "step-00000006")
        assert found.pop("rng.cpu.1").dtype == torch.uint8
        assert found.keys() == want.keys()
        for key, tensor in found.items():
            assert tensor.shape == want[key].shape
            assert tensor.is_floating_point() <= bool(tensor.isfinite().all())


@pytest.mark.parametrize(
    ("before", "after"),
    [("ep", "pp"), ("pp", "pp"), pytest.param("one", "ep", marks=pytest.mark.slow)],
)
def test_any_mesh_resumes(
    runs: dict[str, Path], text_file: Path, tmp_path: Path, before: str, after: str
) -> None:
    out = tmp_path / "run"
    shutil.copytree(runs[before], out)
    shutil.rmtree(out / "checkpoints" / "step-00000006")
    words = {"out": str(out)}
    go(make_plan(*MESHES[after]), words, tmp_path, is_resumed=True)
    want, found = losses(runs[before]), losses(out)
    assert found[:3] == want[:3]
    if before == after:
        # to the bit, the weights too
        assert found == want
        whole = tensors(runs[before] / "checkpoints" / "step-00000006")
        for key, tensor in tensors(out / "checkpoints" / "step-00000006").items():
            assert torch.equal(tensor, whole[key]), key
    else:
        assert found[3] == pytest.approx(want[3], abs=1e-6)
        assert found == pytest.approx(want, abs=1e-5)


@pytest.mark.parametrize("name", ["pp", "ep"])
def test_the_model_is_exported_to_the_bit(runs: dict[str, Path], name: str) -> None:
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(runs[name] / "model")
    saved = tensors(runs[name] / "checkpoints" / "step-00000006")
    found = model_tensors(model)
    assert len(found) > 20
    for key, tensor in found.items():
        assert torch.equal(tensor, saved[key]), key


def break_a_layer(plan: Path, words: dict[str, Any], bad_rank: int) -> int:
    """A run in which one rank's layer is infinite in the second step."""
    step = ParallelTrainer.train_step

    def break_step_mend(self: ParallelTrainer) -> StepRecord:
        if self.step != 1 or dist.get_rank() != bad_rank:
            return step(self)
        parameters = dict(self.runtime.modules.named_parameters())
        parameter = next(p for name, p in parameters.items() if name.endswith("down_proj"))
        kept = parameter.detach().clone()
        parameter.data.fill_(math.inf)
        record = step(self)
        assert bool(parameter.isinf().all()), "a skipped step changes no weight"
        parameter.data.copy_(kept)
        return record

    ParallelTrainer.train_step = break_step_mend  # type: ignore[method-assign]
    return train(plan, words)


def test_a_loss_that_is_not_finite_stops_all_ranks_and_names_the_layer(
    text_file: Path, tmp_path: Path
) -> None:
    path, out = tmp_path / "plan.json", tmp_path / "run"
    make_plan(2, 1, 1).save(path)
    outcomes = rank_outcomes(break_a_layer, 2, path, stated(text_file, out), 1)
    for rank, outcome in enumerate(outcomes):
        assert "TrainingError" in outcome.error
        where = f"rank {rank} (pp={rank}): loss of step 2"
        assert f"{where} must be a finite number, got" in outcome.error
        assert "First seen at rank 1 (pp=1): layer 1." in outcome.error
    # the checkpoint before the first step is whole
    assert tensors(out / "checkpoints" / "step-00000000")


def test_steps_that_are_not_finite_are_skipped_if_asked(text_file: Path, tmp_path: Path) -> None:
    path, out = tmp_path / "plan.json", tmp_path / "run"
    make_plan(2, 1, 1).save(path)
    words = stated(text_file, out, non_finite="skip", steps=3)
    assert run_ranks(break_a_layer, 2, path, words, 1) == [0, 0]
    first, second, third = losses(out)
    assert not math.isfinite(second)
    assert third == pytest.approx(first, abs=0.2)


def test_a_missing_shard_is_refused_on_all_ranks(runs: dict[str, Path], tmp_path: Path) -> None:
    out = tmp_path / "run"
    shutil.copytree(runs["pp"], out)
    checkpoint = out / "checkpoints" / "step-00000006"
    (shard,) = checkpoint.glob("rank-00001-*")
    shard.unlink()
    path = tmp_path / "plan.json"
    make_plan(2, 1, 1).save(path)
    first, second = rank_outcomes(train, 2, path, {"out": str(out)}, True)
    message = f"hold the files it was written with, got no {shard.name}. Delete {checkpoint} to go"
    assert message in first.error
    assert "rank 1: rank 0 cannot use the checkpoint: load_checkpoint: " in second.error
    assert message in second.error


def test_another_models_checkpoint_is_refused(
    runs: dict[str, Path], text_file: Path, tmp_path: Path
) -> None:
    out = tmp_path / "run"
    shutil.copytree(runs["one"], out)
    path = tmp_path / "plan.json"
    make_plan(1, 1, 1).save(path)
    words = {"out": str(out), "model_override": TINY | {"num_experts": 8}}
    (outcome,) = rank_outcomes(train, 1, path, words, True)
    assert "resume: model_override must stay as in the checkpoint" in outcome.error


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({}, "world_size must be the 4 ranks that were started, got 2. Start 2 processes, or"),
        ({"world_size": 4, "mesh": Mesh(pp=1, tp=4)}, "mesh.tp must be 1: tensor parallelism"),
        (
            {"world_size": 4, "mesh": Mesh(pp=4), "layers_per_stage": (1, 1, 1, 1)},
            "the model's layers must be at least the plan's 4 stages, got 2",
        ),
        (
            {"world_size": 4, "mesh": Mesh(pp=2, dp=2), "layers_per_stage": (1, 2)},
            r"layers_per_stage must be the model's 2 layers in all, got 3 in \(1, 2\)",
        ),
        (
            {"world_size": 4, "mesh": Mesh(pp=1, dp=4), "model_digest": "0" * 32},
            "model_digest must be [0-9a-f]{32}, the model at hand, got 0000",
        ),
    ],
)
def test_check_plan_refuses_with_the_numbers(changes: dict[str, Any], message: str) -> None:
    defaults: dict[str, Any] = {"layers_per_stage": (2,)} if changes else {}
    plan = make_plan(1, 1, 2, **(defaults | changes))
    config = build_config(TrainSettings(model_override=TINY), 256)
    with pytest.raises(PlanError, match=message):
        check_plan(plan, config, 4)


def test_ep_above_the_experts_is_refused() -> None:
    plan = make_plan(1, 1, 8, num_microbatches=1)
    config = build_config(TrainSettings(model_override=TINY), 256)
    with pytest.raises(PlanError, match=r"mesh.ep must be at most the model's 4 experts, got 8"):
        check_plan(plan, config, 8)
