"""Models described by hand: the same description as a family's, and what is refused."""

from typing import Any

import pytest

from piper_kernels.errors import ConfigError
from piper_kernels.pipeline.model_by_hand import HandModel
from piper_kernels.pipeline.model_config import load_model

HAND: dict[str, Any] = {
    "model_type": "piper",
    "vocab_size": 32000,
    "hidden_size": 4096,
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "num_experts": 8,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 14336,
}


def test_hand_model_describes_mixtral() -> None:
    hand, family = load_model(HAND), load_model("mixtral-8x7b")
    assert hand.layers == family.layers
    assert hand.num_parameters == family.num_parameters


def test_hand_model_dense_first_and_two_matrices() -> None:
    changes = {"first_k_dense_replace": 2, "intermediate_size": 10, "num_matrices": 2}
    model = HandModel(**(HAND | changes)).describe("mine")
    assert [layer.kind for layer in model.layers[:3]] == ["dense", "dense", "moe"]
    assert model.layer_parameters(0).dense == 2 * 10 * 4096
    assert model.layer_parameters(2).expert == 2 * 14336 * 4096


def test_hand_model_without_experts_is_dense() -> None:
    changes = {"num_experts": 0, "intermediate_size": 10}
    model = HandModel(**(HAND | changes)).describe("mine")
    assert model.num_parameters == model.num_active_parameters
    assert model.num_experts == 0


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"hiden_size": 8}, "hiden_size must be a field of HandModel.*'hidden_size'"),
        ({"moe_intermediate_size": 0}, "moe_intermediate_size must be above 0, got 0"),
        ({"first_k_dense_replace": 1}, "intermediate_size must be above 0, got 0"),
        ({"hidden_size": 4095}, "hidden_size must be divisible by num_attention_heads = 32"),
        ({"num_hidden_layers": -1}, "num_hidden_layers must be greater than 0, got -1"),
        ({"num_matrices": 4}, "num_matrices must be 2 or 3"),
        ({"num_experts_per_tok": 9}, "top_k must be at most num_experts = 8, got 9"),
    ],
)
def test_hand_model_refuses(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        load_model(HAND | changes)
