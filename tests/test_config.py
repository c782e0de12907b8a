"""Settings that cannot work are refused with their numbers; those that can are kept."""

import dataclasses
import pickle
import re
from typing import Any

import pytest

from piper_kernels.config import (
    GEGLU,
    GPT_OSS_SWIGLU,
    REGLU,
    RELU2,
    SWIGLU,
    Activation,
    MoEConfig,
    RouterConfig,
    SharedExpertsConfig,
    WeightLayout,
)
from piper_kernels.errors import ConfigError

SIZES: dict[str, Any] = {
    "hidden_size": 16,
    "intermediate_size": 24,
    "num_experts": 8,
    "top_k": 2,
}


@pytest.mark.parametrize(
    ("flags", "shapes"),
    [
        ({}, ((8, 48, 16), (8, 16, 24))),
        ({"is_transposed": True}, ((8, 16, 48), (8, 24, 16))),
        ({"is_transposed": True, "is_interleaved": True}, ((8, 16, 48), (8, 24, 16))),
        ({"is_gated": False}, ((8, 24, 16), (8, 16, 24))),
        ({"is_gated": False, "is_transposed": True}, ((8, 16, 24), (8, 24, 16))),
    ],
)
def test_weight_layout_shapes(flags: dict[str, bool], shapes: tuple[Any, Any]) -> None:
    layout = WeightLayout(**flags)
    assert layout.weight_shapes(8, 16, 24) == shapes
    assert layout.preact_size(24) == (48 if layout.is_gated else 24)


def test_weight_layout_message() -> None:
    with pytest.raises(
        ConfigError, match="WeightLayout: is_interleaved must be False for an ungated layout, got T"
    ):
        WeightLayout(is_gated=False, is_interleaved=True)


def test_activation_presets() -> None:
    functions = [a.function for a in (SWIGLU, GEGLU, REGLU, RELU2, GPT_OSS_SWIGLU)]
    assert functions == ["silu", "gelu", "relu", "relu2", "silu"]
    assert (GPT_OSS_SWIGLU.alpha, GPT_OSS_SWIGLU.limit, GPT_OSS_SWIGLU.up_offset) == (1.702, 7.0, 1)


@pytest.mark.parametrize(
    ("options", "match"),
    [
        (
            {"function": "swilu"},
            r"function must be one of silu, gelu, gelu_tanh, relu, relu2, identity, got 'swilu'\. "
            r"Did you mean 'silu'\?",
        ),
        ({"function": "tanhshrink"}, "Known: gelu, gelu_tanh, identity, relu, relu2, silu"),
        (
            {"function": "gelu", "alpha": 1.7},
            r"alpha must be 1\.0 unless function is 'silu', got",
        ),
        ({"limit": 0.0}, r"limit must be > 0 or None, got 0\.0"),
        ({"limit": -1.0}, r"limit must be > 0 or None, got -1\.0"),
        ({"alpha": float("nan")}, "alpha must be a finite number, got nan"),
        ({"up_offset": float("nan")}, "up_offset must be a finite number, got nan"),
        ({"up_offset": float("inf")}, "up_offset must be a finite number, got inf"),
    ],
)
def test_activation_messages(options: dict[str, Any], match: str) -> None:
    with pytest.raises(ConfigError, match=f"^Activation: .*{match}"):
        Activation(**options)


@pytest.mark.parametrize("activation", [Activation(limit=7.0), Activation(up_offset=1.0)])
def test_activation_check_layout_needs_a_gate(activation: Activation) -> None:
    activation.check_layout("experts", WeightLayout())
    SWIGLU.check_layout("experts", WeightLayout(is_gated=False))
    with pytest.raises(
        ConfigError,
        match=r"experts: activation must have no limit and no up_offset when layout\.is",
    ):
        activation.check_layout("experts", WeightLayout(is_gated=False))


@pytest.mark.parametrize(
    ("options", "match"),
    [
        ({"kind": "softmax"}, r"kind must be one of softmax_topk, .* got 'softmax'\. Did you mean"),
        ({"group_score": "sum"}, "group_score must be one of max, top2_sum, got 'sum'"),
        ({"non_finite": "ignore"}, "non_finite must be one of raise, contain, got 'ignore'"),
        ({"num_groups": 0}, "num_groups must be an integer >= 1, got 0"),
        ({"num_groups": 2.0}, r"num_groups must be an integer >= 1, got 2\.0"),
        ({"num_selected_groups": True}, "num_selected_groups must be an integer >= 1, got True"),
        (
            {"num_groups": 4, "num_selected_groups": 5},
            "num_selected_groups must be at most num_groups = 4, got 5",
        ),
        ({"jitter": 1.0}, r"jitter must be in \[0, 1\), got 1\.0"),
        ({"jitter": -0.1}, r"jitter must be in \[0, 1\), got -0\.1"),
        ({"jitter": float("nan")}, r"jitter must be in \[0, 1\), got nan"),
        ({"scaling_factor": float("nan")}, "scaling_factor must be a finite number, got nan"),
        ({"scaling_factor": -float("inf")}, "scaling_factor must be a finite number, got -inf"),
    ],
)
def test_router_config_messages(options: dict[str, Any], match: str) -> None:
    with pytest.raises(ConfigError, match=f"^RouterConfig: {match}"):
        RouterConfig(**options)


@pytest.mark.parametrize(
    ("num_experts", "top_k", "router", "match"),
    [
        # field report A35
        (4, 5, {}, "top_k must be at most num_experts = 4, got 5"),
        (4, 0, {}, "top_k must be an integer >= 1, got 0"),
        (0, 1, {}, "num_experts must be an integer >= 1, got 0"),
        ("8", 1, {}, "num_experts must be an integer >= 1, got '8'"),
        # field report A34
        (60, 4, {"num_groups": 8}, "num_experts must be divisible by num_groups = 8, got 60"),
        (
            64,
            9,
            {"num_groups": 8, "num_selected_groups": 1},
            r"top_k must be at most 8, the experts in 1 of 8 groups, got 9\. Select more groups\.",
        ),
    ],
)
def test_check_sizes_messages(
    num_experts: int, top_k: int, router: dict[str, Any], match: str
) -> None:
    config = RouterConfig(**router)
    with pytest.raises(ConfigError, match=f"^route: {match}"):
        config.check_sizes("route", num_experts, top_k)
    with pytest.raises(ConfigError, match=r"^MoEConfig: "):
        MoEConfig(**{**SIZES, "num_experts": num_experts, "top_k": top_k}, router=config)


@pytest.mark.parametrize(("num_experts", "top_k"), [(4, 4), (1, 1), (8, 8)])
def test_check_sizes_accepts_the_edges(num_experts: int, top_k: int) -> None:
    RouterConfig().check_sizes("route", num_experts, top_k)
    groups = RouterConfig(num_groups=num_experts, num_selected_groups=num_experts)
    groups.check_sizes("route", num_experts, top_k)


@pytest.mark.parametrize("name", SIZES)
@pytest.mark.parametrize("value", [0, -1, 2.0, True, None, "4"])
def test_moe_config_sizes_are_positive_integers(name: str, value: object) -> None:
    with pytest.raises(ConfigError, match=f"^MoEConfig: {name} must be an integer >= 1, got "):
        MoEConfig(**{**SIZES, name: value})


@pytest.mark.parametrize(
    ("name", "value", "wanted"),
    [
        ("activation", "silu", "Activation"),
        ("router", "softmax_topk", "RouterConfig"),
        ("router", None, "RouterConfig"),
        ("layout", "transposed", "WeightLayout"),
        ("shared_experts", 12, "SharedExpertsConfig"),
        ("capacity_factor", "1.25", "float"),
        ("capacity_factor", True, "float"),
    ],
)
def test_moe_config_refuses_parts_of_another_type(name: str, value: object, wanted: str) -> None:
    match = rf"^MoEConfig: {name} must be of type {wanted}, got {re.escape(repr(value))}\."
    with pytest.raises(ConfigError, match=match):
        MoEConfig(**SIZES, **{name: value})


def test_moe_config_takes_an_integer_for_a_float() -> None:
    assert MoEConfig(**SIZES, capacity_factor=2).capacity_factor == 2


def test_moe_config_checks_its_parts() -> None:
    with pytest.raises(ConfigError, match="MoEConfig: activation must have no limit"):
        MoEConfig(**SIZES, activation=GPT_OSS_SWIGLU, layout=WeightLayout(is_gated=False))
    for factor in (0.0, -1.0, float("nan")):
        with pytest.raises(ConfigError, match="MoEConfig: capacity_factor must be > 0 or None"):
            MoEConfig(**SIZES, capacity_factor=factor)
    with pytest.raises(ConfigError, match="SharedExpertsConfig: intermediate_size must be an int"):
        SharedExpertsConfig(intermediate_size=0)


def test_moe_config_is_a_frozen_value() -> None:
    config = MoEConfig(**SIZES, shared_experts=SharedExpertsConfig(intermediate_size=8))
    with pytest.raises(dataclasses.FrozenInstanceError):
        config.top_k = 3
    assert pickle.loads(pickle.dumps(config)) == config
    assert hash(config) == hash(dataclasses.replace(config))
    assert dataclasses.replace(config, top_k=8) != config
    with pytest.raises(ConfigError, match="top_k must be at most num_experts = 8, got 9"):
        dataclasses.replace(config, top_k=9)
