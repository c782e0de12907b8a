import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from piper_kernels.huggingface.checkpoint_names import (
    MIXTRAL_NAMES,
    NEMOTRON_NAMES,
    QWEN_NAMES,
    ExpertNames,
)
from piper_kernels.huggingface.checkpoints import fuse_experts, split_experts

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
