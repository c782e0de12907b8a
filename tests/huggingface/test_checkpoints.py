from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import PreTrainedModel

from piper_kernels.errors import CheckpointError
from piper_kernels.huggingface.checkpoint_folders import fuse_folder, split_folder
from piper_kernels.huggingface.checkpoint_names import (
    MIXTRAL_NAMES,
    NEMOTRON_NAMES,
    QWEN_NAMES,
    ExpertNames,
    find_names,
)
from piper_kernels.huggingface.checkpoints import fuse_experts, split_experts
from piper_kernels.testing.model_steps import token_ids
from piper_kernels.testing.tiny_models import tiny_model

CONVENTIONS = {"mixtral": MIXTRAL_NAMES, "qwen": QWEN_NAMES, "nemotron": NEMOTRON_NAMES}


def per_expert_state(
    names: ExpertNames,
    *,
    num_experts: int = 12,
    hidden_size: int = 6,
    intermediate_size: int = 4,
    num_layers: int = 2,
    dtype: torch.dtype = torch.bfloat16,
) -> dict[str, Tensor]:
    """Random matrices; ids are strings, so "10" and "11" sort before "2" (field report A54)."""
    embedding = names.to_per_expert("model.embed.weight")
    state: dict[str, Tensor] = {embedding: torch.randn(3, hidden_size).to(dtype)}
    for layer in range(num_layers):
        block = names.to_per_expert(f"model.layers.{layer}.mlp.")
        state[f"{block}gate.weight"] = torch.randn(num_experts, hidden_size).to(dtype)
        for expert in sorted(map(str, range(num_experts))):
            for part in names.parts:
                size = (intermediate_size, hidden_size)
                size = size[::-1] if part == names.down else size
                key = f"{block}experts.{expert}.{part}.weight"
                state[key] = torch.randn(size).to(dtype)
    return state


def assert_bit_equal(ours: dict[str, Tensor], theirs: dict[str, Tensor]) -> None:
    assert ours.keys() == theirs.keys()
    for key, tensor in theirs.items():
        assert ours[key].dtype == tensor.dtype
        assert torch.equal(ours[key], tensor), key
        assert ours[key].is_contiguous(), key


@pytest.mark.parametrize("convention", CONVENTIONS)
def test_fuse_experts_puts_every_matrix_at_its_expert(convention: str) -> None:
    names = CONVENTIONS[convention]
    state = per_expert_state(names)
    fused = fuse_experts(state, names=names)
    for layer in (0, 1):
        prefix = f"model.layers.{layer}.mlp.experts"
        first, down = fused[f"{prefix}.{names.fused_first}"], fused[f"{prefix}.down_proj"]
        prefix = names.to_per_expert(prefix)
        assert down.shape == (12, 6, 4)
        for e in range(12):
            assert torch.equal(down[e], state[f"{prefix}.{e}.{names.down}.weight"])
            ups = [names.up] if names.gate is None else [names.gate, names.up]
            rows = torch.cat([state[f"{prefix}.{e}.{part}.weight"] for part in ups])
            assert torch.equal(first[e], rows)
    embedding = "model.embed.weight"
    assert fused[embedding] is state[names.to_per_expert(embedding)]
    assert len(fused) == 1 + 2 * 3


@given(
    convention=st.sampled_from(sorted(CONVENTIONS)),
    num_experts=st.integers(1, 13),
    hidden_size=st.integers(1, 9),
    intermediate_size=st.integers(1, 9),
    dtype=st.sampled_from([torch.float32, torch.bfloat16, torch.float16, torch.float64]),
    seed=st.integers(0, 2**16),
)
def test_split_experts_undoes_fuse_experts_bit_for_bit(
    convention: str,
    num_experts: int,
    hidden_size: int,
    intermediate_size: int,
    dtype: torch.dtype,
    seed: int,
) -> None:
    # narrow (I < H/2), wide and square experts alike: nothing depends on the sizes (A52)
    torch.manual_seed(seed)
    names = CONVENTIONS[convention]
    state = per_expert_state(
        names,
        num_experts=num_experts,
        hidden_size=hidden_size,
        intermediate_size=intermediate_size,
        num_layers=1,
        dtype=dtype,
    )
    assert_bit_equal(split_experts(fuse_experts(state, names=names), names=names), state)


def test_fuse_experts_keeps_nan_and_negative_zero() -> None:
    state = per_expert_state(QWEN_NAMES, num_experts=2, num_layers=1, dtype=torch.float32)
    key = "model.layers.0.mlp.experts.1.up_proj.weight"
    state[key][0, :3] = torch.tensor([torch.nan, -0.0, torch.inf])
    back = split_experts(fuse_experts(state), names=QWEN_NAMES)[key]
    assert torch.equal(back.view(torch.int32), state[key].view(torch.int32))


def test_find_names_of_both_conventions() -> None:
    assert find_names(per_expert_state(MIXTRAL_NAMES)) is MIXTRAL_NAMES
    assert find_names(per_expert_state(QWEN_NAMES)) is QWEN_NAMES


def test_find_names_refuses_neither_and_both() -> None:
    with pytest.raises(CheckpointError, match=r"got none\. Fused experts need no conversion"):
        find_names(["model.norm.weight", "mlp.experts.gate_up_proj"])
    both = {**per_expert_state(MIXTRAL_NAMES), **per_expert_state(QWEN_NAMES)}
    with pytest.raises(CheckpointError, match=r"w1.*gate_proj"):
        find_names(both)


def test_fuse_experts_renames_the_mixtral_block() -> None:
    state = per_expert_state(MIXTRAL_NAMES)
    assert "model.layers.1.block_sparse_moe.experts.10.w2.weight" in state
    fused = fuse_experts(state)
    assert "model.layers.1.mlp.experts.gate_up_proj" in fused
    assert "model.layers.1.mlp.gate.weight" in fused
    assert not [key for key in fused if "block_sparse_moe" in key]
    assert_bit_equal(split_experts(fused, names=MIXTRAL_NAMES), state)


def test_fuse_experts_passes_a_fused_layer_on() -> None:
    state = per_expert_state(QWEN_NAMES)
    fused = fuse_experts(state)
    one_of_each = {key: t for key, t in state.items() if ".1." not in key}
    one_of_each |= {key: t for key, t in fused.items() if ".1." in key}
    one_of_each = {k: t for k, t in one_of_each.items() if "layers.0.mlp.experts.1." not in k}
    one_of_each |= {k: t for k, t in state.items() if "layers.0.mlp.experts.1." in k}
    assert_bit_equal(fuse_experts(one_of_each), fused)


PREFIX = "model.layers.1.mlp.experts"


@pytest.mark.parametrize("part", ["gate_proj", "up_proj", "down_proj"])
@pytest.mark.parametrize("expert", [0, 10])
def test_fuse_experts_names_a_missing_key(part: str, expert: int) -> None:
    state = per_expert_state(QWEN_NAMES)
    key = f"{PREFIX}.{expert}.{part}.weight"
    del state[key]
    with pytest.raises(CheckpointError, match=f"no key '{key}'\\. The checkpoint is incomplete"):
        fuse_experts(state)


def test_fuse_experts_finds_a_missing_last_expert() -> None:
    state = per_expert_state(QWEN_NAMES)
    lost = [key for key in state if ".experts.11." in key]
    for key in lost:
        del state[key]
    # nothing in the keys tells that there were 12
    assert fuse_experts(state)[f"{PREFIX}.down_proj"].shape[0] == 11
    with pytest.raises(CheckpointError, match=r"experts\.11\.down_proj\.weight' and 2 more"):
        fuse_experts(state, num_experts=12)
    with pytest.raises(CheckpointError, match=r"hold experts 0 to 9 only, got the key .*\.10\."):
        fuse_experts(state, num_experts=10)


@pytest.mark.parametrize(
    ("odd", "hint"),
    [
        ("3.gate_proj.weight_scale_inv", "names gate_proj, up_proj, down_proj"),
        ("3.gate_proy.weight", "Did you mean 'gate_proj'"),
        ("3.w4.weight", "Known: down_proj, gate_proj, up_proj"),
        ("03.up_proj.weight", r"be <expert id>\.<name>\.weight"),
        ("-1.up_proj.weight", r"be <expert id>\.<name>\.weight"),
        ("3.up_proj.bias", "an expert key must"),
        ("three.up_proj.weight", "an expert key must"),
    ],
)
def test_fuse_experts_names_an_odd_key(odd: str, hint: str) -> None:
    state = per_expert_state(QWEN_NAMES)
    state[f"{PREFIX}.{odd}"] = torch.zeros(4, 6)
    with pytest.raises(CheckpointError, match=hint) as caught:
        fuse_experts(state)
    assert f"{PREFIX}.{odd}" in str(caught.value)


def test_fuse_experts_refuses_both_forms_of_one_layer() -> None:
    state = per_expert_state(QWEN_NAMES)
    state[f"{PREFIX}.gate_up_proj"] = torch.zeros(12, 8, 6)
    with pytest.raises(CheckpointError, match=r"either per-expert or fused below .*layers\.1"):
        fuse_experts(state)


@pytest.mark.parametrize("part", ["gate_proj", "up_proj", "down_proj"])
def test_fuse_experts_names_a_wrong_shape(part: str) -> None:
    state = per_expert_state(QWEN_NAMES)
    key = f"{PREFIX}.7.{part}.weight"
    state[key] = state[key].T.contiguous()
    with pytest.raises(CheckpointError, match=f"'{key}' must have shape"):
        fuse_experts(state)
    state[key] = torch.zeros(24, dtype=torch.bfloat16)
    with pytest.raises(CheckpointError, match=r"got \(24,\)"):
        fuse_experts(state)


def test_fuse_experts_names_a_wrong_dtype() -> None:
    state = per_expert_state(QWEN_NAMES)
    key = f"{PREFIX}.2.down_proj.weight"
    state[key] = state[key].float()
    with pytest.raises(CheckpointError, match=f"'{key}' must have dtype bfloat16.*got float32"):
        fuse_experts(state)


def test_split_experts_names_what_is_wrong() -> None:
    fused = fuse_experts(per_expert_state(QWEN_NAMES))
    without = {k: t for k, t in fused.items() if k != f"{PREFIX}.down_proj"}
    with pytest.raises(CheckpointError, match=f"must hold '{PREFIX}.down_proj'"):
        split_experts(without, names=QWEN_NAMES)
    without = {k: t for k, t in fused.items() if k != f"{PREFIX}.gate_up_proj"}
    with pytest.raises(CheckpointError, match=f"both of them.*got '{PREFIX}.down_proj'"):
        split_experts(without, names=QWEN_NAMES)
    odd = {**fused, f"{PREFIX}.gate_up_proj_bias": torch.zeros(12, 8)}
    with pytest.raises(CheckpointError, match="gate_up_proj_bias"):
        split_experts(odd, names=QWEN_NAMES)
    transposed = {**fused, f"{PREFIX}.gate_up_proj": torch.zeros(12, 6, 8)}
    with pytest.raises(CheckpointError, match=r"\(E, 2I, H\).*gpt-oss"):
        split_experts(transposed, names=QWEN_NAMES)
    with pytest.raises(CheckpointError, match=r"hold keys <prefix>\.experts\.gate_up_proj"):
        split_experts({"norm.weight": torch.zeros(2)}, names=QWEN_NAMES)


# -- folders, with files that transformers itself wrote --------------------------------------------


def saved_model(family: str, folder: Path, *, is_fused: bool) -> PreTrainedModel:
    model: PreTrainedModel = tiny_model(family, num_experts_per_tok=2)
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
    torch.save(per_expert_state(QWEN_NAMES), source / "pytorch_model.bin")
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
