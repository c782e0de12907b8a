"""experts: every expert that got rows, forward and backward, in independent pieces of work.

    forward, for a block of rows r of expert e  (token t and gate s of row r):
        z = x[t] @ W_gate_up[e].T + b             kept as preact, or computed anew in backward
        out[r] = act(z) @ W_down[e].T + b
    then  y[t] = sum_k s * out[slot_to_row[t*K + k]]

    backward, for a block of rows r, with D = grad_y[t]:
        P = D @ W_down[e];  dz = s * P * act'(z);  grad_gate[r] = P . act(z) + D . b
        dx_rows[r] = dz @ W_gate_up[e]
    then, for a block of columns of expert e, over all its rows:
        dW_down = D.T @ (s * act(z));  dW_gate_up = dz.T @ x[t]
    and  grad_x[t] = sum_k dx_rows[slot_to_row[t*K + k]]

Letters: T num_tokens, K top_k, R = T*K rows, E num_experts, H hidden_size, I intermediate_size.
Source: what to keep and how to find the gates' gradient, SonicMoE (Dao-AILab/sonic-moe, README);
the cut into pieces is ours.
"""

from typing import NamedTuple

from torch import Tensor

from piper_kernels.contracts import ExpertsGrads, ExpertsNeeds, ExpertsWeights
from piper_kernels.cpu.activation import activation_forward
from piper_kernels.cpu.experts_backward import ExpertsBackward
from piper_kernels.cpu.gemm import BLOCK_ROWS
from piper_kernels.cpu.matrices import gather, matrices_of, project
from piper_kernels.cpu.parallel import run_tasks
from piper_kernels.cpu.segments import Segment, longest, read_segments
from piper_kernels.cpu.unpermute import gather_sum
from piper_kernels.permutation import Permutation


class _Scratch(NamedTuple):
    x_rows: Tensor
    z: Tensor
    act: Tensor


def experts_forward(
    x: Tensor,
    gates: Tensor,
    permutation: Permutation,
    weights: ExpertsWeights,
    *,
    needs_preact: bool,
) -> tuple[Tensor, Tensor | None]:
    """The forward of ``piper_kernels.contracts``.

    Args:
        x: ``[T, H]`` in the weights' dtype, any strides.
        gates: ``[T, K]`` fp32 (fp64 with fp64 x).
        permutation: built for the same T, K and E.
        weights: the experts.
        needs_preact: whether to keep the pre-activation.

    Returns:
        ``(y [T, H], preact [R, 2I] or None)``; preact's sentinel rows are not written.
    """
    segments = read_segments(permutation.expert_offsets)
    blocks = segments.blocks(BLOCK_ROWS)
    num_rows, width = longest(blocks), weights.preact_size
    preact = x.new_empty(permutation.num_rows, width) if needs_preact else None
    out = x.new_empty(segments.num_valid, weights.hidden_size)

    def make_scratch() -> _Scratch:
        return _Scratch(
            x_rows=x.new_empty(num_rows, weights.hidden_size),
            z=x.new_empty(0 if needs_preact else num_rows, width),
            act=x.new_empty(num_rows, weights.intermediate_size),
        )

    def run_block(block: Segment, scratch: _Scratch) -> None:
        expert, start, end = block
        matrices = matrices_of(weights, expert)
        rows = gather(scratch.x_rows, x, permutation.row_to_token[start:end])
        z = scratch.z[: end - start] if preact is None else preact[start:end]
        project(z, rows, matrices.gate_up, matrices.gate_up_bias)
        act = scratch.act[: end - start]
        activation_forward(act, z, weights.activation, weights.layout)
        project(out[start:end], act, matrices.down, matrices.down_bias)

    run_tasks(blocks, run_block, make_scratch)
    return gather_sum(out, gates, permutation, segments.num_valid), preact


def experts_backward(
    grad_y: Tensor,
    x: Tensor,
    gates: Tensor,
    permutation: Permutation,
    weights: ExpertsWeights,
    preact: Tensor | None,
    *,
    needs: ExpertsNeeds,
) -> ExpertsGrads:
    """The backward of ``piper_kernels.contracts``.

    Args:
        grad_y: ``[T, H]`` in x's dtype, any strides (stride 0 included).
        x: ``[T, H]``, the forward's.
        gates: ``[T, K]``, the forward's.
        permutation: the forward's.
        weights: the forward's.
        preact: what the forward kept, or ``None`` to compute it anew.
        needs: the gradients that are wanted; GEMMs for the others are skipped.

    Returns:
        The gradients.
    """
    backward = ExpertsBackward(grad_y, x, gates, permutation, weights, preact, needs)
    backward.run_rows()
    backward.run_columns()
    backward.run_biases()
    return backward.collect()
