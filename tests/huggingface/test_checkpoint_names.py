import pytest

from piper_kernels.errors import CheckpointError
from piper_kernels.huggingface.checkpoint_names import (
    MIXTRAL_NAMES,
    NEMOTRON_NAMES,
    QWEN_NAMES,
    ExpertNames,
    find_names,
)


def keys_of(names: ExpertNames) -> list[str]:
    return [f"model.layers.0.mlp.experts.{e}.{part}.weight" for e in "01" for part in names.parts]


def test_find_names_of_both_conventions() -> None:
    assert find_names(["lm_head.weight", *keys_of(MIXTRAL_NAMES)]) is MIXTRAL_NAMES
    assert find_names(keys_of(QWEN_NAMES)) is QWEN_NAMES


def test_find_names_is_not_misled_by_dense_and_shared_mlps() -> None:
    dense = ["layers.0.mlp.gate_proj.weight", "layers.1.mlp.shared_experts.up_proj.weight"]
    assert find_names([*dense, *keys_of(MIXTRAL_NAMES)]) is MIXTRAL_NAMES


def test_find_names_refuses_neither_and_both() -> None:
    with pytest.raises(CheckpointError, match=r"got none\. Fused experts need no conversion"):
        find_names(["model.norm.weight", "mlp.experts.gate_up_proj"])
    with pytest.raises(CheckpointError, match=r"w1.*gate_proj"):
        find_names([*keys_of(MIXTRAL_NAMES), *keys_of(QWEN_NAMES)])


def test_expert_names_rename_there_and_back() -> None:
    key = "model.layers.3.block_sparse_moe.gate.weight"
    assert MIXTRAL_NAMES.to_fused(key) == "model.layers.3.mlp.gate.weight"
    assert MIXTRAL_NAMES.to_per_expert("model.layers.3.mlp.gate.weight") == key
    assert NEMOTRON_NAMES.to_fused("backbone.norm_f.weight") == "model.norm_f.weight"
    assert QWEN_NAMES.to_fused(key) == key


def test_expert_names_of_gated_and_ungated_experts() -> None:
    assert MIXTRAL_NAMES.parts == ("w1", "w3", "w2")
    assert MIXTRAL_NAMES.fused_first == "gate_up_proj"
    assert NEMOTRON_NAMES.parts == ("up_proj", "down_proj")
    assert NEMOTRON_NAMES.fused_first == "up_proj"
