import argparse
import tomllib
from pathlib import Path

import pytest

from piper_kernels.errors import ConfigError
from piper_kernels.train.flags import add_flags, settings_toml, stated_settings
from piper_kernels.train.settings import TrainSettings, settings_from


def parse(*words: str, config: Path | None = None) -> dict:
    parser = argparse.ArgumentParser()
    add_flags(parser)
    return stated_settings(parser.parse_args(words), config)


def test_add_flags_offers_every_setting_with_its_help_and_default() -> None:
    parser = argparse.ArgumentParser()
    add_flags(parser)
    text = " ".join(parser.format_help().split())
    for name, field in TrainSettings.model_fields.items():
        assert f"--{name.replace('_', '-')} " in text
        assert field.description is not None
    assert "highest learning rate of AdamW (default: 0.003)" in text
    assert "{fp32,bf16}" in text


def test_stated_settings_holds_only_what_was_said() -> None:
    assert parse() == {}
    stated = parse(
        *("--batch-size", "16", "--learning-rate", ".5", "--data", "a", "b", "--keep-repeats"),
        *("--no-checkpoint-activations", "--model-override", "num_experts=16", "hidden_act=gelu"),
    )
    assert stated == {
        "batch_size": 16,
        "learning_rate": 0.5,
        "data": ["a", "b"],
        "keep_repeats": True,
        "checkpoint_activations": False,
        "model_override": {"num_experts": 16, "hidden_act": "gelu"},
    }


def test_stated_settings_leaves_a_wrong_number_to_the_checker() -> None:
    with pytest.raises(ConfigError, match=r"settings: steps must be a valid integer, got '1.5'"):
        settings_from(parse("--steps", "1.5"), "settings")


def test_stated_settings_wants_key_and_value() -> None:
    message = "settings: model_override must be KEY=VALUE, got 'num_experts'. Write e.g."
    with pytest.raises(ConfigError, match=message):
        parse("--model-override", "num_experts")


def test_stated_settings_lets_flags_win_over_the_file(tmp_path: Path) -> None:
    file = tmp_path / "run.toml"
    file.write_text("steps = 7\nseed = 3\nmodel_override = {num_experts = 4}\n")
    assert parse("--seed", "5", config=file) == {
        "steps": 7,
        "seed": 5,
        "model_override": {"num_experts": 4},
    }


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (None, "settings: config must be a readable TOML file, got .*none.toml .No such file"),
        (b"steps = ", "got .*bad.toml .Invalid value"),
        (b"\xff", "got .*bad.toml .'utf-8' codec"),
        (b"steps = " + b"1" * 5000, "got .*bad.toml .Exceeds the limit"),
        (b"data = " + b"[" * 5000, "got .*bad.toml .*recursion"),
    ],
)
def test_stated_settings_refuses_a_file_it_cannot_read(
    tmp_path: Path, content: bytes | None, message: str
) -> None:
    file = tmp_path / ("none.toml" if content is None else "bad.toml")
    if content is not None:
        file.write_bytes(content)
    with pytest.raises(ConfigError, match=message):
        parse(config=file)


def test_settings_toml_reads_back_equal() -> None:
    settings = settings_from(
        {
            "data": ['/a "quoted" b', "/c"],
            "model_override": {"num_experts": 16, "act": "gelu", "bias": True, "types": ["a", "b"]},
            "epsilon": 1e-9,
            "prompt": "one\ntwo \N{GRINNING FACE}",
        },
        "test",
    )
    text = settings_toml(settings)
    assert settings_from(tomllib.loads(text), "test") == settings
    assert "\n# optimizer\nlearning_rate = 0.003  # highest learning rate of AdamW\n" in text
    # TOML has no null: such a setting is left out, and shown
    assert "# tokenizer =  # folder of a saved tokenizer" in text
