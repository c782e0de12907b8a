"""Tuning the GEMMs of a layer on its own tensors. Synchronises and allocates: never under capture.

Letters: R num_rows, E num_experts.
"""

from collections.abc import Callable, Sequence
from functools import cached_property

import torch
from torch import Tensor

from piper_kernels.contracts import ExpertsWeights
from piper_kernels.permutation import Permutation
from piper_kernels.triton.candidates import candidate_tiles
from piper_kernels.triton.gate_up import gate_up_forward
from piper_kernels.triton.grad_act import grad_act_backward
from piper_kernels.triton.grouped_gemm import grouped_gemm_forward
from piper_kernels.triton.grouped_gemm_wgrad import RowSource, weight_grad
from piper_kernels.triton.tile_key import Gemm, op_of
from piper_kernels.triton.tile_schedule import tile_schedules
from piper_kernels.triton.tiles import ExpertsTiles, TileConfig
from piper_kernels.triton.tuner import Outcome, Timer, tune

OnStep = Callable[[Gemm, TileConfig], None]
WARM_UP_CALLS = 2


def event_timer(device: torch.device) -> Timer:
    """A timer that lets the GPU itself take the time between two events."""

    def time(call: Callable[[], object]) -> float:
        with torch.cuda.device(device):
            begin = torch.cuda.Event(enable_timing=True)
            end = torch.cuda.Event(enable_timing=True)
            # the first calls bring clocks and caches into the state of a running layer
            for _ in range(WARM_UP_CALLS):
                call()
            begin.record()
            call()
            end.record()
            end.synchronize()
            return begin.elapsed_time(end) / 1e3

    return time


class LayerRuns:
    """Each GEMM of one layer as a function of its tiles; x stands for the incoming gradient.

    Args:
        x: ``[T, H]``.
        gates: ``[T, K]`` fp32.
        permutation: of the tokens to the experts.
        weights: of the layer.
        tiles: with which the inputs of later GEMMs are computed.
    """

    def __init__(
        self,
        x: Tensor,
        gates: Tensor,
        permutation: Permutation,
        weights: ExpertsWeights,
        tiles: ExpertsTiles,
    ) -> None:
        self.x, self.gates, self.weights = x.detach(), gates.detach().contiguous(), weights
        self.permutation, self.tiles = permutation, tiles
        self.offsets = permutation.expert_offsets
        self.schedules = tile_schedules(self.offsets, permutation.num_rows)
        self.num_valid = int(self.offsets[-1])

    def _gate_up(self, tiles: TileConfig) -> tuple[Tensor, Tensor]:
        preact, act = gate_up_forward(
            self.x,
            self.permutation,
            self.schedules,
            self.weights,
            needs_preact=True,
            needs_act=True,
            tiles=tiles,
        )
        assert preact is not None, "needs_preact was set"
        assert act is not None, "needs_act was set"
        return preact, act

    @cached_property
    def _forward(self) -> tuple[Tensor, Tensor]:
        return self._gate_up(self.tiles.gate_up)

    def _grad_act(self, tiles: TileConfig) -> tuple[Tensor, Tensor, Tensor]:
        preact, _ = self._forward
        grad_preact, scaled_act, grad_gates = grad_act_backward(
            self.x,
            preact,
            self.gates,
            self.permutation,
            self.schedules,
            self.weights,
            needs_preact_grad=True,
            needs_scaled_act=True,
            needs_gates=True,
            tiles=tiles,
        )
        assert grad_preact is not None, "needs_preact_grad was set"
        assert scaled_act is not None, "needs_scaled_act was set"
        assert grad_gates is not None, "needs_gates was set"
        return grad_preact, scaled_act, grad_gates

    @cached_property
    def _backward(self) -> tuple[Tensor, Tensor, Tensor]:
        return self._grad_act(self.tiles.grad_act)

    def _wgrad(self, weight: Tensor, grad: RowSource, rows: RowSource, tiles: TileConfig) -> Tensor:
        return weight_grad(
            grad,
            rows,
            self.offsets,
            self.permutation.num_rows,
            out=torch.empty_like(weight),
            is_transposed=self.weights.layout.is_transposed,
            accumulate=False,
            tiles=tiles,
        )

    def run(self, gemm: Gemm, tiles: TileConfig) -> tuple[Tensor, ...]:
        """The results of one GEMM, without the rows that nobody writes."""
        valid, weights = slice(self.num_valid), self.weights
        tokens = self.permutation.row_to_token
        if gemm == "gate_up":
            return tuple(result[valid] for result in self._gate_up(tiles))
        if gemm == "grad_act":
            *rows, grad_gates = self._grad_act(tiles)
            return (*(result[valid] for result in rows), grad_gates)
        if gemm == "grad_gate_up":
            grad, rows = RowSource(self._backward[0]), RowSource(self.x, tokens)
            return (self._wgrad(weights.gate_up_proj, grad, rows, tiles),)
        if gemm == "grad_down":
            grad, rows = RowSource(self.x, tokens), RowSource(self._backward[1])
            return (self._wgrad(weights.down_proj, grad, rows, tiles),)
        is_down = gemm == "down"
        out = grouped_gemm_forward(
            self._forward[1] if is_down else self._backward[0],
            weights.down_proj if is_down else weights.gate_up_proj,
            self.offsets,
            self.schedules,
            bias=weights.down_bias if is_down else None,
            is_transposed=weights.layout.is_transposed == is_down,
            tiles=tiles,
        )
        return (out[valid],)


def tune_layer(
    runs: LayerRuns,
    gemms: Sequence[Gemm],
    timer: Timer,
    *,
    is_hip: bool,
    memory_bytes: int | None,
    on_step: OnStep = lambda *_: None,
) -> dict[Gemm, Outcome]:
    """Tune some GEMMs of a layer.

    Args:
        runs: the layer.
        gemms: which.
        timer: seconds of a call.
        is_hip: AMD GPU.
        memory_bytes: shared memory of a program.
        on_step: called before a candidate is tried.

    Returns:
        The outcome of each. ``split_rows`` of a weight gradient's candidates is that of the
        default.
    """
    outcomes: dict[Gemm, Outcome] = {}
    for gemm in gemms:
        found = candidate_tiles(
            op_of(gemm),
            num_rows=runs.permutation.num_rows,
            num_experts=runs.permutation.num_experts,
            element_bytes=runs.x.element_size(),
            is_hip=is_hip,
            memory_bytes=memory_bytes,
        )
        outcomes[gemm] = tune(
            found,
            lambda tiles, gemm=gemm: runs.run(gemm, tiles),  # type: ignore[misc]
            timer,
            on_step=lambda tiles, gemm=gemm: on_step(gemm, tiles),  # type: ignore[misc]
        )
    return outcomes
