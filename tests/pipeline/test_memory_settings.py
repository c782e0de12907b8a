"""Settings of the memory model: what is refused, and bytes of optimizer states."""

from typing import Any

import pytest

from piper_kernels.errors import ConfigError
from piper_kernels.pipeline.memory_settings import (
    STATE_BYTES,
    ActivationRules,
    MemorySettings,
    OptimizerRules,
)


def test_memory_settings_tokens() -> None:
    assert MemorySettings(seq_len=4096, microbatch_size=3).num_tokens == 12288


def test_state_bytes_of_known_optimizers() -> None:
    # two fp32 moments; two bytes and two fp32 scales for 256; nothing; one fp32 moment
    assert STATE_BYTES == {"adamw": 8, "adamw_8bit": 2.03125, "sgd": 0, "sgd_momentum": 4}


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"seq_len": 0}, "seq_len must be an integer >= 1, got 0"),
        ({"seq_len": 8, "ep": -1}, "ep must be an integer >= 1, got -1"),
        ({"seq_len": 8, "tp": 0.5}, "tp must be an integer >= 1, got 0.5"),
        ({"seq_len": 8, "checkpointing": "ful"}, "checkpointing must be one of .*'full'"),
    ],
)
def test_memory_settings_refuse(settings: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        MemorySettings(**settings)


@pytest.mark.parametrize("imbalance", [0.5, float("nan"), float("inf"), -1.0])
def test_activation_rules_refuse_impossible_imbalance(imbalance: float) -> None:
    with pytest.raises(ConfigError, match="imbalance must be a finite number >= 1, got"):
        ActivationRules(imbalance=imbalance)


def test_optimizer_rules_refuse() -> None:
    with pytest.raises(ConfigError, match=r"kind must be one of .*'adamw'"):
        OptimizerRules(kind="adam")  # type: ignore[arg-type]
    with pytest.raises(ConfigError, match="gradient_bytes must be 2, 4 or None, got 3"):
        OptimizerRules(gradient_bytes=3)
