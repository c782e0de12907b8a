"""Launch-time choice of tiles: default, cached, tuned; a new number of tokens tunes nothing."""

import logging
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from piper_kernels.errors import ConfigError
from piper_kernels.reference.experts import experts as reference_experts
from piper_kernels.testing import ExpertsInputs, make_experts_inputs, run_experts
from piper_kernels.triton.experts import experts_forward
from piper_kernels.triton.launch_tiles import (
    LayerTiles,
    TileStore,
    choose_tiles,
    explain_tiles,
    is_tuning_asked_for,
    layer_key,
    tune_into,
)
from piper_kernels.triton.tile_cache import DeviceIdentity, TileCache
from piper_kernels.triton.tile_key import BACKWARD_GEMMS, FORWARD_GEMMS, GEMMS, Gemm
from piper_kernels.triton.tiles import ExpertsTiles, default_experts_tiles

IDENTITY = DeviceIdentity(name="a test", capability="0.0", triton="3.9.0")


class Clock:
    """A timer that says the last candidate is fastest, and counts."""

    def __init__(self) -> None:
        self.num_calls = 0

    def __call__(self, call: Callable[[], object]) -> float:
        self.num_calls += 1
        return 1.0 / self.num_calls


def make_inputs(num_tokens: int) -> ExpertsInputs:
    return make_experts_inputs(num_tokens, 16, 8, 3, 2)


def choose(inputs: ExpertsInputs, gemms: tuple[Gemm, ...] = FORWARD_GEMMS) -> ExpertsTiles:
    return choose_tiles(inputs.x, inputs.gates, inputs.permutation, inputs.weights, gemms)


def find(store: TileStore, inputs: ExpertsInputs) -> LayerTiles:
    num_rows = inputs.expert_ids.numel()
    return store.find(layer_key(inputs.x.dtype, num_rows, 2, inputs.weights), num_rows)


def use(monkeypatch: pytest.MonkeyPatch, store: TileStore) -> TileStore:
    monkeypatch.setattr("piper_kernels.triton.launch_tiles.store_of", lambda _: store)
    return store


def test_choose_tiles_defaults() -> None:
    for num_tokens in (0, 1, 30, 5000):
        expected = default_experts_tiles(
            num_rows=2 * num_tokens, num_experts=3, sizes=(16, 8, 16), element_bytes=4
        )
        assert choose(make_inputs(num_tokens)) == expected


# A23: the warm-up tunes; after it no number of tokens and no routing does
def test_choose_tiles_never_tunes_for_a_new_token_count(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    clock = Clock()
    store = use(monkeypatch, TileStore(TileCache(tmp_path, IDENTITY), clock))
    first = choose(make_inputs(17))
    after_warm_up = clock.num_calls
    assert after_warm_up > 0
    built = []
    monkeypatch.setattr(TileStore, "_build", lambda *_: built.append(1))
    for num_tokens in range(1, 25):
        assert choose(make_inputs(num_tokens)) is first
    assert clock.num_calls == after_warm_up
    assert not built
    assert find(store, make_inputs(20)).untuned(GEMMS) == BACKWARD_GEMMS


def test_choose_tiles_takes_what_another_process_tuned(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    inputs, clock = make_inputs(9), Clock()
    store = use(monkeypatch, TileStore(TileCache(tmp_path, IDENTITY), clock))
    choose(inputs)
    tuned = choose(inputs, BACKWARD_GEMMS)
    assert set(find(store, inputs).origins.values()) == {"tuned"}
    assert tuned != default_experts_tiles(
        num_rows=18, num_experts=3, sizes=(16, 8, 16), element_bytes=4
    )

    calls = clock.num_calls
    later = use(monkeypatch, TileStore(TileCache(tmp_path, IDENTITY), clock))
    assert choose(inputs, GEMMS) == tuned
    assert clock.num_calls == calls
    assert set(find(later, inputs).origins.values()) == {"cache"}
    lines = explain_tiles(inputs.x, inputs.x.dtype, 18, 2, inputs.weights)
    assert lines[0] == f"gate_up: {tuned.gate_up.summary()} (cache)"
    assert len(lines) == len(GEMMS)


def test_choose_tiles_reads_the_file_once(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    cache, reads = TileCache(tmp_path, IDENTITY), []
    monkeypatch.setattr(TileCache, "read", lambda _: reads.append(1) or {})
    use(monkeypatch, TileStore(cache))
    for num_tokens in (1, 9, 100, 2000, 9):
        choose(make_inputs(num_tokens))
    assert len(reads) == 1


def test_choose_tiles_never_tunes_while_capturing(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = Clock()
    use(monkeypatch, TileStore(None, clock))
    monkeypatch.setattr("piper_kernels.triton.launch_tiles._is_capturing", lambda _: True)
    choose(make_inputs(9), GEMMS)
    assert clock.num_calls == 0
    monkeypatch.setattr("piper_kernels.triton.launch_tiles._is_capturing", lambda _: False)
    choose(make_inputs(0), GEMMS)
    assert clock.num_calls == 0


def test_split_rows_follow_the_rows_not_the_cache(monkeypatch: pytest.MonkeyPatch) -> None:
    store = use(monkeypatch, TileStore(None, Clock()))
    inputs = make_inputs(9)
    choose(inputs, GEMMS)
    key = layer_key(inputs.x.dtype, 18, 2, inputs.weights)
    assert store.find(key, 18).tiles.grad_down.split_rows is None
    assert store.find(key, 1 << 20).tiles.grad_down.split_rows == 1 << 16


def test_tuned_layer_equals_the_oracle(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    store = use(monkeypatch, TileStore(None, Clock()))
    inputs = make_inputs(9)
    steps: list[Gemm] = []
    arguments = inputs.x, inputs.gates, inputs.permutation, inputs.weights
    with caplog.at_level(logging.INFO):
        outcomes = tune_into(store, *arguments, GEMMS, lambda gemm, _: steps.append(gemm))
    assert list(outcomes) == list(GEMMS)
    assert set(steps) == set(GEMMS)
    # every shipped candidate ran and computed the same
    assert all(not outcome.skipped for outcome in outcomes.values())
    assert "tuned gate_up float32 E3 H16 I8 K2 rows16 gated silu" in caplog.text
    y, _ = experts_forward(*arguments, needs_preact=False)
    truth = run_experts(reference_experts, inputs)["y"]
    torch.testing.assert_close(y, truth)


def test_is_tuning_asked_for() -> None:
    assert not is_tuning_asked_for({})
    assert not is_tuning_asked_for({"PIPER_TUNE": "0"})
    assert is_tuning_asked_for({"PIPER_TUNE": "1"})
    with pytest.raises(ConfigError, match="PIPER_TUNE must be 1 or 0, got 'yes'"):
        is_tuning_asked_for({"PIPER_TUNE": "yes"})
