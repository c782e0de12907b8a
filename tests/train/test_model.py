import json
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM

from piper_kernels.errors import ConfigError
from piper_kernels.train.model import (
    build_config,
    build_model,
    choose_device,
    forward_logits,
    model_digest,
)
from piper_kernels.train.settings import TrainSettings

CPU = torch.device("cpu")
Make = Callable[..., TrainSettings]


def test_build_model_draws_weights_from_the_seed(tiny_settings: Make) -> None:
    one, same, other = (build_model(tiny_settings(seed=s), 256, CPU) for s in (1, 1, 2))
    weights = [model.model.layers[0].mlp.experts.down_proj for model in (one, same, other)]
    assert torch.equal(weights[0], weights[1])
    assert not torch.equal(weights[0], weights[2])
    assert all(parameter.dtype == torch.float32 for parameter in one.parameters())


def test_build_model_leaves_no_trace_of_its_trial(tiny_settings: Make) -> None:
    model = build_model(tiny_settings(), 256, CPU)
    noise = torch.randn(3)
    assert all(parameter.grad is None for parameter in model.parameters())
    torch.manual_seed(0)
    AutoModelForCausalLM.from_config(build_config(tiny_settings(), 256))
    assert torch.equal(torch.randn(3), noise)


def test_build_model_takes_a_config_json(tiny_settings: Make, tmp_path: Path) -> None:
    built_in = build_config(tiny_settings(model="mixtral", model_override={"hidden_size": 16}), 256)
    built_in.save_pretrained(tmp_path)
    settings = tiny_settings(
        model=str(tmp_path / "config.json"), model_override={"num_local_experts": 6}
    )
    model = build_model(settings, 256, CPU)
    assert model.config.model_type == "mixtral"
    assert model.config.num_local_experts == 6
    assert model.config.hidden_size == built_in.hidden_size == 16
    wide = build_config(tiny_settings(model=str(tmp_path / "config.json"), model_override={}), 256)
    assert wide.num_local_experts == built_in.num_local_experts == 8


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        (
            {"model": "mixtrall"},
            "model must be a config.json or one of .*, got 'mixtrall'. Did you",
        ),
        (
            {"model_override": {"num_expert": 4}},
            "model_override num_expert must be an entry of olmoe's configuration, got 4. "
            "Did you mean 'num_experts'",
        ),
        ({"model_override": {"hidden_size": "wide"}}, "model_override must fit, got .*hidden_size"),
        ({"model_override": {"num_hidden_layers": 0}}, "experts that Hugging Face can switch, got"),
        (
            {"model_override": {"num_attention_heads": 0}},
            "model must be a causal language model that",
        ),
        ({"model_override": {"vocab_size": 99}}, "vocab_size must be at least 256, .* got 99"),
        (
            {"model_override": {"max_position_embeddings": 8}},
            "sequence_length must be at most the model's max_position_embeddings = 8, got 16",
        ),
        # can be built, but not run
        ({"model_override": {"num_experts_per_tok": 99}}, "be able to run, got olmoe with .*99"),
        ({"model_override": {"hidden_size": 7}}, "model must be able to run, got olmoe with .*7"),
        ({"experts": "sonicmoe"}, "and sonicmoe experts .* Change --model-override or --experts"),
        ({"experts": "grouped_m"}, "experts must be one of eager, .* Did you mean 'grouped_mm'"),
    ],
)
def test_build_model_refuses(tiny_settings: Make, changes: dict, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        build_model(tiny_settings(**changes), 256, CPU)


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (None, "model must be a readable config.json, got .*No such file"),
        ("{", "model must be a readable config.json, got .*Expecting property name"),
        ("{}", "model must name a model_type that transformers knows, got None in"),
        ("[]", "model must name a model_type that transformers knows, got None in"),
        ('{"model_type": "mixtrall"}', "got 'mixtrall' in .*config.json. Did you mean 'mixtral'"),
        ('{"model_type": "llama"}', "have experts that Hugging Face can switch"),
        ('{"model_type": "t5"}', "model must be a causal language model that can be built"),
    ],
)
def test_build_model_refuses_a_config_json(
    tiny_settings: Make, tmp_path: Path, content: str | None, message: str
) -> None:
    file = tmp_path / "config.json"
    if content is not None:
        entries = {"num_hidden_layers": 1, "hidden_size": 64, "intermediate_size": 16}
        is_model = content.startswith('{"')
        file.write_text(json.dumps({**entries, **json.loads(content)}) if is_model else content)
    with pytest.raises(ConfigError, match=message):
        build_model(tiny_settings(model=str(file), model_override={}), 256, CPU)


def test_build_model_never_runs_code_of_a_config(tiny_settings: Make, tmp_path: Path) -> None:
    config = build_config(tiny_settings(), 256).to_dict()
    config["auto_map"] = {"AutoModelForCausalLM": "evil.Model"}
    (tmp_path / "evil.py").write_text("raise SystemExit('this must not run')")
    file = tmp_path / "config.json"
    file.write_text(json.dumps(config))
    model = build_model(tiny_settings(model=str(file)), 256, CPU)
    assert type(model).__name__ == "OlmoeForCausalLM"


def test_choose_device(monkeypatch: pytest.MonkeyPatch) -> None:
    assert choose_device("cpu") == CPU
    with pytest.raises(ConfigError, match=r"device must be auto, cpu, cuda or cuda:N, got 'gpu'"):
        choose_device("gpu")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert choose_device("auto") == CPU
    message = "be one of this machine's 0 CUDA devices, got 'cuda:1'. Choose --device cpu"
    with pytest.raises(ConfigError, match=message):
        choose_device("cuda:1")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    assert choose_device("auto") == torch.device("cuda")
    assert choose_device("cuda:1") == torch.device("cuda:1")


def test_forward_logits_equal_the_model_s_own(tiny_settings: Make) -> None:
    model = build_model(tiny_settings(), 256, CPU)
    inputs = torch.arange(32).view(2, 16)
    logits, router_logits = forward_logits(model, inputs, wants_router_logits=True)
    assert torch.equal(logits, model(input_ids=inputs).logits)
    assert router_logits is not None
    assert [tuple(layer.shape) for layer in router_logits] == [(32, 4), (32, 4)]
    assert forward_logits(model, inputs)[1] is None


def test_model_digest_tells_models_apart_but_not_weights(tiny_settings: Make) -> None:
    def digest(**override: object) -> str:
        values = tiny_settings().model_override | override
        return model_digest(build_model(tiny_settings(model_override=values), 256, CPU))

    other_weights = build_model(tiny_settings(seed=5), 256, CPU)
    assert digest() == model_digest(other_weights)
    # another size, and another meaning with the same shapes
    assert len({digest(), digest(num_experts=6), digest(num_experts_per_tok=1)}) == 3


def test_saved_model_is_hugging_face_s(tiny_settings: Make, tmp_path: Path) -> None:
    model = build_model(tiny_settings(), 256, CPU).eval()
    model.save_pretrained(tmp_path)
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path, experts_implementation="eager").eval()
    inputs = torch.arange(16).view(1, 16)
    torch.testing.assert_close(loaded(input_ids=inputs).logits, model(input_ids=inputs).logits)
