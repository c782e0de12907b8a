"""Every family on transformers' experts registry, found by reading its modeling files."""

from typing import Any

import pytest
import torch

from piper_kernels.testing.model_steps import (
    assert_steps_close,
    run_double_step,
    run_step,
    token_ids,
)
from piper_kernels.testing.tiny_models import (
    experts_classes,
    experts_modules,
    first_output,
    modeling_module,
    tiny_model,
)

# Families that were measured to call the registry when this was planned (facts sheet, 1.1).
MEASURED = {
    "mixtral",
    "qwen2_moe",
    "qwen3_moe",
    "qwen3_next",
    "olmoe",
    "phimoe",
    "granitemoe",
    "gpt_oss",
    "deepseek_v2",
    "deepseek_v3",
    "glm4_moe",
    "minimax_m2",
    "ernie4_5_moe",
    "nemotron_h",
}
# Families that cannot be built tiny, each with its reason.
NOT_BUILT: dict[str, str] = {}
# Classes of a family that its tiny model does not hold; test_experts_function.py runs them alone.
NOT_IN_THE_MODEL = {
    "Qwen3OmniMoeTalkerTextExperts": "the talker needs the thinker's hidden states as its input",
}
# Families whose modeling files multiply fp32 by whatever dtype comes: there is no truth in fp64.
NOT_IN_DOUBLE = {"inkling2", "inkling2_loop"}
FAMILIES = [family for family in experts_classes() if family not in NOT_BUILT]


def test_the_scan_finds_the_measured_families() -> None:
    assert set(experts_classes()) >= MEASURED
    assert not MEASURED & NOT_BUILT.keys()
    assert len(experts_classes()) >= 60


@pytest.mark.parametrize("family", FAMILIES)
def test_piper_equals_eager_in_every_family(family: str, monkeypatch: pytest.MonkeyPatch) -> None:
    model = tiny_model(family)
    modules = experts_modules(model)
    # a model may hold a subclass of what is decorated
    names = set(experts_classes()[family])
    held = {c.__name__ for module in modules for c in type(module).__mro__} & names
    assert held == names - NOT_IN_THE_MODEL.keys()
    eager = run_step(model, "eager")
    # eager's own error reaches 5e-5 (lara_mini), and half of what piper and it differ by (hy_v4_vl)
    truth = None if family in NOT_IN_DOUBLE else run_double_step(model, "eager")
    calls: list[Any] = []
    for module in modules:
        module.register_forward_hook(lambda module, *_: calls.append(module))
    piper = run_step(model, "piper")
    # ernie4_5_vl_moe has experts for image tokens, of which there are none here
    assert {type(module) for module in calls} == {type(module) for module in modules}
    assert {m.config._experts_implementation for m in modules} == {"piper"}
    assert_steps_close(piper, eager, 1e-5, truth=truth)
    # the experts matter: their weights have a gradient worth comparing
    largest = max(float(g.abs().max()) for g in eager.grads.values() if g is not None)
    for module in set(calls):
        names = [n for n, p in model.named_parameters() if p is module.down_proj]
        grad = eager.grads[names[0]]
        assert grad is not None
        assert float(grad.abs().max()) > 1e-4 * largest


@pytest.mark.parametrize("family", ["jetmoe", "llama4"])
def test_families_that_are_not_on_the_registry(family: str) -> None:
    # transformers gives them no switch; if it ever does, they belong to the families above
    assert family not in experts_classes()
    model = (jetmoe if family == "jetmoe" else llama4)()
    assert not experts_modules(model)
    with torch.no_grad():
        before = first_output(model(token_ids()))
        model.config._experts_implementation = "piper"
        after = first_output(model(token_ids()))
    assert torch.equal(after, before)


def jetmoe() -> Any:
    module = modeling_module("jetmoe")
    config = module.JetMoeConfig(
        vocab_size=64,
        hidden_size=16,
        num_hidden_layers=1,
        num_key_value_heads=2,
        kv_channels=8,
        intermediate_size=24,
        num_local_experts=4,
    )
    return module.JetMoeForCausalLM(config).eval()


def llama4() -> Any:
    module = modeling_module("llama4")
    config = module.Llama4TextConfig(
        vocab_size=64,
        hidden_size=16,
        intermediate_size=24,
        intermediate_size_mlp=24,
        num_hidden_layers=1,
        num_attention_heads=2,
        num_key_value_heads=2,
        head_dim=8,
        num_local_experts=4,
        pad_token_id=0,
    )
    return module.Llama4ForCausalLM(config).eval()
