import copy
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
from peft import LoraConfig, PeftModel, get_peft_model
from torch import Tensor, nn

from piper_kernels.errors import ConfigError
from piper_kernels.huggingface import (
    check_lora,
    lora_targets,
    replace_moe_blocks,
    restore_moe_blocks,
)
from piper_kernels.testing.model_steps import token_ids
from piper_kernels.testing.tiny_models import experts_modules, first_output, tiny_model

# E = 6 and r = 4 differ, so a swap of expert and rank cannot go unseen (field report A50)
RANK, ALPHA = 4, 12
SCALING = ALPHA / RANK
NUM_EXPERTS = {
    "mixtral": {"num_local_experts": 6},
    "qwen2_moe": {"num_experts": 6},
    "gpt_oss": {"num_local_experts": 6},
    "aria": {"moe_num_experts": 6},
    "nemotron_h": {"n_routed_experts": 6},
}
by_family = pytest.mark.parametrize("family", NUM_EXPERTS)
# peft 0.21 asks transformers 5.24 by a name that goes in transformers 6
pytestmark = pytest.mark.filterwarnings("ignore:.is_gradient_checkpointing. is dep:FutureWarning")


def tiny(family: str, **settings: Any) -> Any:
    return tiny_model(family, **NUM_EXPERTS[family], **settings)


def adapt(model: nn.Module, **settings: Any) -> Any:
    """PEFT's LoRA with random factors: PEFT starts with B = 0, where nothing could go wrong."""
    options = {"target_modules": [], "target_parameters": lora_targets(model)} | settings
    adapted = get_peft_model(model, LoraConfig(r=RANK, lora_alpha=ALPHA, **options))
    with torch.no_grad():
        for name, parameter in adapted.named_parameters():
            if "lora_" in name:
                parameter.normal_(0.0, 0.1)
    return adapted


def logits(model: Any) -> Tensor:
    with torch.no_grad():
        return first_output(model(input_ids=token_ids()))


def adapted_by_hand(model: Any, adapted: Any) -> Any:
    """A copy of the model in eager mode whose expert weights are ``W_e + s * B_e A_e``."""
    merged = copy.deepcopy(model)
    merged.set_experts_implementation("eager")
    for name, wrapper in adapted.named_modules():
        if not hasattr(wrapper, "parameter_name"):
            continue
        module = merged.get_submodule(
            name.removeprefix("base_model.model.").replace(".base_layer", "")
        )
        a, b = wrapper.lora_A.default.weight.detach(), wrapper.lora_B.default.weight.detach()
        weight = getattr(module, wrapper.parameter_name).data
        for e in range(6):
            # A: expert slowest; B: expert fastest
            delta = SCALING * b[:, e::6] @ a[e * RANK : (e + 1) * RANK]
            weight[e] += delta.T if module.is_transposed else delta
    return merged


def wrapped_parameters(adapted: Any) -> list[str]:
    return [m.parameter_name for m in adapted.modules() if hasattr(m, "parameter_name")]


# -- field report A50: expert-major against rank-major --------------------------------------------


WAYS = [
    *((family, "piper") for family in NUM_EXPERTS),
    # blocks replaced by PiperMoE, for families in the table of blocks
    *((family, "replaced before") for family in ("mixtral", "qwen2_moe", "gpt_oss")),
    *((family, "replaced after") for family in ("mixtral", "qwen2_moe", "gpt_oss")),
]


@pytest.mark.parametrize(("family", "way"), WAYS)
def test_lora_is_the_same_unmerged_merged_reloaded_and_unmerged(
    family: str, way: str, tmp_path: Path
) -> None:
    model = tiny(family)
    base = copy.deepcopy(model)
    if way == "replaced before":
        replace_moe_blocks(model)
    else:
        model.set_experts_implementation("piper")
    adapted = adapt(model)
    check_lora(adapted)
    if way == "replaced after":
        assert replace_moe_blocks(adapted)
    want = logits(adapted_by_hand(base, adapted))
    assert not torch.allclose(want, logits(base), atol=1e-2)

    def assert_same(other: Any) -> None:
        torch.testing.assert_close(logits(other), want, rtol=1e-5, atol=1e-5)

    assert_same(adapted)
    adapted.save_pretrained(tmp_path)
    fresh = copy.deepcopy(base)
    fresh.set_experts_implementation("piper")
    assert_same(PeftModel.from_pretrained(fresh, tmp_path))
    adapted.merge_adapter()
    assert_same(adapted)
    adapted.unmerge_adapter()
    assert_same(adapted)
    # the base comes back, under transformers' own keys
    unloaded = adapted.unload()
    restore_moe_blocks(unloaded)
    state = unloaded.state_dict()
    assert set(state) == set(base.state_dict())
    for name, tensor in base.state_dict().items():
        torch.testing.assert_close(state[name], tensor, rtol=1e-6, atol=1e-6, msg=name)
    torch.testing.assert_close(logits(unloaded), logits(base), rtol=1e-5, atol=1e-5)


@by_family
def test_merge_and_unload_leaves_a_plain_model(family: str) -> None:
    base = tiny(family)
    model = copy.deepcopy(base)
    model.set_experts_implementation("piper")
    adapted = adapt(model)
    want = logits(adapted_by_hand(base, adapted))
    merged = adapted.merge_and_unload()
    assert not wrapped_parameters(merged)
    torch.testing.assert_close(logits(merged), want, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize(("hidden_size", "intermediate_size"), [(64, 8), (8, 64)])
@pytest.mark.parametrize("family", ["mixtral", "gpt_oss"])
def test_merged_narrow_and_wide_experts_can_be_exported(
    family: str, hidden_size: int, intermediate_size: int, tmp_path: Path
) -> None:
    # field report A52: whoever guesses the orientation by size gets one of the two wrong
    sizes = {"hidden_size": hidden_size, "intermediate_size": intermediate_size}
    base = tiny(family, **sizes)
    model = copy.deepcopy(base)
    model.set_experts_implementation("piper")
    adapted = adapt(model)
    want = logits(adapted_by_hand(base, adapted))
    adapted.merge_and_unload().save_pretrained(tmp_path)
    reloaded = type(base).from_pretrained(tmp_path, experts_implementation="piper")
    torch.testing.assert_close(logits(reloaded), want, rtol=1e-5, atol=1e-5)


@by_family
def test_lora_gradients_equal_eager(family: str) -> None:
    grads = {}
    for experts in ("eager", "piper"):
        model = tiny(family).train()
        model.set_experts_implementation(experts)
        torch.manual_seed(0)
        adapted = adapt(model)
        ids = token_ids()
        adapted(input_ids=ids, labels=ids).loss.backward()
        grads[experts] = {n: p.grad for n, p in adapted.named_parameters()}
    for name, want in grads["eager"].items():
        have = grads["piper"][name]
        assert (want is not None) == ("lora_" in name), name
        if want is None:
            assert have is None, name
        else:
            unit = float(want.abs().max())
            torch.testing.assert_close(have, want, rtol=0, atol=1e-5 * unit)


# -- field report A51: nothing stays frozen in silence --------------------------------------------


def test_check_lora_finds_experts_that_no_target_matched() -> None:
    model = tiny("mixtral", num_hidden_layers=1)
    names = ["q_proj", "gate_proj", "up_proj", "down_proj"]
    adapted = get_peft_model(model, LoraConfig(r=RANK, target_modules=names))
    # PEFT went on with q_proj alone
    assert {n.split(".")[-4] for n, p in adapted.named_parameters() if p.requires_grad} == {
        "q_proj"
    }
    with pytest.raises(ConfigError) as caught:
        check_lora(adapted)
    message = str(caught.value)
    assert "an adapter" not in message
    assert "have a trainable adapter on each of its 2 expert weights" in message
    assert "layers.0.mlp.experts.gate_up_proj" in message
    assert "layers.0.mlp.experts.down_proj" in message
    assert message.endswith("Pass target_parameters=lora_targets(model) to LoraConfig.")


def test_check_lora_finds_one_weight_and_one_layer() -> None:
    model = tiny("mixtral")
    targets = [t for t in lora_targets(model) if t != "model.layers.1.mlp.experts.down_proj"]
    adapted = adapt(model, target_parameters=targets)
    with pytest.raises(
        ConfigError, match=r"none on base_model\.model\.model\.layers\.1\.mlp\.exp"
    ) as e:
        check_lora(adapted)
    assert "gate_up_proj" not in str(e.value)
    adapted = adapt(tiny("mixtral"))
    check_lora(adapted)
    for name, parameter in adapted.named_parameters():
        if "layers.0" in name and "lora_B" in name:
            parameter.requires_grad_(False)
    with pytest.raises(ConfigError, match=r"layers\.0\.mlp\.experts"):
        check_lora(adapted)


def test_check_lora_and_lora_targets_refuse_a_model_without_experts() -> None:
    with pytest.raises(ConfigError, match="have experts, got none in Linear"):
        lora_targets(nn.Linear(2, 2))
    with pytest.raises(ConfigError, match="got no experts"):
        check_lora(nn.Linear(2, 2))


def test_lora_targets_of_each_layout() -> None:
    assert lora_targets(tiny("mixtral", num_hidden_layers=1)) == [
        "model.layers.0.mlp.experts.gate_up_proj",
        "model.layers.0.mlp.experts.down_proj",
    ]
    assert lora_targets(tiny("nemotron_h")) == [
        "model.layers.1.mixer.experts.up_proj",
        "model.layers.1.mixer.experts.down_proj",
    ]


@by_family
def test_one_step_moves_the_adapters_of_every_expert_that_saw_a_token(family: str) -> None:
    model = tiny(family, **({} if family == "nemotron_h" else {"num_hidden_layers": 1})).train()
    model.set_experts_implementation("piper")
    (module,) = experts_modules(model)
    seen: list[Tensor] = []
    module.register_forward_hook(lambda _, args, __: seen.append(args[1]))
    adapted = adapt(model)
    before = copy.deepcopy(adapted.state_dict())
    optimizer = torch.optim.AdamW(adapted.parameters(), lr=1e-2, weight_decay=0.0)
    # four tokens cannot reach all of the experts
    ids = token_ids(1, 4)
    adapted(input_ids=ids, labels=ids).loss.backward()
    optimizer.step()
    # nothing is predicted from the last token
    busy = set(seen[0][:-1].unique().tolist())
    assert busy
    assert len(busy) < 6
    checked = 0
    for name, tensor in adapted.state_dict().items():
        if "lora_" not in name:
            assert torch.equal(tensor, before[name]), name
            continue
        change = (tensor - before[name]).abs()
        by_expert = (
            change.reshape(6, -1).sum(-1)
            if "lora_A" in name
            else change.reshape(change.shape[0], RANK, 6).sum((0, 1))
        )
        assert set(by_expert.nonzero().flatten().tolist()) == busy, name
        checked += 1
    assert checked == 4


def test_lora_in_other_dtypes_than_the_experts() -> None:
    # field report A17: fp16 or bf16 weights with fp32 adapters
    model = tiny("mixtral", dtype=torch.bfloat16).train()
    model.set_experts_implementation("piper")
    adapted = adapt(model)
    for name, parameter in adapted.named_parameters():
        if "lora_" in name:
            parameter.data = parameter.data.float()
    ids = token_ids()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        loss = adapted(input_ids=ids, labels=ids).loss
        loss.backward()
    assert loss.isfinite()
    for name, parameter in adapted.named_parameters():
        if "lora_" in name:
            assert parameter.grad is not None
            assert parameter.grad.dtype == torch.float32
            assert parameter.grad.any(), name
