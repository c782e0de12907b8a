"""experts: one pass over the experts that got rows, forward and backward.

    for e in hit experts:                     (rows r of e, token t of row r, gate s of row r)
        z = x[t] @ W_gate_up[e].T + b         kept as preact, or recomputed
        a = act(z)
        out[r] = a @ W_down[e].T + b
    y[t] = sum_k s * out[slot_to_row[t*K+k]]

    backward, for e in hit experts, with D = grad_y[t]:
        P = D @ W_down[e];  dz = s * P * act'(z);  grad_gate[r] = P . a + D . b_down
        dW_down = D.T @ (s * a);  dW_gate_up = dz.T @ x[t];  dx_rows[r] = dz @ W_gate_up[e]
    grad_x[t] = sum_k dx_rows[slot_to_row[t*K+k]]

Letters: T num_tokens, K top_k, R = T*K rows, E num_experts, H hidden_size, I intermediate_size.
Every expert writes rows and weights of its own, so neither the order of the experts nor who
computes them shows in the result.
Source: the plan of SonicMoE (arXiv 2512.14080, section 3), for a CPU; facts/kernels.md section 7.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from piper_kernels.contracts import ExpertsGrads, ExpertsNeeds, ExpertsWeights
from piper_kernels.cpu.activation import activation_backward, activation_forward
from piper_kernels.cpu.gemm import matmul_into, wide_dtype
from piper_kernels.cpu.segments import Segment, read_segments
from piper_kernels.cpu.unpermute import gather_sum, rows_to_slots
from piper_kernels.permutation import Permutation


@dataclass(frozen=True, slots=True, eq=False)
class _Matrices:
    """One expert's weights as ``z = x @ gate_up`` and ``out = act @ down`` want them."""

    gate_up: Tensor  # [H, 2I]
    down: Tensor  # [I, H]
    gate_up_bias: Tensor | None
    down_bias: Tensor | None


def _matrices(weights: ExpertsWeights, expert: int) -> _Matrices:
    gate_up, down = weights.gate_up_proj[expert], weights.down_proj[expert]
    return _Matrices(
        gate_up if weights.layout.is_transposed else gate_up.t(),
        down if weights.layout.is_transposed else down.t(),
        None if weights.gate_up_bias is None else weights.gate_up_bias[expert],
        None if weights.down_bias is None else weights.down_bias[expert],
    )


def _project(out: Tensor, rows: Tensor, matrix: Tensor, bias: Tensor | None) -> None:
    """``out[...] = rows @ matrix + bias``."""
    matmul_into(out, rows, matrix)
    if bias is not None:
        out.add_(bias)


def _gather(scratch: Tensor, source: Tensor, tokens: Tensor) -> Tensor:
    """Rows ``tokens`` of ``source``, in the first rows of ``scratch``."""
    rows = scratch[: tokens.shape[0]]
    return torch.index_select(source, 0, tokens, out=rows)


def experts_forward(
    x: Tensor,
    gates: Tensor,
    permutation: Permutation,
    weights: ExpertsWeights,
    *,
    needs_preact: bool,
) -> tuple[Tensor, Tensor | None]:
    """See ``piper_kernels.contracts``.

    Args:
        x: ``[T, H]`` in the weights' dtype, any strides.
        gates: ``[T, K]`` fp32 (fp64 with fp64 x).
        permutation: built for the same T, K and E.
        weights: the experts.
        needs_preact: whether to keep the pre-activation.

    Returns:
        ``(y [T, H], preact [R, 2I] or None)``; preact's sentinel rows are not written.

    Raises:
        RoutingError: an expert id was negative.
    """
    segments = read_segments("experts", permutation.expert_offsets)
    num_valid, most = segments.num_valid, segments.max_rows
    width = weights.preact_size
    preact = x.new_empty(permutation.num_rows, width) if needs_preact else None
    out = x.new_empty(num_valid, weights.hidden_size)
    x_scratch = x.new_empty(most, weights.hidden_size)
    z_scratch = x.new_empty(0 if needs_preact else most, width)
    act_scratch = x.new_empty(most, weights.intermediate_size)
    for expert, start, end in segments.hit:
        matrices = _matrices(weights, expert)
        rows = _gather(x_scratch, x, permutation.row_to_token[start:end])
        z = z_scratch[: end - start] if preact is None else preact[start:end]
        _project(z, rows, matrices.gate_up, matrices.gate_up_bias)
        act = act_scratch[: end - start]
        activation_forward(act, z, weights.activation, weights.layout)
        _project(out[start:end], act, matrices.down, matrices.down_bias)
    return gather_sum(out, gates, permutation, num_valid), preact


class _Backward:
    """The backward of one call: its inputs, its outputs, and the scratch that experts share."""

    def __init__(
        self,
        grad_y: Tensor,
        x: Tensor,
        gates: Tensor,
        permutation: Permutation,
        weights: ExpertsWeights,
        preact: Tensor | None,
        needs: ExpertsNeeds,
    ) -> None:
        self.grad_y, self.x, self.preact = grad_y, x, preact
        self.permutation, self.weights, self.needs = permutation, weights, needs
        self.segments = read_segments("experts", permutation.expert_offsets)
        num_valid, most = self.segments.num_valid, self.segments.max_rows
        # which intermediate results the wanted gradients go through
        self.needs_grad_preact = needs.x or needs.gate_up_proj or needs.gate_up_bias
        self.needs_grad_act = self.needs_grad_preact or needs.gates
        self.needs_act = self.needs_grad_act or needs.down_proj
        self.needs_x_rows = needs.gate_up_proj or (self.needs_act and preact is None)
        self.row_gates = gates.reshape(-1).index_select(0, permutation.row_to_slot[:num_valid])

        def scratch(is_needed: bool, width: int) -> Tensor:
            return x.new_empty(most if is_needed else 0, width)

        hidden, inner, width = (
            weights.hidden_size,
            weights.intermediate_size,
            weights.preact_size,
        )
        self.grad_y_rows = scratch(True, hidden)
        self.x_rows = scratch(self.needs_x_rows, hidden)
        self.z = scratch(self.needs_act and preact is None, width)
        self.grad_act = scratch(self.needs_act, inner)
        self.scaled_act = scratch(needs.down_proj, inner)
        self.grad_preact = scratch(self.needs_grad_preact, width)
        # outputs; every hit expert fills its own part
        self.grad_x_rows = x.new_empty(num_valid, hidden) if needs.x else None
        self.grad_row_gates = gates.new_empty(num_valid) if needs.gates else None
        self.grad_gate_up = _like(weights.gate_up_proj, needs.gate_up_proj)
        self.grad_down = _like(weights.down_proj, needs.down_proj)
        self.grad_gate_up_bias = _like(weights.gate_up_bias, needs.gate_up_bias)
        self.grad_down_bias = _like(weights.down_bias, needs.down_bias)

    def run(self) -> ExpertsGrads:
        """All experts, then the sums over K."""
        for segment in self.segments.hit:
            self._expert(segment)
        outputs = (
            self.grad_gate_up,
            self.grad_down,
            self.grad_gate_up_bias,
            self.grad_down_bias,
        )
        for grad in outputs:
            if grad is not None:
                for expert in self.segments.empty:
                    grad[expert].zero_()
        grad_x = None
        if self.grad_x_rows is not None:
            num_valid = self.segments.num_valid
            grad_x = gather_sum(self.grad_x_rows, None, self.permutation, num_valid)
        grad_gates = None
        if self.grad_row_gates is not None:
            grad_gates = rows_to_slots(self.grad_row_gates, self.permutation)
        return ExpertsGrads(
            x=grad_x,
            gates=grad_gates,
            gate_up_proj=self.grad_gate_up,
            down_proj=self.grad_down,
            gate_up_bias=self.grad_gate_up_bias,
            down_bias=self.grad_down_bias,
        )

    def _expert(self, segment: Segment) -> None:
        """Everything that one expert contributes."""
        expert, start, end = segment
        count = end - start
        matrices = _matrices(self.weights, expert)
        tokens = self.permutation.row_to_token[start:end]
        row_gates = self.row_gates[start:end]
        grad_out = _gather(self.grad_y_rows, self.grad_y, tokens)
        if self.grad_down_bias is not None:
            wide = grad_out.to(row_gates.dtype)
            self.grad_down_bias[expert].copy_(torch.mv(wide.t(), row_gates))
        x_rows = _gather(self.x_rows, self.x, tokens) if self.needs_x_rows else None
        if not self.needs_act:
            return
        z = self._preact(segment, x_rows, matrices)
        grad_act = self.grad_act[:count]
        if self.needs_grad_act:
            matmul_into(grad_act, grad_out, matrices.down.t())
        grad_preact = self.grad_preact[:count] if self.needs_grad_preact else None
        scaled_act = self.scaled_act[:count] if self.needs.down_proj else None
        grad_gates = None if self.grad_row_gates is None else self.grad_row_gates[start:end]
        activation_backward(
            z,
            grad_act,
            row_gates,
            self.weights.activation,
            self.weights.layout,
            grad_preact=grad_preact,
            scaled_act=scaled_act,
            grad_gates=grad_gates,
        )
        if grad_gates is not None and matrices.down_bias is not None:
            wide = grad_out.to(grad_gates.dtype)
            grad_gates.add_(torch.mv(wide, matrices.down_bias.to(grad_gates.dtype)))
        if self.grad_down is not None and scaled_act is not None:
            self._weight_grad(self.grad_down[expert], grad_out, scaled_act)
        if grad_preact is not None:
            self._first_projection(segment, grad_preact, x_rows, matrices)

    def _preact(self, segment: Segment, x_rows: Tensor | None, matrices: _Matrices) -> Tensor:
        """The saved pre-activation of these rows, or computed anew."""
        if self.preact is not None:
            return self.preact[segment.start : segment.end]
        assert x_rows is not None, f"{self.needs=}"
        z = self.z[: segment.end - segment.start]
        _project(z, x_rows, matrices.gate_up, matrices.gate_up_bias)
        return z

    def _first_projection(
        self, segment: Segment, grad_preact: Tensor, x_rows: Tensor | None, matrices: _Matrices
    ) -> None:
        expert, start, end = segment
        if self.grad_gate_up is not None and x_rows is not None:
            self._weight_grad(self.grad_gate_up[expert], grad_preact, x_rows)
        if self.grad_gate_up_bias is not None:
            wide = wide_dtype(grad_preact.dtype)
            self.grad_gate_up_bias[expert].copy_(grad_preact.sum(0, dtype=wide))
        if self.grad_x_rows is not None:
            matmul_into(self.grad_x_rows[start:end], grad_preact, matrices.gate_up.t())

    def _weight_grad(self, out: Tensor, grad_out: Tensor, rows: Tensor) -> None:
        """``grad_out.T @ rows``, stored as the weight is."""
        if self.weights.layout.is_transposed:
            grad_out, rows = rows, grad_out
        matmul_into(out, grad_out.t(), rows)


def _like(tensor: Tensor | None, is_needed: bool) -> Tensor | None:
    return torch.empty_like(tensor) if tensor is not None and is_needed else None


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
    """See ``piper_kernels.contracts``.

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
    return _Backward(grad_y, x, gates, permutation, weights, preact, needs).run()
