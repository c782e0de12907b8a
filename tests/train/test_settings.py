import json
from pathlib import Path

import pytest

from piper_kernels.errors import ConfigError
from piper_kernels.train.settings import (
    TrainSettings,
    group_of,
    is_free,
    resumed_settings,
    settings_from,
)


def test_settings_from_refuses_an_unknown_key_with_the_nearest_known_one() -> None:
    message = (
        "run.toml: batch_sise must be a field of TrainSettings, got 4. Did you mean 'batch_size'"
    )
    with pytest.raises(ConfigError, match=message):
        settings_from({"batch_sise": 4}, "run.toml")


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"batch_size": 0}, "batch_size must be greater than or equal to 1, got 0"),
        ({"batch_size": "many"}, "batch_size must be a valid integer, got 'many'"),
        ({"precision": "fp8"}, "precision must be 'fp32' or 'bf16', got 'fp8'"),
        ({"learning_rate": -1.0}, "learning_rate must be greater than 0, got -1.0"),
        ({"held_out_fraction": 0.6}, "held_out_fraction must be less than or equal to 0.5"),
        (
            {"batch_size": 9, "accumulate": 2},
            "batch_size must be divisible by accumulate = 2, got 9",
        ),
        ({"warmup_fraction": 1.0}, "warmup_fraction must be less than 1, got 1.0"),
        ({"model_override": 3}, "model_override must be an object, got 3"),
        # beyond what torch, a checkpoint's name or a machine has room for
        ({"seed": 2**64}, "seed must be less than 18446744073709551616"),
        ({"steps": 10**8}, "steps must be less than 100000000, got 100000000"),
        ({"threads": 1025}, "threads must be less than or equal to 1024, got 1025"),
        ({"held_out_fraction": 1e-5}, "held_out_fraction must be greater than or equal to 0.0001"),
        ({"data": ["~nobody.here/x"]}, "data must have a known home, got ~nobody.here/x. Write"),
        # what Python makes of bytes on the command line that are no UTF-8
        ({"prompt": "\udcff"}, "test: prompt must be UTF-8 text, got .*udcff.*. Rename it, or"),
        ({"data": ["a", "\udcff"]}, "test: data must be UTF-8 text"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_settings_from_refuses_a_value_that_cannot_work(values: dict, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        settings_from(values, "test")


def test_settings_from_reports_every_mistake_at_once() -> None:
    with pytest.raises(ConfigError) as caught:
        settings_from({"stepss": 1, "seed": -1}, "test")
    assert "Did you mean 'steps'?" in str(caught.value)
    assert "seed must be greater than or equal to 0, got -1" in str(caught.value)


def test_settings_know_the_home_of_every_path(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", "/home/me")
    words = {"data": ["~/d"], "tokenizer": "~/t", "model": "~/m.json", "out": "~/o"}
    settings = settings_from(words, "test")
    assert settings.data == (Path("/home/me/d"),)
    assert settings.tokenizer == Path("/home/me/t")
    assert settings.model == "/home/me/m.json"
    assert settings.out == Path("/home/me/o")


def test_settings_round_trip_through_json() -> None:
    settings = TrainSettings(
        data=(Path("a"),), model_override={"x": 1, "y": [0.5, None], "z": {"a": "silu"}}
    )
    saved = json.loads(settings.model_dump_json())
    assert settings_from(saved, "test") == settings
    assert settings.data == (Path.cwd() / "a",)


def test_every_setting_says_what_it_is() -> None:
    for name, field in TrainSettings.model_fields.items():
        assert field.description, name
        assert group_of(name) in {"data", "model", "training", "optimizer", "run"}


def test_resumed_settings_keeps_what_is_learnt_and_frees_the_rest() -> None:
    saved = TrainSettings(seed=7, steps=90).model_dump(mode="json")
    settings = resumed_settings(saved, {"checkpoint_every": 3, "seed": 7})
    assert (settings.seed, settings.steps, settings.checkpoint_every) == (7, 90, 3)
    message = (
        "resume: learning_rate must stay as in the checkpoint .'0.003'., got '0.1'. "
        "Leave it out, or start a new run with --out."
    )
    with pytest.raises(ConfigError, match=message):
        resumed_settings(saved, {"learning_rate": 0.1})
    with pytest.raises(ConfigError, match=r"resume: sed must be a field .* Did you mean 'seed'"):
        resumed_settings(saved, {"sed": 7})


def test_is_free_only_where_the_curve_cannot_change() -> None:
    free = {name for name in TrainSettings.model_fields if is_free(name)}
    # the text is guarded by its hash, wherever its files lie now
    assert free == {
        "data",
        "non_finite",
        "timeout_s",
        "threads",
        "out",
        "checkpoint_every",
        "keep_checkpoints",
        "evaluate_every",
        "prompt",
        "sample_tokens",
        "compare_rounds",
    }
