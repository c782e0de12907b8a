"""Averages, trend and names of layers."""

import json

import numpy as np
import pytest

from piper_kernels.errors import ConfigError
from piper_kernels.pipeline.load_history import LoadHistory


def test_steady_loads_are_their_own_average() -> None:
    history = LoadHistory([1, 3], num_experts=3, memory_steps=10)
    for _ in range(5):
        history.add({1: [4, 0, 2], 3: [2, 2, 2]})
    assert history.loads(1).tolist() == pytest.approx([4, 0, 2])
    assert history.loads(1, steps_ahead=100).tolist() == pytest.approx([4, 0, 2])


def test_drift_is_forecast_and_never_negative() -> None:
    history = LoadHistory([0], num_experts=2, memory_steps=5)
    for step in range(400):
        history.add({0: [1000 + 2 * step, 1000 - 2 * step]})
    assert history.loads(0).tolist() == pytest.approx([1798, 202], abs=1)
    assert history.loads(0, steps_ahead=50).tolist() == pytest.approx([1898, 102], abs=1)
    assert history.loads(0, steps_ahead=1000)[1] == 0


def test_noise_is_averaged() -> None:
    random = np.random.default_rng(0)
    history = LoadHistory([0], num_experts=4, memory_steps=50)
    for _ in range(500):
        history.add({0: random.poisson(100, 4)})
    # one draw spreads by 10, a mean of about 50 by 1.4; the trend adds a little
    assert np.abs(history.loads(0) - 100).max() < 6


def test_layers_keep_their_numbers() -> None:
    # field report A86: dense layers in between shift nothing
    history = LoadHistory([1, 3, 4], num_experts=2, memory_steps=1)
    history.add({1: [1, 0], 3: [0, 8], 4: [2, 2]})
    assert history.loads(3).tolist() == [0, 8]
    with pytest.raises(ConfigError, match=r"layer must be one of \(1, 3, 4\), got 2"):
        history.loads(2)
    with pytest.raises(ConfigError, match=r"be of the layers \(1, 3, 4\), got \(0, 1, 2\)"):
        history.add({0: [1, 1], 1: [1, 1], 2: [1, 1]})


@pytest.mark.parametrize(
    ("counts", "message"),
    [
        ([1, 2, 3], r"counts\[0\] must hold E = 2 counts, got shape \(3,\)"),
        ([1, -1], r"counts\[0\] must be finite and >= 0, got \[1.0, -1.0\]"),
        ([1, float("nan")], "must be finite and >= 0"),
    ],
)
def test_add_refuses(counts: list[float], message: str) -> None:
    history = LoadHistory([0], num_experts=2)
    with pytest.raises(ConfigError, match=message):
        history.add({0: counts})
    assert history.num_steps == 0


def test_load_history_refuses() -> None:
    with pytest.raises(ConfigError, match=r"layers must be rising numbers of layers, got \[3, 1\]"):
        LoadHistory([3, 1], num_experts=2)
    with pytest.raises(ConfigError, match="num_experts must be at least 1, got 0"):
        LoadHistory([0], num_experts=0)
    with pytest.raises(ConfigError, match=r"memory_steps must be at least 1, got 0.5"):
        LoadHistory([0], num_experts=1, memory_steps=0.5)


def test_state_survives_json() -> None:
    history = LoadHistory([2], num_experts=2, memory_steps=3)
    for step in range(7):
        history.add({2: [step, 10 - step]})
    copy = LoadHistory.from_state(json.loads(json.dumps(history.to_state())))
    for one in (history, copy):
        one.add({2: [7, 3]})
    assert copy.loads(2, 4).tolist() == history.loads(2, 4).tolist()
    assert copy.num_steps == 8
