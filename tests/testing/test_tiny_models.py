import pytest
import torch

from piper_kernels.errors import ConfigError
from piper_kernels.testing.tiny_models import (
    experts_classes,
    experts_modules,
    first_output,
    model_class,
    tiny_config,
    tiny_experts,
    tiny_model,
    tiny_vision_language_model,
)


def test_experts_classes_reads_the_modeling_files() -> None:
    found = experts_classes()
    assert found["mixtral"] == ("MixtralExperts",)
    assert len(found["qwen3_omni_moe"]) == 2
    assert "llama" not in found


def test_model_class_prefers_a_causal_language_model() -> None:
    assert model_class("mixtral").__name__ == "MixtralForCausalLM"
    assert model_class("muse_spark").__name__ == "MuseSparkTextModel"


def test_tiny_config_takes_settings_under_any_name() -> None:
    assert tiny_config("mixtral", num_experts_per_tok=1).num_experts_per_tok == 1
    # "num_experts" is mixtral's alias of num_local_experts
    assert tiny_config("mixtral", num_experts=6).num_local_experts == 6
    with pytest.raises(ConfigError, match=r"num_expert must be a setting of mixtral.*num_experts"):
        tiny_config("mixtral", num_expert=6)


def test_tiny_model_is_the_same_at_every_call_and_leaves_the_generator_alone() -> None:
    torch.manual_seed(5)
    before = torch.random.get_rng_state()
    first, second = tiny_model("nemotron_h"), tiny_model("nemotron_h")
    assert torch.equal(torch.random.get_rng_state(), before)
    for name, tensor in first.state_dict().items():
        assert torch.equal(second.state_dict()[name], tensor), name


def test_tiny_model_has_weights_that_show() -> None:
    model = tiny_model("gpt_oss", dtype=torch.float64)
    assert not model.training
    assert len(experts_modules(model)) == 2
    for name, parameter in model.named_parameters():
        assert parameter.dtype == torch.float64
        assert parameter.any(), name
    logits = first_output(model(torch.tensor([[3, 4]])))
    assert logits.std() > 0.5


def test_tiny_experts_stand_alone() -> None:
    module = tiny_experts("ernie4_5_vl_moe", "Ernie4_5_VLMoeMoeExperts")
    assert module.down_proj.shape == (8, 32, 20)
    assert module.config._experts_implementation == "piper"


def test_tiny_vision_language_model_keeps_its_experts_in_the_text_model() -> None:
    model = tiny_vision_language_model(router_aux_loss_coef=0.25)
    assert len(experts_modules(model)) == 2
    assert model.config.text_config.router_aux_loss_coef == 0.25
