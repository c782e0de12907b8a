"""Which tiles a launch takes: tuned ones if the cache has them, else the default ones.

One dict lookup a call; the file is read once a process. With ``PIPER_TUNE=1`` a layer is tuned the
first time that its key is seen, but never while a CUDA graph is captured.
"""

import logging
import os
from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import Any, Literal

import torch
import triton
from torch import Tensor

from piper_kernels.contracts import ExpertsWeights
from piper_kernels.errors import require
from piper_kernels.permutation import Permutation
from piper_kernels.triton.launch import is_hip
from piper_kernels.triton.tile_cache import (
    DeviceIdentity,
    TileCache,
    TileRecord,
    Winner,
    cache_folder,
)
from piper_kernels.triton.tile_key import GEMMS, Gemm, LayerKey, rows_bucket
from piper_kernels.triton.tiles import (
    ExpertsTiles,
    TileConfig,
    default_experts_tiles,
    default_split_rows,
)
from piper_kernels.triton.tune_layer import LayerRuns, OnStep, event_timer, tune_layer
from piper_kernels.triton.tuner import Outcome, Timer

logger = logging.getLogger(__name__)

TUNE_VARIABLE = "PIPER_TUNE"
Origin = Literal["default", "cache", "tuned"]


@dataclass(frozen=True, kw_only=True, slots=True)
class LayerTiles:
    """The tiles of a layer's GEMMs, and where each came from."""

    tiles: ExpertsTiles
    origins: Mapping[Gemm, Origin]

    def untuned(self, gemms: tuple[Gemm, ...]) -> tuple[Gemm, ...]:
        """Those of ``gemms`` whose tiles nobody measured."""
        return tuple(gemm for gemm in gemms if self.origins[gemm] == "default")

    def lines(self) -> tuple[str, ...]:
        """One line a GEMM, for people."""
        return tuple(
            f"{gemm}: {getattr(self.tiles, gemm).summary()} ({self.origins[gemm]})"
            for gemm in GEMMS
        )


def layer_key(dtype: torch.dtype, num_rows: int, top_k: int, weights: ExpertsWeights) -> LayerKey:
    """What the choice of tiles depends on, from shapes and the dtype of the GEMMs alone."""
    return LayerKey(
        dtype=str(dtype).removeprefix("torch."),
        num_experts=weights.num_experts,
        hidden_size=weights.hidden_size,
        intermediate_size=weights.intermediate_size,
        top_k=top_k,
        layout=weights.layout,
        activation=weights.activation.function,
        rows_per_expert=rows_bucket(num_rows, weights.num_experts),
        is_clamped=weights.activation.limit is not None,
    )


class TileStore:
    """The tiles of every layer seen on one device, in memory.

    Args:
        cache: the device's file, or ``None`` to go without one.
        timer: how tuning measures, or ``None`` never to tune.
        is_hip: AMD GPU.
        memory_bytes: shared memory of a program; ``None``: of the smallest target.
    """

    def __init__(
        self,
        cache: TileCache | None = None,
        timer: Timer | None = None,
        *,
        is_hip: bool = False,
        memory_bytes: int | None = None,
    ) -> None:
        self.timer = timer
        self.is_hip = is_hip
        self.memory_bytes = memory_bytes
        self._cache = cache
        self._from_file: dict[str, Winner] | None = None
        self._tuned: dict[str, TileConfig] = {}
        self._layers: dict[tuple[LayerKey, int | None], LayerTiles] = {}

    def find(self, key: LayerKey, num_rows: int) -> LayerTiles:
        """The tiles of a layer. Chunks of long experts follow R itself, in powers of two."""
        place = key, default_split_rows(num_rows, 1)
        found = self._layers.get(place)
        if found is None:
            found = self._layers[place] = self._build(key, num_rows)
        return found

    def _build(self, key: LayerKey, num_rows: int) -> LayerTiles:
        if self._from_file is None:
            self._from_file = {} if self._cache is None else self._cache.read()
        preact_size = key.layout.preact_size(key.intermediate_size)
        default = default_experts_tiles(
            num_rows=num_rows,
            num_experts=key.num_experts,
            sizes=(key.hidden_size, key.intermediate_size, preact_size),
            element_bytes=getattr(torch, key.dtype).itemsize,
            is_hip=self.is_hip,
            has_clamp=key.is_clamped,
        )
        chosen: dict[str, TileConfig] = {}
        origins: dict[Gemm, Origin] = dict.fromkeys(GEMMS, "default")
        gradients = {
            "grad_gate_up": (preact_size, key.hidden_size),
            "grad_down": (key.hidden_size, key.intermediate_size),
        }
        for gemm in GEMMS:
            text = key.text(gemm)
            if text in self._tuned:
                chosen[gemm], origins[gemm] = self._tuned[text], "tuned"
            elif text in self._from_file:
                chosen[gemm], origins[gemm] = self._from_file[text].tiles.tiles(), "cache"
            if gemm in chosen and gemm in gradients:
                out_size, in_size = gradients[gemm]
                tiles = chosen[gemm]
                num_tiles = -(-out_size // tiles.block_m) * -(-in_size // tiles.block_n)
                split_rows = default_split_rows(num_rows, num_tiles)
                chosen[gemm] = replace(tiles, split_rows=split_rows)
        return LayerTiles(tiles=replace(default, **chosen), origins=origins)

    def keep(self, key: LayerKey, outcomes: Mapping[Gemm, Outcome]) -> None:
        """Remember what tuning found, here and in the file."""
        self._tuned |= {key.text(gemm): outcome.winner for gemm, outcome in outcomes.items()}
        self._layers.clear()
        if self._cache is None:
            return
        self._cache.add(
            {
                key.text(gemm): Winner(
                    tiles=TileRecord.of(outcome.winner),
                    winner_us=outcome.winner_s * 1e6,
                    default_us=outcome.default_s * 1e6,
                )
                for gemm, outcome in outcomes.items()
            }
        )


def tune_into(
    store: TileStore,
    x: Tensor,
    gates: Tensor,
    permutation: Permutation,
    weights: ExpertsWeights,
    gemms: tuple[Gemm, ...],
    on_step: OnStep = lambda *_: None,
) -> dict[Gemm, Outcome]:
    """Tune some GEMMs of a layer on its own tensors, and keep what was found.

    Args:
        store: of x's device; it has a timer.
        x: ``[T, H]``.
        gates: ``[T, K]``.
        permutation: of the tokens to the experts.
        weights: of the layer.
        gemms: which.
        on_step: called before a candidate is tried.

    Returns:
        The outcome of each GEMM.
    """
    assert store.timer is not None, "the caller asked for tuning"
    key = layer_key(x.dtype, permutation.num_rows, permutation.top_k, weights)
    tiles = store.find(key, permutation.num_rows).tiles
    outcomes = tune_layer(
        LayerRuns(x, gates, permutation, weights, tiles),
        gemms,
        store.timer,
        is_hip=store.is_hip,
        memory_bytes=store.memory_bytes,
        on_step=on_step,
    )
    store.keep(key, outcomes)
    for gemm, outcome in outcomes.items():
        logger.info(
            "tuned %s: %s, %.2f times the default's speed",
            key.text(gemm),
            outcome.winner.summary(),
            outcome.speedup,
        )
    return outcomes


def choose_tiles(
    x: Tensor,
    gates: Tensor,
    permutation: Permutation,
    weights: ExpertsWeights,
    gemms: tuple[Gemm, ...],
) -> ExpertsTiles:
    """The tiles of a launch on these tensors; tunes ``gemms`` first if told to and not yet done."""
    store = store_of(x.device)
    num_rows = permutation.num_rows
    key = layer_key(x.dtype, num_rows, permutation.top_k, weights)
    found = store.find(key, num_rows)
    if store.timer is None or num_rows == 0 or _is_capturing(x.device):
        return found.tiles
    untuned = found.untuned(gemms)
    if untuned:
        tune_into(store, x, gates, permutation, weights, untuned)
        found = store.find(key, num_rows)
    return found.tiles


def explain_tiles(
    x: Tensor, dtype: torch.dtype, num_rows: int, top_k: int, weights: ExpertsWeights
) -> tuple[str, ...]:
    """What :func:`choose_tiles` has for a layer that computes in ``dtype``, one line a GEMM."""
    return store_of(x.device).find(layer_key(dtype, num_rows, top_k, weights), num_rows).lines()


def is_tuning_asked_for(environment: Mapping[str, str]) -> bool:
    """Whether ``PIPER_TUNE`` says so.

    Raises:
        ConfigError: it is neither 1 nor 0.

    Example:
        >>> is_tuning_asked_for({"PIPER_TUNE": "1"}), is_tuning_asked_for({})
        (True, False)
    """
    value = environment.get(TUNE_VARIABLE, "0")
    require(value in ("0", "1"), "experts", TUNE_VARIABLE, "be 1 or 0", repr(value))
    return value == "1"


def device_identity(device: torch.device) -> DeviceIdentity:
    """Name, capability and Triton version of a GPU."""
    properties: Any = torch.cuda.get_device_properties(device)
    capability = f"{properties.major}.{properties.minor}"
    return DeviceIdentity(
        name=properties.name,
        capability=properties.gcnArchName if is_hip() else capability,
        triton=triton.__version__,
    )


def open_store(device: torch.device, *, is_tuning: bool) -> TileStore:
    """A GPU's store, with its cache file."""
    properties: Any = torch.cuda.get_device_properties(device)
    # AMD has one limit, NVIDIA a larger one on request, which Triton requests
    limit = "shared_memory_per_block" if is_hip() else "shared_memory_per_block_optin"
    return TileStore(
        TileCache(cache_folder(os.environ), device_identity(device)),
        event_timer(device) if is_tuning else None,
        is_hip=is_hip(),
        memory_bytes=getattr(properties, limit),
    )


@lru_cache
def store_of(device: torch.device) -> TileStore:
    """The one store of a device; in the interpreter, one without file and tuning."""
    if device.type != "cuda":
        return TileStore(is_hip=is_hip())
    return open_store(device, is_tuning=is_tuning_asked_for(os.environ))


def _is_capturing(device: torch.device) -> bool:
    return device.type == "cuda" and torch.cuda.is_current_stream_capturing()
