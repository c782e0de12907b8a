"""Models by name, file, folder and dict; the shipped ones against the real class and in print."""

import json
from pathlib import Path

import pytest
import torch

from piper_kernels.errors import ConfigError
from piper_kernels.pipeline.model_config import NAMED_MODELS, load_model, named_models
from piper_kernels.testing.tiny_models import model_class

CONFIGS = {name: json.loads((NAMED_MODELS / f"{name}.json").read_text()) for name in named_models()}
OF_TRANSFORMERS = [name for name, config in CONFIGS.items() if config["model_type"] != "piper"]

# total and active in billions as their makers publish them, to the digits that they print
PUBLISHED = {
    "mixtral-8x7b": (46.7, 12.9),  # mistral.ai/news/mixtral-of-experts
    "mixtral-8x22b": (141, 39),  # mistral.ai/news/mixtral-8x22b
    "olmoe-1b-7b": (6.9, 1.3),  # arXiv 2409.02060
    "qwen3-30b-a3b": (30.5, 3.3),  # model card
    "qwen3-235b-a22b": (235, 22),  # model card
    "deepseek-v2": (236, 21),  # arXiv 2405.04434
    "deepseek-v3": (671, 37),  # arXiv 2412.19437; its 37 leave the embedding out
    "granite-3.1-3b-a800m": (3.3, 0.8),  # model card; its 800M leave the embedding out
    "phi-3.5-moe": (41.9, 6.6),  # model card
    "glm-4.5-air": (106, 12),  # transformers' page; its 12 leave embedding and head out
}


def test_named_models_have_a_source() -> None:
    assert {"mixtral-8x7b", "deepseek-v3", "gpt-oss-120b", "glm-4.5", "piper-e256"} <= set(CONFIGS)
    for name, config in CONFIGS.items():
        assert len(config["source"]) > 20, name
        assert load_model(name).source == config["source"]
        assert load_model(name).name == name


@pytest.mark.parametrize("name", OF_TRANSFORMERS)
def test_load_model_counts_as_the_real_class_at_full_size(name: str) -> None:
    config = {key: value for key, value in CONFIGS[name].items() if key != "source"}
    real_class = model_class(config["model_type"])
    with torch.device("meta"):
        model = real_class(real_class.config_class(**config))
    assert load_model(name).num_parameters == sum(one.numel() for one in model.parameters())


@pytest.mark.parametrize("name", PUBLISHED)
def test_load_model_counts_what_is_published(name: str) -> None:
    model, (total, active) = load_model(name), PUBLISHED[name]
    digit = 1.0 if total >= 100 else 0.1
    assert model.num_parameters / 1e9 == pytest.approx(total, abs=digit)
    # makers count the embedding among the active parameters, or leave it or both ends out
    ends = (0, model.embedding_parameters, model.embedding_parameters + model.head_parameters)
    digit = 1.0 if active >= 10 else 0.1
    counts = [(model.num_active_parameters - end) / 1e9 for end in ends]
    assert min(abs(count - active) for count in counts) <= digit, counts


def test_load_model_reads_name_file_folder_and_dict(tmp_path: Path) -> None:
    config = CONFIGS["mixtral-8x7b"]
    (tmp_path / "config.json").write_text(json.dumps(config))
    by_name = load_model("mixtral-8x7b")
    for source in (tmp_path, tmp_path / "config.json", str(tmp_path), config):
        assert load_model(source).digest() == by_name.digest()
    assert load_model(tmp_path).name == tmp_path.name


def test_load_model_names_the_nearest_model() -> None:
    with pytest.raises(ConfigError, match=r"got 'mixtral-8x7'. Did you mean 'mixtral-8x7b'\?"):
        load_model("mixtral-8x7")


def test_load_model_names_the_nearest_architecture() -> None:
    config = CONFIGS["deepseek-v3"] | {"model_type": "deepseek_v32"}
    with pytest.raises(ConfigError, match=r"model_type must be one of .*'deepseek_v3'\?.*by hand"):
        load_model(config)


def test_load_model_names_a_missing_key() -> None:
    config = {key: value for key, value in CONFIGS["olmoe-1b-7b"].items() if key != "hidden_size"}
    with pytest.raises(ConfigError, match="hidden_size must be given, got nothing"):
        load_model(config)


@pytest.mark.parametrize("text", ["{", "[]", ""])
def test_load_model_refuses_broken_files(tmp_path: Path, text: str) -> None:
    (tmp_path / "config.json").write_text(text)
    with pytest.raises(ConfigError, match=r"config.json: text must be "):
        load_model(tmp_path)


@pytest.mark.parametrize(
    ("name", "billions"),
    # facts/papers.md 1.10, Fig. 14: exact with two matrices an expert, in decimal billions
    [("piper-e16", "110"), ("piper-e128", "862"), ("piper-e256", "1721")],
)
def test_load_model_piper_scaling_family(name: str, billions: str) -> None:
    assert f"{load_model(name).num_parameters / 1e9:.4g}".startswith(billions)
    model = load_model(name)
    parts = model.layer_parameters(0)
    weights = model.num_layers * (4 * 5120**2 + 2 * parts.num_experts * 5120 * 20480)
    assert model.num_layers * (parts.attention + parts.experts) == weights


@pytest.mark.parametrize(
    ("name", "printed"),
    # facts/papers.md 1.10: X-MoE's sizes are L (4 H^2 + 2 E H F) in 2^30
    [
        ("x-moe-small", "10.1"),
        ("x-moe-medium", "55.2"),
        ("x-moe-large", "201.4"),
        ("x-moe-super", "545.4"),
    ],
)
def test_load_model_x_moe_sizes(name: str, printed: str) -> None:
    model = load_model(name)
    parts = model.layer_parameters(0)
    assert f"{model.num_layers * (parts.attention + parts.experts) / 2**30:.1f}" == printed
