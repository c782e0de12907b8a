"""experts: one layer's expert computation on the GPU, forward and backward, without autograd.

::

    y[t] = sum_k gates[t, k] * down_e(act(gate_up_e(x[t])))        e = expert of slot (t, k)

Forward: gate_up, grouped_gemm (down), unpermute. Backward: grad_act, then what is needed of
grouped_gemm + permute's backward (x), two weight gradients and two bias gradients. No atomics and
no host synchronisation, and every shape depends on sizes alone. Letters: T num_tokens,
H hidden_size, I intermediate_size, E num_experts, K top_k, R = T*K num_rows.
"""

import torch
from torch import Tensor

from piper_kernels.contracts import ExpertsGrads, ExpertsNeeds, ExpertsWeights
from piper_kernels.errors import check_dtype, check_same_device, check_shape
from piper_kernels.permutation import Permutation
from piper_kernels.triton.activation import activation_forward
from piper_kernels.triton.gate_up import gate_up_forward
from piper_kernels.triton.grad_act import grad_act_backward
from piper_kernels.triton.grouped_gemm import grouped_gemm_forward
from piper_kernels.triton.grouped_gemm_wgrad import RowSource, weight_grad
from piper_kernels.triton.grouped_sum import grouped_sum
from piper_kernels.triton.launch import check_operands, is_hip
from piper_kernels.triton.permute import permute_backward
from piper_kernels.triton.tile_schedule import TileSchedules, tile_schedules
from piper_kernels.triton.tiles import ExpertsTiles, TileConfig, default_experts_tiles
from piper_kernels.triton.unpermute import unpermute_forward


def _check(
    function: str, x: Tensor, gates: Tensor, permutation: Permutation, weights: ExpertsWeights
) -> None:
    check_operands(function, x=x, gate_up_proj=weights.gate_up_proj, down_proj=weights.down_proj)
    others = {
        "x": x,
        "gates": gates,
        "expert_offsets": permutation.expert_offsets,
        "gate_up_bias": weights.gate_up_bias,
        "down_bias": weights.down_bias,
    }
    check_same_device(function, others)
    num_tokens, top_k = permutation.num_tokens, permutation.top_k
    sizes = (num_tokens, weights.hidden_size)
    check_shape(function, "x", x, ("T", "H"), sizes, "Was the permutation built for this x?")
    check_shape(function, "gates", gates, ("T", "K"), (num_tokens, top_k))
    check_dtype(function, "gates", gates, (torch.float32,), "Gates stay fp32 until the combine.")


def choose_tiles(x: Tensor, permutation: Permutation, weights: ExpertsWeights) -> ExpertsTiles:
    """The default tiles for these tensors: from sizes, dtype and vendor alone."""
    return default_experts_tiles(
        num_rows=permutation.num_rows,
        num_experts=permutation.num_experts,
        sizes=(weights.hidden_size, weights.intermediate_size, weights.preact_size),
        element_bytes=x.element_size(),
        is_hip=is_hip(),
        has_clamp=weights.activation.limit is not None,
    )


def experts_forward(
    x: Tensor,
    gates: Tensor,
    permutation: Permutation,
    weights: ExpertsWeights,
    *,
    needs_preact: bool,
    tiles: ExpertsTiles | None = None,
) -> tuple[Tensor, Tensor | None]:
    """The layer's output, and the pre-activation if a backward will want it.

    Args:
        x: ``[T, H]`` bf16, fp16 or fp32, any strides.
        gates: ``[T, K]`` fp32.
        permutation: of the tokens to the experts, on x's device.
        weights: in x's dtype (biases in any).
        needs_preact: keep the pre-activation.
        tiles: how to cut the work; ``None`` chooses from the sizes.

    Returns:
        ``(y [T, H] in x's dtype, preact [R, 2I] | None)``; sentinel rows of preact are not written.

    Raises:
        ShapeError: x or gates do not fit the permutation or the weights.
        DtypeError: a dtype is not supported, or x and weights differ.
    """
    _check("experts_forward", x, gates, permutation, weights)
    tiles = tiles or choose_tiles(x, permutation, weights)
    schedules = tile_schedules(permutation.expert_offsets, permutation.num_rows)
    preact, act = gate_up_forward(
        x,
        permutation,
        schedules,
        weights,
        needs_preact=needs_preact,
        needs_act=True,
        tiles=tiles.gate_up,
    )
    assert act is not None, "needs_act was set"
    rows = grouped_gemm_forward(
        act,
        weights.down_proj,
        permutation.expert_offsets,
        schedules,
        bias=weights.down_bias,
        is_transposed=weights.layout.is_transposed,
        tiles=tiles.down,
    )
    return unpermute_forward(rows, gates, permutation), preact


def experts_backward(
    grad_y: Tensor,
    x: Tensor,
    gates: Tensor,
    permutation: Permutation,
    weights: ExpertsWeights,
    preact: Tensor | None,
    *,
    needs: ExpertsNeeds,
    tiles: ExpertsTiles | None = None,
) -> ExpertsGrads:
    """The gradients that are needed; work for the others is skipped.

    Args:
        grad_y: ``[T, H]`` in x's dtype, any strides (0 too).
        x: of the forward.
        gates: of the forward.
        permutation: of the forward.
        weights: of the forward.
        preact: ``[R, 2I]`` of the forward, or ``None`` to compute it anew.
        needs: which gradients.
        tiles: how to cut the work; ``None`` chooses from the sizes.

    Raises:
        ShapeError: x, gates or grad_y do not fit the permutation or the weights.
        DtypeError: a dtype is not supported, or x, grad_y and weights differ.
    """
    name = "experts_backward"
    _check(name, x, gates, permutation, weights)
    check_operands(name, x=x, grad_y=grad_y)
    check_shape(name, "grad_y", grad_y, ("T", "H"), tuple(x.shape))
    tiles = tiles or choose_tiles(x, permutation, weights)
    schedules = tile_schedules(permutation.expert_offsets, permutation.num_rows)
    gates = gates.contiguous()
    grad_preact, scaled_act, grad_gates = _back_to_preact(
        grad_y, x, gates, permutation, schedules, weights, preact, needs, tiles
    )
    offsets, num_rows = permutation.expert_offsets, permutation.num_rows
    tokens, layout = permutation.row_to_token, weights.layout

    def grad_weight(weight: Tensor, grad: RowSource, rows: RowSource, tiles: TileConfig) -> Tensor:
        return weight_grad(
            grad,
            rows,
            offsets,
            num_rows,
            out=torch.empty_like(weight),
            is_transposed=layout.is_transposed,
            accumulate=False,
            tiles=tiles,
        )

    grad_x = grad_gate_up = grad_down = grad_gate_up_bias = grad_down_bias = None
    if needs.x and grad_preact is not None:
        grad_rows = grouped_gemm_forward(
            grad_preact,
            weights.gate_up_proj,
            offsets,
            schedules,
            bias=None,
            # the contraction runs over the output dim, so the weight is used the other way round
            is_transposed=not layout.is_transposed,
            tiles=tiles.grad_x,
        )
        grad_x = permute_backward(grad_rows, permutation)
    if needs.gate_up_proj and grad_preact is not None:
        sources = RowSource(grad_preact), RowSource(x, tokens)
        grad_gate_up = grad_weight(weights.gate_up_proj, *sources, tiles.grad_gate_up)
    if needs.down_proj and scaled_act is not None:
        sources = RowSource(grad_y, tokens), RowSource(scaled_act)
        grad_down = grad_weight(weights.down_proj, *sources, tiles.grad_down)
    if needs.gate_up_bias and grad_preact is not None and weights.gate_up_bias is not None:
        out = torch.empty_like(weights.gate_up_bias)
        grad_gate_up_bias = grouped_sum(grad_preact, permutation, schedules, out=out)
    if needs.down_bias and weights.down_bias is not None:
        out = torch.empty_like(weights.down_bias)
        grad_down_bias = grouped_sum(grad_y, permutation, schedules, out=out, gates=gates)
    return ExpertsGrads(
        x=grad_x,
        gates=grad_gates,
        gate_up_proj=grad_gate_up,
        down_proj=grad_down,
        gate_up_bias=grad_gate_up_bias,
        down_bias=grad_down_bias,
    )


def _back_to_preact(
    grad_y: Tensor,
    x: Tensor,
    gates: Tensor,
    permutation: Permutation,
    schedules: TileSchedules,
    weights: ExpertsWeights,
    preact: Tensor | None,
    needs: ExpertsNeeds,
    tiles: ExpertsTiles,
) -> tuple[Tensor | None, Tensor | None, Tensor | None]:
    """``(grad_preact, scaled_act, grad_gates)``, ``None`` where nobody needs it."""
    needs_preact_grad = needs.x or needs.gate_up_proj or needs.gate_up_bias
    needs_down_gemm = needs_preact_grad or needs.gates
    if not (needs_down_gemm or needs.down_proj):
        return None, None, None
    if preact is None:
        preact, _ = gate_up_forward(
            x,
            permutation,
            schedules,
            weights,
            needs_preact=True,
            needs_act=False,
            tiles=tiles.gate_up,
        )
        assert preact is not None, "needs_preact was set"
    if not needs_down_gemm:
        args = preact, permutation, weights.activation, weights.layout
        return None, activation_forward(*args, gates=gates), None
    return grad_act_backward(
        grad_y,
        preact,
        gates,
        permutation,
        schedules,
        weights,
        needs_preact_grad=needs_preact_grad,
        needs_scaled_act=needs.down_proj,
        needs_gates=needs.gates,
        tiles=tiles.grad_act,
    )
