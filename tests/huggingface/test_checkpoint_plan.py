from dataclasses import replace

import pytest

from piper_kernels.errors import CheckpointError
from piper_kernels.huggingface.checkpoint_names import MIXTRAL_NAMES, QWEN_NAMES
from piper_kernels.huggingface.checkpoint_plan import (
    Copy,
    Slice,
    Stack,
    TensorInfo,
    plan_fusion,
    plan_split,
    target_bytes,
)

PREFIX = "model.layers.1.mlp.experts"
E, H, I = 12, 6, 4


def per_expert_infos() -> dict[str, TensorInfo]:
    """Two layers of twelve experts; ids are strings, so "10" and "11" sort before "2"."""
    infos = {"model.embed.weight": TensorInfo(shape=(3, H), dtype="BF16")}
    for layer in (0, 1):
        for expert in sorted(map(str, range(E))):
            for part in QWEN_NAMES.parts:
                shape = (H, I) if part == "down_proj" else (I, H)
                key = f"model.layers.{layer}.mlp.experts.{expert}.{part}.weight"
                infos[key] = TensorInfo(shape=shape, dtype="BF16")
    return infos


def fused_infos() -> dict[str, TensorInfo]:
    infos = {"model.embed.weight": TensorInfo(shape=(3, H), dtype="BF16")}
    for layer in (0, 1):
        prefix = f"model.layers.{layer}.mlp.experts"
        infos[f"{prefix}.gate_up_proj"] = TensorInfo(shape=(E, 2 * I, H), dtype="BF16")
        infos[f"{prefix}.down_proj"] = TensorInfo(shape=(E, H, I), dtype="BF16")
    return infos


def test_plan_fusion_orders_experts_by_number() -> None:
    plan = plan_fusion(per_expert_infos(), QWEN_NAMES)
    assert list(plan) == list(fused_infos())
    assert plan["model.embed.weight"] == Copy(source="model.embed.weight")
    step = plan[f"{PREFIX}.gate_up_proj"]
    assert isinstance(step, Stack)
    assert step.sources == tuple(
        (f"{PREFIX}.{e}.gate_proj.weight", f"{PREFIX}.{e}.up_proj.weight") for e in range(E)
    )
    assert target_bytes(step, per_expert_infos()) == E * 2 * I * H * 2


def test_plan_split_cuts_gate_and_up() -> None:
    plan = plan_split(fused_infos(), QWEN_NAMES)
    assert set(plan) == set(per_expert_infos())
    source = f"{PREFIX}.gate_up_proj"
    assert plan[f"{PREFIX}.10.gate_proj.weight"] == Slice(source=source, expert=10, start=0, end=I)
    up = Slice(source=source, expert=10, start=I, end=2 * I)
    assert plan[f"{PREFIX}.10.up_proj.weight"] == up
    assert target_bytes(up, fused_infos()) == I * H * 2
    assert target_bytes(Copy(source=source), fused_infos()) == E * 2 * I * H * 2


@pytest.mark.parametrize(
    ("dtype", "num_bytes"),
    [
        ("F32", 24),
        ("float32", 24),
        ("BF16", 12),
        ("bfloat16", 12),
        ("F8_E4M3", 6),
        ("float8_e4m3fn", 6),
        ("BOOL", 6),
        ("int64", 48),
    ],
)
def test_tensor_info_num_bytes(dtype: str, num_bytes: int) -> None:
    assert TensorInfo(shape=(2, 3), dtype=dtype).num_bytes == num_bytes


# -- what is wrong is named: field report A54 -----------------------------------------------------


@pytest.mark.parametrize("part", ["gate_proj", "up_proj", "down_proj"])
@pytest.mark.parametrize("expert", [0, 10])
def test_plan_fusion_names_a_missing_key(part: str, expert: int) -> None:
    infos = per_expert_infos()
    key = f"{PREFIX}.{expert}.{part}.weight"
    del infos[key]
    with pytest.raises(CheckpointError, match=f"no key '{key}'\\. The checkpoint is incomplete"):
        plan_fusion(infos, QWEN_NAMES)


def test_plan_fusion_finds_an_expert_that_one_layer_lacks() -> None:
    infos = {key: i for key, i in per_expert_infos().items() if f"{PREFIX}.11." not in key}
    with pytest.raises(CheckpointError, match=r"layers\.1\.mlp\.experts\.11\.down_proj\.weight'"):
        plan_fusion(infos, QWEN_NAMES)


def test_plan_fusion_finds_an_expert_that_all_layers_lack() -> None:
    infos = {key: i for key, i in per_expert_infos().items() if ".experts.11." not in key}
    # nothing in the keys tells that there were twelve
    plan = plan_fusion(infos, QWEN_NAMES)
    step = plan[f"{PREFIX}.down_proj"]
    assert isinstance(step, Stack)
    assert len(step.sources) == 11
    with pytest.raises(CheckpointError, match=r"experts\.11\.down_proj\.weight' and 2 more"):
        plan_fusion(infos, QWEN_NAMES, num_experts=12)
    with pytest.raises(CheckpointError, match=r"hold experts 0 to 9 only, got the key .*\.10\."):
        plan_fusion(infos, QWEN_NAMES, num_experts=10)


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
def test_plan_fusion_names_an_odd_key(odd: str, hint: str) -> None:
    infos = per_expert_infos() | {f"{PREFIX}.{odd}": TensorInfo(shape=(I, H), dtype="BF16")}
    with pytest.raises(CheckpointError, match=hint) as caught:
        plan_fusion(infos, QWEN_NAMES)
    assert f"{PREFIX}.{odd}" in str(caught.value)


def test_plan_fusion_refuses_both_forms_of_one_layer() -> None:
    infos = per_expert_infos()
    infos[f"{PREFIX}.gate_up_proj"] = fused_infos()[f"{PREFIX}.gate_up_proj"]
    with pytest.raises(CheckpointError, match=r"either per-expert or fused below .*layers\.1"):
        plan_fusion(infos, QWEN_NAMES)


@pytest.mark.parametrize("part", ["gate_proj", "up_proj", "down_proj"])
@pytest.mark.parametrize("shape", [(24,), (I + 1, H), (1, I, H)])
def test_plan_fusion_names_a_wrong_shape(part: str, shape: tuple[int, ...]) -> None:
    infos = per_expert_infos()
    key = f"{PREFIX}.7.{part}.weight"
    infos[key] = replace(infos[key], shape=shape)
    with pytest.raises(CheckpointError, match=f"'{key}' must have shape") as caught:
        plan_fusion(infos, QWEN_NAMES)
    assert f"got {shape}" in str(caught.value)


def test_plan_fusion_names_a_transposed_matrix() -> None:
    infos = per_expert_infos()
    key = f"{PREFIX}.7.down_proj.weight"
    infos[key] = replace(infos[key], shape=(I, H))
    with pytest.raises(CheckpointError, match=r"shape \(H, I\) = \(6, 4\).*got \(4, 6\)"):
        plan_fusion(infos, QWEN_NAMES)


def test_plan_fusion_names_a_wrong_dtype() -> None:
    infos = per_expert_infos()
    key = f"{PREFIX}.2.down_proj.weight"
    infos[key] = replace(infos[key], dtype="F32")
    with pytest.raises(CheckpointError, match=f"'{key}' must have dtype BF16 .*got F32"):
        plan_fusion(infos, QWEN_NAMES)


def test_plan_split_names_what_is_missing_or_odd() -> None:
    fused = fused_infos()
    without = {k: i for k, i in fused.items() if k != f"{PREFIX}.down_proj"}
    with pytest.raises(CheckpointError, match=f"must hold '{PREFIX}.down_proj', got no such key"):
        plan_split(without, QWEN_NAMES)
    without = {k: i for k, i in fused.items() if k != f"{PREFIX}.gate_up_proj"}
    with pytest.raises(CheckpointError, match=f"both of them.*got '{PREFIX}.down_proj'"):
        plan_split(without, QWEN_NAMES)
    odd = {**fused, f"{PREFIX}.gate_up_proj_bias": TensorInfo(shape=(E, 2 * I), dtype="BF16")}
    with pytest.raises(CheckpointError, match="gate_up_proj_bias"):
        plan_split(odd, QWEN_NAMES)
    with pytest.raises(CheckpointError, match=r"hold keys <prefix>\.experts\.gate_up_proj"):
        plan_split({"norm.weight": TensorInfo(shape=(2,), dtype="F32")}, QWEN_NAMES)


@pytest.mark.parametrize("shape", [(E, H, 2 * I), (E, 2 * I + 1, H), (E + 1, 2 * I, H), (2 * I, H)])
def test_plan_split_names_wrong_shapes(shape: tuple[int, ...]) -> None:
    key = f"{PREFIX}.gate_up_proj"
    infos = fused_infos() | {key: TensorInfo(shape=shape, dtype="BF16")}
    with pytest.raises(CheckpointError, match=r"\(E, 2I, H\) and \(E, H, I\).*gpt-oss") as caught:
        plan_split(infos, QWEN_NAMES)
    assert str(shape) in str(caught.value)


@pytest.mark.parametrize("part", ["gate.weight", "experts.0.w1.weight", "experts.gate_up_proj"])
def test_plan_fusion_refuses_two_keys_that_become_one(part: str) -> None:
    """Mixtral's rename maps both names of a block to one; the second must not vanish."""
    infos = {
        f"layers.0.block_sparse_moe.experts.0.{name}.weight": TensorInfo(shape=(2, 2), dtype="F32")
        for name in MIXTRAL_NAMES.parts
    }
    info = TensorInfo(shape=(2, 2), dtype="F32")
    if part.startswith("experts.0"):
        infos |= {key.replace("block_sparse_moe", "mlp"): info for key in infos}
    else:
        infos |= {f"layers.0.{block}.{part}": info for block in ("mlp", "block_sparse_moe")}
        if part.startswith("experts"):
            del infos[f"layers.0.block_sparse_moe.{part}"]
    with pytest.raises(
        CheckpointError,
        match=r"one tensor for 'layers\.0\.mlp\..*' and 'layers\.0\..*by two conventions",
    ):
        plan_fusion(infos, MIXTRAL_NAMES)


def test_plan_split_refuses_two_keys_that_become_one() -> None:
    info = TensorInfo(shape=(2, 2), dtype="F32")
    infos = fused_infos() | {
        "model.layers.0.mlp.gate.weight": info,
        "model.layers.0.block_sparse_moe.gate.weight": info,
    }
    with pytest.raises(CheckpointError, match=r"split_experts: .* one tensor for .*gate\.weight'"):
        plan_split(infos, MIXTRAL_NAMES)
