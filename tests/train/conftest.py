"""Shared by the tests of train/: a text, a tiny model's settings, and no network."""

import os
from collections.abc import Callable
from pathlib import Path
from pydoc_data.topics import topics
from typing import Any

import pytest

from piper_kernels.train.loop import Trainer
from piper_kernels.train.run import build_run
from piper_kernels.train.settings import TrainSettings, settings_from

os.environ["HF_HUB_OFFLINE"] = "1"

TINY_MODEL = {
    "hidden_size": 16,
    "intermediate_size": 16,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 2,
    "num_experts": 4,
}


@pytest.fixture(scope="session")
def text_file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """About 9 kB of English."""
    path = tmp_path_factory.mktemp("text") / "text.txt"
    path.write_text(topics["assignment"][:9000], encoding="utf-8")
    return path


@pytest.fixture
def tiny_settings(text_file: Path, tmp_path: Path) -> Callable[..., TrainSettings]:
    """Settings of a run that takes milliseconds; keywords change them."""

    def make(**changes: Any) -> TrainSettings:
        values: dict[str, Any] = {
            "data": [str(text_file)],
            "model_override": TINY_MODEL,
            "experts": "piper",
            "steps": 4,
            "warmup_fraction": 0.25,
            "batch_size": 4,
            "sequence_length": 16,
            "checkpoint_every": 2,
            "evaluate_every": 2,
            "sample_tokens": 0,
            "compare_rounds": 0,
            "out": str(tmp_path / "run"),
        }
        return settings_from(values | changes, "test")

    return make


@pytest.fixture
def make_trainer(tiny_settings: Callable[..., TrainSettings]) -> Callable[..., Trainer]:
    """A trainer at step 0 of a tiny run; keywords change its settings."""

    def make(**changes: Any) -> Trainer:
        return build_run(tiny_settings(**changes), checkpoint=None).trainer

    return make
