import errno
import hashlib
import json
import logging
import os
import pickle
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file
from safetensors.torch import save as to_bytes
from torch.distributed.checkpoint.hf_storage import HuggingFaceStorageReader
from torch.distributed.checkpoint.state_dict_loader import load

from piper_kernels.errors import CheckpointError
from piper_kernels.train import checkpoint as checkpoint_module
from piper_kernels.train.checkpoint import latest_checkpoint, load_checkpoint, save_checkpoint
from piper_kernels.train.checkpoint_keys import model_tensors, moment_tensors
from piper_kernels.train.loop import Trainer
from piper_kernels.train.manifest import MANIFEST, read_manifest

Make = Callable[..., Trainer]
IDENTITY = {"text_sha256": "text", "model_digest": "model"}
WEIGHTS = "model-00001-of-00001.safetensors"


def save(folder: Path, trainer: Trainer, keep: int = 2) -> Path:
    return save_checkpoint(folder, trainer, keep=keep, **IDENTITY)


def state_of(trainer: Trainer) -> dict[str, torch.Tensor]:
    tensors = model_tensors(trainer.model) | moment_tensors(trainer.model, trainer.optimizer)
    return {key: tensor.clone() for key, tensor in tensors.items()}


@pytest.fixture
def saved(make_trainer: Make, tmp_path: Path) -> tuple[Trainer, Path]:
    """A trainer after two steps, and its checkpoint; there is one of step 1 as well."""
    trainer = make_trainer()
    for _ in range(2):
        trainer.train_step()
        path = save(tmp_path / "checkpoints", trainer)
    return trainer, path


def test_checkpoint_brings_everything_back(make_trainer: Make, saved: tuple[Trainer, Path]) -> None:
    trainer, path = saved
    assert path.name == "step-00000002"
    noise = torch.randn(3)
    state = state_of(trainer)
    other = make_trainer(seed=5)
    load_checkpoint(path, other, **IDENTITY)
    assert other.step == 2
    loaded = state_of(other)
    assert loaded.keys() == state.keys()
    assert all(torch.equal(loaded[key], tensor) for key, tensor in state.items())
    # the generator stood where it stood when the checkpoint was written
    assert torch.equal(torch.randn(3), noise)


def test_checkpoint_holds_one_key_per_logical_expert(saved: tuple[Trainer, Path]) -> None:
    trainer, path = saved
    index = json.loads((path / "model.safetensors.index.json").read_text())
    assert index["weight_map"].keys() == {*state_of(trainer), "rng.cpu"}
    # anyone can read two experts of one layer, in another placement, without this package
    placed = {f"experts.1.{expert}.down_proj.exp_avg": torch.zeros(16, 16) for expert in (3, 0)}
    with pytest.warns(UserWarning, match="torch.distributed is disabled"):
        load(placed, storage_reader=HuggingFaceStorageReader(str(path)), no_dist=True)
    moments = trainer.optimizer.state[trainer.model.model.layers[1].mlp.experts.down_proj]
    for expert in (3, 0):
        key = f"experts.1.{expert}.down_proj.exp_avg"
        assert torch.equal(placed[key], moments["exp_avg"][expert])


def test_checkpoint_of_step_0_has_no_moments(make_trainer: Make, tmp_path: Path) -> None:
    trainer = make_trainer()
    path = save(tmp_path, trainer)
    fresh = make_trainer(seed=5)
    load_checkpoint(path, fresh, **IDENTITY)
    assert moment_tensors(fresh.model, fresh.optimizer) == {}
    assert torch.equal(fresh.model.lm_head.weight, trainer.model.lm_head.weight)


def test_checkpoint_is_never_unpickled(
    make_trainer: Make, saved: tuple[Trainer, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*_: object, **__: object) -> None:
        raise AssertionError("something was unpickled")

    monkeypatch.setattr(pickle, "load", refuse)
    monkeypatch.setattr(pickle, "loads", refuse)
    monkeypatch.setattr(torch, "load", refuse)
    load_checkpoint(saved[1], make_trainer(), **IDENTITY)


def test_save_checkpoint_splits_large_tensors_over_files(
    make_trainer: Make, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(checkpoint_module, "_FILE_BYTES", 50_000)
    trainer = make_trainer()
    trainer.train_step()
    path = save(tmp_path, trainer)
    assert len(list(path.glob("*.safetensors"))) == 5
    other = make_trainer(seed=5)
    load_checkpoint(path, other, **IDENTITY)
    assert torch.equal(other.model.lm_head.weight, trainer.model.lm_head.weight)


def test_save_checkpoint_keeps_the_newest(make_trainer: Make, tmp_path: Path) -> None:
    trainer = make_trainer()
    for _ in range(4):
        trainer.train_step()
        save(tmp_path, trainer, keep=2)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["step-00000003", "step-00000004"]
    assert latest_checkpoint(tmp_path).name == "step-00000004"
    assert save(tmp_path, trainer) == latest_checkpoint(tmp_path)


def test_latest_checkpoint_ignores_what_a_kill_left(saved: tuple[Trainer, Path]) -> None:
    trainer, path = saved
    folder = path.parent
    shutil.copytree(path, folder / ".writing-step-00000003")
    shutil.copytree(path, folder / ".deleting-step-00000000")
    assert latest_checkpoint(folder) == path
    trainer.train_step()
    save(folder, trainer)
    names = sorted(path.name for path in folder.iterdir())
    assert names == ["step-00000002", "step-00000003"]


def test_copies_under_other_names_are_neither_read_nor_deleted(
    saved: tuple[Trainer, Path],
) -> None:
    trainer, path = saved
    folder = path.parent
    for name in ("step-00000002.bak", "step-best", "step-99"):
        shutil.copytree(path, folder / name)
    assert latest_checkpoint(folder) == path
    trainer.train_step()
    save(folder, trainer, keep=1)
    names = sorted(entry.name for entry in folder.iterdir())
    assert names == ["step-00000002.bak", "step-00000003", "step-99", "step-best"]


def test_latest_checkpoint_says_when_there_is_none(tmp_path: Path) -> None:
    message = r"latest_checkpoint: .* must hold a checkpoint, got none. It was stopped before its"
    with pytest.raises(CheckpointError, match=message):
        latest_checkpoint(tmp_path)


@pytest.mark.parametrize("moment", ["write", "fsync", "rename"])
def test_save_checkpoint_on_a_full_disk_leaves_the_last_one(
    make_trainer: Make,
    saved: tuple[Trainer, Path],
    monkeypatch: pytest.MonkeyPatch,
    moment: str,
) -> None:
    trainer, path = saved
    trainer.train_step()

    def full(*_: object) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    owner, name = {
        "write": (checkpoint_module, "write_tensors"),
        "fsync": (os, "fsync"),
        "rename": (os, "rename"),
    }[moment]
    with monkeypatch.context() as patch:
        patch.setattr(owner, name, full)
        message = (
            r"save_checkpoint: .*checkpoints must take a checkpoint, got .*No space left on .*\. "
            r"Free the disk, then go on with --resume: the checkpoint before is untouched."
        )
        with pytest.raises(CheckpointError, match=message):
            save(path.parent, trainer)
    assert sorted(entry.name for entry in path.parent.iterdir()) == ["step-00000001", path.name]
    load_checkpoint(path, make_trainer(), **IDENTITY)
    assert save(path.parent, trainer).name == "step-00000003"


def test_save_checkpoint_asks_for_space_first(
    saved: tuple[Trainer, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    trainer, path = saved
    trainer.train_step()
    usage = shutil.disk_usage(path)._replace(free=1000)
    monkeypatch.setattr(shutil, "disk_usage", lambda _: usage)
    message = r"free space under .*checkpoints must be at least \d{6} bytes, got 1000. Free some"
    with pytest.raises(CheckpointError, match=message):
        save(path.parent, trainer)
    assert latest_checkpoint(path.parent) == path


def test_load_checkpoint_names_what_is_damaged(
    make_trainer: Make, saved: tuple[Trainer, Path]
) -> None:
    _, path = saved
    remedy = r" Delete .*step-00000002 to go on from step-00000001.$"
    weights = path / WEIGHTS
    whole = weights.read_bytes()

    def expect(message: str) -> None:
        with pytest.raises(CheckpointError, match=message + remedy):
            load_checkpoint(path, make_trainer(), **IDENTITY)

    weights.write_bytes(whole[:-100])
    expect(rf"{WEIGHTS} must have {len(whole)} bytes, got {len(whole) - 100}\.")
    weights.write_bytes(whole[:-1] + bytes([whole[-1] ^ 1]))
    expect(rf"{WEIGHTS} must have the sha256 .*, so it was damaged\.")
    weights.unlink()
    expect(rf"must hold the files it was written with, got no {WEIGHTS}\.")
    weights.write_bytes(whole)
    (path / "other.safetensors").write_bytes(whole)
    expect(r"must hold the files it was written with, got also other.safetensors\.")
    (path / "other.safetensors").unlink()
    manifest = (path / MANIFEST).read_text()
    (path / MANIFEST).write_text(manifest[:40])
    expect(r"checkpoint must be a checkpoint of piper train, got .*json: text must be JSON.*")
    (path / MANIFEST).write_text(manifest.replace("piper-train-checkpoint", "other"))
    expect(r"must be a checkpoint of piper train, got .*format must be 'piper-train-checkpoint'.*")
    (path / MANIFEST).write_bytes(b"\xff")
    expect(r"must be a checkpoint of piper train, got .*codec can't decode.*")
    (path / MANIFEST).unlink()
    expect(r"must be a checkpoint of piper train, got .* without a readable checkpoint.json.*")
    shutil.rmtree(path.parent / "step-00000001")
    remedy = r" Start anew with --overwrite.$"
    expect(r"must be a checkpoint of piper train, got .* without a readable checkpoint.json .*")


def forge(path: Path, content: bytes) -> None:
    """Replace the weights, and the manifest's length and hash with them."""
    (path / WEIGHTS).write_bytes(content)
    manifest = json.loads((path / MANIFEST).read_text())
    manifest["files"][WEIGHTS] = {
        "num_bytes": len(content),
        "sha256": hashlib.sha256(content).hexdigest(),
    }
    (path / MANIFEST).write_text(json.dumps(manifest))


def test_load_checkpoint_refuses_a_forged_file(
    make_trainer: Make, saved: tuple[Trainer, Path]
) -> None:
    _, path = saved
    whole = (path / WEIGHTS).read_bytes()
    tensors = load_file(path / WEIGHTS)
    with safe_open(path / WEIGHTS, "pt") as opened:
        metadata = opened.metadata()
    tensors["rng.cpu"].zero_()
    contents = [b"", bytes(1000), pickle.dumps(["a pickle"]), whole[: len(whole) // 2]]
    for content in [*contents, to_bytes(tensors, metadata)]:
        forge(path, content)
        message = r"load_checkpoint: checkpoint must be readable, got .*. Delete .*step-00000002 to"
        with pytest.raises(CheckpointError, match=message):
            load_checkpoint(path, make_trainer(), **IDENTITY)
    forge(path, whole)
    load_checkpoint(path, make_trainer(), **IDENTITY)


@pytest.mark.parametrize("step", [-1, 1, 10**30])
def test_load_checkpoint_refuses_another_step(
    make_trainer: Make, saved: tuple[Trainer, Path], step: int
) -> None:
    _, path = saved
    manifest = json.loads((path / MANIFEST).read_text())
    (path / MANIFEST).write_text(json.dumps(manifest | {"step": step}))
    with pytest.raises(CheckpointError, match=r"must be a checkpoint of piper train, got .*step"):
        load_checkpoint(path, make_trainer(), **IDENTITY)


def test_load_checkpoint_refuses_another_text_or_model(
    make_trainer: Make, saved: tuple[Trainer, Path]
) -> None:
    _, path = saved
    message = r"text must be the one the checkpoint was made with .text\.\.\.., got other"
    with pytest.raises(CheckpointError, match=message):
        load_checkpoint(path, make_trainer(), text_sha256="other", model_digest="model")
    message = r"model must be the one the checkpoint was made with .model\.\.\.., got other"
    with pytest.raises(CheckpointError, match=message):
        load_checkpoint(path, make_trainer(), text_sha256="text", model_digest="other")


def test_load_checkpoint_compares_names_and_shapes(
    make_trainer: Make, saved: tuple[Trainer, Path]
) -> None:
    _, path = saved
    override = {"hidden_size": 16, "num_attention_heads": 2, "num_key_value_heads": 2}
    common = {**override, "intermediate_size": 16, "num_hidden_layers": 2}
    many, few = {**common, "num_experts": 5}, {**common, "num_experts": 3}
    message = r"must hold experts.0.4.down_proj, got nothing by this name"
    with pytest.raises(CheckpointError, match=message):
        load_checkpoint(path, make_trainer(model_override=many), **IDENTITY)
    message = r"must hold this model's tensors only, got experts.0.3.down_proj"
    with pytest.raises(CheckpointError, match=message):
        load_checkpoint(path, make_trainer(model_override=few), **IDENTITY)
    wide = {**common, "num_experts": 4, "intermediate_size": 24}
    message = r"hold experts.0.0.gate_up_proj as .48, 16. torch.float32, got .32, 16. torch.float32"
    with pytest.raises(CheckpointError, match=message):
        load_checkpoint(path, make_trainer(model_override=wide), **IDENTITY)


def test_load_checkpoint_warns_of_other_versions(
    make_trainer: Make, saved: tuple[Trainer, Path], caplog: pytest.LogCaptureFixture
) -> None:
    _, path = saved
    with caplog.at_level(logging.WARNING):
        load_checkpoint(path, make_trainer(), **IDENTITY)
    assert caplog.records == []
    file = path / MANIFEST
    versions = read_manifest(path, "").versions
    assert versions.keys() == {"torch", "transformers", "numpy"}
    file.write_text(file.read_text().replace(versions["torch"], "1.0"))
    with caplog.at_level(logging.WARNING):
        load_checkpoint(path, make_trainer(), **IDENTITY)
    assert "'torch': '1.0'" in caplog.text
