import json
import os
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from piper_kernels.errors import CheckpointError
from piper_kernels.huggingface.checkpoint_folders import INDEX, fuse_folder, split_folder
from piper_kernels.huggingface.checkpoint_names import MIXTRAL_NAMES, NEMOTRON_NAMES, QWEN_NAMES
from piper_kernels.testing.model_steps import token_ids
from piper_kernels.testing.tiny_models import tiny_model


def assert_bit_equal(ours: dict[str, Tensor], theirs: dict[str, Tensor]) -> None:
    assert ours.keys() == theirs.keys()
    for key, tensor in theirs.items():
        assert ours[key].dtype == tensor.dtype
        assert torch.equal(ours[key], tensor), key


def saved_model(family: str, folder: Path, *, is_fused: bool) -> Any:
    model = tiny_model(family, num_experts_per_tok=2)
    model.save_pretrained(folder, save_original_format=not is_fused)
    return model


FAMILIES = {"mixtral": MIXTRAL_NAMES, "qwen3_moe": QWEN_NAMES, "nemotron_h": NEMOTRON_NAMES}


@pytest.mark.parametrize("family", FAMILIES)
def test_fuse_folder_makes_what_the_model_holds(family: str, tmp_path: Path) -> None:
    model = saved_model(family, tmp_path / "split", is_fused=False)
    fuse_folder(tmp_path / "split", tmp_path / "fused", names=FAMILIES[family])
    reloaded = type(model).from_pretrained(tmp_path / "fused", experts_implementation="piper")
    assert_bit_equal(dict(reloaded.state_dict()), dict(model.state_dict()))
    ids = token_ids()
    with torch.no_grad():
        torch.testing.assert_close(reloaded(ids).logits, model(ids).logits, rtol=0, atol=1e-5)


@pytest.mark.parametrize("family", FAMILIES)
def test_split_folder_makes_what_transformers_writes(family: str, tmp_path: Path) -> None:
    model = saved_model(family, tmp_path / "fused", is_fused=True)
    model.save_pretrained(tmp_path / "theirs")
    split_folder(tmp_path / "fused", tmp_path / "ours", names=FAMILIES[family])
    ours = load_file(tmp_path / "ours" / "model.safetensors")
    assert_bit_equal(ours, load_file(tmp_path / "theirs" / "model.safetensors"))
    reloaded = type(model).from_pretrained(tmp_path / "ours")
    assert_bit_equal(dict(reloaded.state_dict()), dict(model.state_dict()))


def test_fuse_folder_in_many_shards(tmp_path: Path) -> None:
    model = saved_model("mixtral", tmp_path / "split", is_fused=False)
    (tmp_path / "split" / "tokenizer.json").write_text("{}")
    fuse_folder(tmp_path / "split", tmp_path / "fused", max_shard_bytes=30_000)
    files = sorted(path.name for path in (tmp_path / "fused").iterdir())
    shards = [name for name in files if name.endswith(".safetensors")]
    assert len(shards) > 2
    assert shards[0] == f"model-00001-of-{len(shards):05d}.safetensors"
    assert {"config.json", "tokenizer.json", "model.safetensors.index.json"} < set(files)
    sizes = [sum(t.nbytes for t in load_file(tmp_path / "fused" / s).values()) for s in shards]
    biggest = max(t.nbytes for t in model.state_dict().values())
    assert all(size <= max(30_000, biggest) for size in sizes)
    reloaded = type(model).from_pretrained(tmp_path / "fused")
    assert_bit_equal(dict(reloaded.state_dict()), dict(model.state_dict()))
    split_folder(tmp_path / "fused", tmp_path / "back", names=MIXTRAL_NAMES)
    assert_bit_equal(
        load_file(tmp_path / "back" / "model.safetensors"),
        load_file(tmp_path / "split" / "model.safetensors"),
    )


def test_fuse_folder_reads_the_number_of_experts_from_the_config(tmp_path: Path) -> None:
    saved_model("mixtral", tmp_path / "split", is_fused=False)
    file = tmp_path / "split" / "model.safetensors"
    state = {key: t for key, t in load_file(file).items() if ".experts.7." not in key}
    save_file(state, file)
    with pytest.raises(CheckpointError, match=r"every matrix of 8 experts.*experts\.7\.w1\.weight"):
        fuse_folder(tmp_path / "split", tmp_path / "fused")
    assert not (tmp_path / "fused").exists()


def test_fuse_folder_never_unpickles(tmp_path: Path) -> None:
    source = tmp_path / "pickled"
    source.mkdir()
    torch.save({"mlp.experts.0.w1.weight": torch.zeros(2)}, source / "pytorch_model.bin")
    with pytest.raises(
        CheckpointError, match=r"got pytorch_model\.bin\. Pickled weights are never"
    ):
        fuse_folder(source, tmp_path / "fused")


def test_fuse_folder_names_a_corrupt_file(tmp_path: Path) -> None:
    saved_model("mixtral", tmp_path / "split", is_fused=False)
    file = tmp_path / "split" / "model.safetensors"
    file.write_bytes(file.read_bytes()[:-100])
    with pytest.raises(CheckpointError, match=r"model\.safetensors must be a complete safetensors"):
        fuse_folder(tmp_path / "split", tmp_path / "fused")
    with pytest.raises(CheckpointError, match=r"hold \*\.safetensors files, got none"):
        fuse_folder(tmp_path / "absent", tmp_path / "fused")


def test_fuse_folder_refuses_a_key_in_two_files(tmp_path: Path) -> None:
    source = tmp_path / "split"
    source.mkdir()
    for name in ("a.safetensors", "b.safetensors"):
        save_file({"mlp.experts.0.w1.weight": torch.zeros(2, 2)}, source / name)
    with pytest.raises(CheckpointError, match=r"must occur in one file only, got again b\.safe"):
        fuse_folder(source, tmp_path / "fused")


def test_fuse_folder_leaves_an_existing_destination_alone(tmp_path: Path) -> None:
    saved_model("mixtral", tmp_path / "split", is_fused=False)
    (tmp_path / "fused").mkdir()
    (tmp_path / "fused" / "precious").write_text("kept")
    with pytest.raises(CheckpointError, match="destination must not exist yet"):
        fuse_folder(tmp_path / "split", tmp_path / "fused")
    assert (tmp_path / "fused" / "precious").read_text() == "kept"


def test_fuse_folder_is_on_disk_before_it_takes_its_name(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    saved_model("mixtral", tmp_path / "split", is_fused=False)
    events: list[str] = []
    fsync, rename = os.fsync, os.rename

    def record_fsync(descriptor: int) -> None:
        events.append(os.path.basename(os.readlink(f"/proc/self/fd/{descriptor}")))
        fsync(descriptor)

    def record_rename(source: Path, destination: Path) -> None:
        events.append(f"rename to {destination.name}")
        rename(source, destination)

    monkeypatch.setattr(os, "fsync", record_fsync)
    monkeypatch.setattr(os, "rename", record_rename)
    fuse_folder(tmp_path / "split", tmp_path / "fused")
    before = events[: events.index("rename to fused")]
    files = {path.name for path in (tmp_path / "fused").iterdir()}
    assert "model.safetensors" in files
    assert files <= set(before)
    # the folder that was renamed, before, and its parent, after
    assert any(name.startswith(".fused.") for name in before)
    assert events[-1] == tmp_path.name


def test_fuse_folder_leaves_nothing_behind_when_the_disk_is_full(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    saved_model("mixtral", tmp_path / "split", is_fused=False)
    written: list[Path] = []

    def save_until_full(tensors: dict[str, Tensor], path: Path, metadata: object) -> None:
        if written:
            raise OSError(28, "No space left on device")
        path.write_bytes(b"half a file")
        written.append(path)

    monkeypatch.setattr("piper_kernels.huggingface.checkpoint_folders.save_file", save_until_full)
    with pytest.raises(CheckpointError, match=r"fused' must be writable.*No space left"):
        fuse_folder(tmp_path / "split", tmp_path / "fused", max_shard_bytes=30_000)
    assert written
    assert [path.name for path in tmp_path.iterdir()] == ["split"]


def test_fuse_folder_misses_what_the_index_lists(tmp_path: Path) -> None:
    """A lost shard without experts in it: its keys would silently be absent from the result."""
    saved_model("mixtral", tmp_path / "whole", is_fused=False)
    fuse_folder(tmp_path / "whole", tmp_path / "fused")
    split_folder(tmp_path / "fused", tmp_path / "split", names=MIXTRAL_NAMES, max_shard_bytes=9_000)
    index = json.loads((tmp_path / "split" / INDEX).read_text())["weight_map"]
    shard = tmp_path / "split" / index["lm_head.weight"]
    others = [key for key, name in index.items() if name == shard.name]
    save_file({key: torch.zeros(1) for key in others if key != "lm_head.weight"}, shard)
    with pytest.raises(
        CheckpointError, match=r"must hold 'lm_head\.weight', as model\.safetensors\.index\.json"
    ):
        fuse_folder(tmp_path / "split", tmp_path / "again")
    shard.unlink()
    with pytest.raises(CheckpointError, match=shard.name):
        fuse_folder(tmp_path / "split", tmp_path / "again")
    assert not (tmp_path / "again").exists()


def test_fuse_folder_reads_the_files_of_the_index_only(tmp_path: Path) -> None:
    """Repositories carry the same weights a second time, e.g. as consolidated.safetensors."""
    model = saved_model("mixtral", tmp_path / "whole", is_fused=False)
    source = tmp_path / "whole"
    state = load_file(source / "model.safetensors")
    weight_map = dict.fromkeys(state, "model.safetensors")
    (source / INDEX).write_text(json.dumps({"weight_map": weight_map}))
    save_file(
        {"layers.0.feed_forward.experts.0.w1": torch.zeros(2)}, source / "consolidated.safetensors"
    )
    fuse_folder(source, tmp_path / "fused")
    reloaded = type(model).from_pretrained(tmp_path / "fused")
    assert_bit_equal(dict(reloaded.state_dict()), dict(model.state_dict()))


@pytest.mark.parametrize("name", ["config.json", INDEX])
@pytest.mark.parametrize(
    ("text", "match"),
    [("{half", "must be a readable JSON file"), ("[]", "must be a JSON object, got list")],
)
def test_fuse_folder_names_a_corrupt_json_file(
    tmp_path: Path, name: str, text: str, match: str
) -> None:
    saved_model("mixtral", tmp_path / "split", is_fused=False)
    (tmp_path / "split" / name).write_text(text)
    with pytest.raises(CheckpointError, match=f"{name} {match}"):
        fuse_folder(tmp_path / "split", tmp_path / "fused")


def test_fuse_folder_takes_an_empty_text_config(tmp_path: Path) -> None:
    saved_model("mixtral", tmp_path / "split", is_fused=False)
    file = tmp_path / "split" / "config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | {"text_config": None}))
    fuse_folder(tmp_path / "split", tmp_path / "fused")
    assert (tmp_path / "fused").is_dir()
