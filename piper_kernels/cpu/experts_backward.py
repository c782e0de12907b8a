"""The backward of experts, in three rounds of independent pieces: rows, columns, biases.

The equations stand in ``piper_kernels.cpu.experts``. Letters: T num_tokens, K top_k, E num_experts,
H hidden_size, I intermediate_size; n rows of one expert or piece.
"""

from typing import NamedTuple

import torch
from torch import Tensor

from piper_kernels.contracts import ExpertsGrads, ExpertsNeeds, ExpertsWeights
from piper_kernels.cpu.activation import activation_backward
from piper_kernels.cpu.gemm import BLOCK_ROWS, matmul_into
from piper_kernels.cpu.matrices import gather, matrices_of, project
from piper_kernels.cpu.parallel import run_tasks
from piper_kernels.cpu.segments import Segment, longest, read_segments, split_evenly
from piper_kernels.cpu.unpermute import gather_sum, rows_to_slots
from piper_kernels.permutation import Permutation

# Elements of one gathered operand of a weight gradient; a longer expert gets narrower pieces.
_PIECE_ELEMENTS = 512 * 1024
_MIN_PIECE_COLUMNS = 64


class _RowScratch(NamedTuple):
    x_rows: Tensor
    grad_y_rows: Tensor
    z: Tensor
    grad_act: Tensor


class _ColumnPiece(NamedTuple):
    """``grad[...] = left.T @ source[tokens]``: some columns of one expert's weight gradient."""

    grad: Tensor  # [2I or I, columns], a view
    left: Tensor  # [n, 2I or I]
    source: Tensor  # [T, columns], a view of x or grad_y
    tokens: Tensor  # [n]

    @property
    def num_gathered(self) -> int:
        """Elements that the piece gathers."""
        return self.tokens.shape[0] * self.source.shape[1]


def _run_column_piece(piece: _ColumnPiece, scratch: Tensor) -> None:
    grad, left, source, tokens = piece
    buffer = scratch[: piece.num_gathered].view(-1, source.shape[1])
    matmul_into(grad, left.t(), gather(buffer, source, tokens))


class ExpertsBackward:
    """The backward of one call: what it reads, what it fills, and its rounds."""

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
        self.permutation, self.weights = permutation, weights
        self.segments = read_segments(permutation.expert_offsets)
        num_valid = self.segments.num_valid
        valid_slots = permutation.row_to_slot[:num_valid]
        self.row_gates = gates.reshape(-1).index_select(0, valid_slots)
        needs_grad_preact = needs.x or needs.gate_up_proj or needs.gate_up_bias
        self.needs_grad_act = needs_grad_preact or needs.gates

        def rows(is_needed: bool, width: int) -> Tensor | None:
            return x.new_empty(num_valid, width) if is_needed else None

        def like(tensor: Tensor | None, is_needed: bool) -> Tensor | None:
            return torch.empty_like(tensor) if tensor is not None and is_needed else None

        # carried from the first round to the second
        self.grad_preact = rows(needs_grad_preact, weights.preact_size)
        self.scaled_act = rows(needs.down_proj, weights.intermediate_size)
        # what the rounds fill
        self.grad_x_rows = rows(needs.x, weights.hidden_size)
        self.grad_row_gates = gates.new_empty(num_valid) if needs.gates else None
        self.grad_gate_up = like(weights.gate_up_proj, needs.gate_up_proj)
        self.grad_down = like(weights.down_proj, needs.down_proj)
        self.grad_gate_up_bias = like(weights.gate_up_bias, needs.gate_up_bias)
        self.grad_down_bias = like(weights.down_bias, needs.down_bias)

    def run_rows(self) -> None:
        """Through the activation and back to x, block by block of rows."""
        if not self.needs_grad_act and self.scaled_act is None:
            return
        blocks = self.segments.blocks(BLOCK_ROWS)
        num_rows = longest(blocks)
        weights, is_recomputed = self.weights, self.preact is None

        def scratch(is_needed: bool, width: int) -> Tensor:
            return self.x.new_empty(num_rows if is_needed else 0, width)

        def make_scratch() -> _RowScratch:
            return _RowScratch(
                x_rows=scratch(is_recomputed, weights.hidden_size),
                grad_y_rows=scratch(self.needs_grad_act, weights.hidden_size),
                z=scratch(is_recomputed, weights.preact_size),
                grad_act=scratch(self.needs_grad_act, weights.intermediate_size),
            )

        run_tasks(blocks, self._run_row_block, make_scratch)

    def _run_row_block(self, block: Segment, scratch: _RowScratch) -> None:
        expert, start, end = block
        matrices = matrices_of(self.weights, expert)
        tokens = self.permutation.row_to_token[start:end]
        if self.preact is None:
            z = scratch.z[: end - start]
            x_rows = gather(scratch.x_rows, self.x, tokens)
            project(z, x_rows, matrices.gate_up, matrices.gate_up_bias)
        else:
            z = self.preact[start:end]
        grad_preact = _part(self.grad_preact, start, end)
        grad_row_gates = _part(self.grad_row_gates, start, end)
        grad_act = None
        if self.needs_grad_act:
            grad_out = gather(scratch.grad_y_rows, self.grad_y, tokens)
            grad_act = scratch.grad_act[: end - start]
            matmul_into(grad_act, grad_out, matrices.down.t())
        activation_backward(
            z,
            grad_act,
            self.row_gates[start:end],
            self.weights.activation,
            self.weights.layout,
            grad_preact=grad_preact,
            scaled_act=_part(self.scaled_act, start, end),
            grad_gates=grad_row_gates,
        )
        if grad_row_gates is not None and matrices.down_bias is not None:
            wide = grad_row_gates.dtype
            grad_row_gates.add_(torch.mv(grad_out.to(wide), matrices.down_bias.to(wide)))
        if self.grad_x_rows is not None and grad_preact is not None:
            matmul_into(self.grad_x_rows[start:end], grad_preact, matrices.gate_up.t())

    def run_columns(self) -> None:
        """Weight gradients, over all rows of an expert at once; exact zeros for empty experts."""
        is_transposed = self.weights.layout.is_transposed
        pieces: list[_ColumnPiece] = []
        # seen as [E, 2I, H] and [E, I, H], H last, whatever the layout
        if self.grad_gate_up is not None and self.grad_preact is not None:
            grad = self.grad_gate_up.transpose(1, 2) if is_transposed else self.grad_gate_up
            pieces += self._column_pieces(grad, self.grad_preact, self.x)
        if self.grad_down is not None and self.scaled_act is not None:
            grad = self.grad_down if is_transposed else self.grad_down.transpose(1, 2)
            pieces += self._column_pieces(grad, self.scaled_act, self.grad_y)
        pieces.sort(key=lambda piece: piece.num_gathered * piece.left.shape[1], reverse=True)
        most = max((piece.num_gathered for piece in pieces), default=0)
        run_tasks(pieces, _run_column_piece, lambda: self.x.new_empty(most))

    def _column_pieces(self, grad: Tensor, left: Tensor, source: Tensor) -> list[_ColumnPiece]:
        for expert in self.segments.empty:
            grad[expert].zero_()
        pieces = []
        for expert, start, end in self.segments.hit:
            tokens = self.permutation.row_to_token[start:end]
            most = max(_MIN_PIECE_COLUMNS, _PIECE_ELEMENTS // (end - start))
            for columns in split_evenly(source.shape[1], most):
                of_expert = grad[expert, :, columns], left[start:end]
                pieces.append(_ColumnPiece(*of_expert, source[:, columns], tokens))
        return pieces

    def run_biases(self) -> None:
        """Bias gradients, expert by expert; exact zeros for empty experts."""
        grads = [g for g in (self.grad_gate_up_bias, self.grad_down_bias) if g is not None]
        for grad in grads:
            grad[self.segments.empty] = 0
        if grads:
            run_tasks(self.segments.blocks(self.permutation.num_rows), self._run_bias)

    def _run_bias(self, segment: Segment, _: None) -> None:
        expert, start, end = segment
        wide = self.row_gates.dtype
        if self.grad_gate_up_bias is not None and self.grad_preact is not None:
            self.grad_gate_up_bias[expert] = self.grad_preact[start:end].sum(0, dtype=wide)
        if self.grad_down_bias is None:
            return
        total = self.row_gates.new_zeros(self.weights.hidden_size)
        for part in split_evenly(end - start, BLOCK_ROWS):
            tokens = self.permutation.row_to_token[start:end][part]
            rows = self.grad_y.index_select(0, tokens).to(wide)
            total.addmv_(rows.t(), self.row_gates[start:end][part])
        self.grad_down_bias[expert] = total

    def collect(self) -> ExpertsGrads:
        """Back from rows to tokens and slots."""
        grad_x = grad_gates = None
        if self.grad_x_rows is not None:
            num_valid = self.segments.num_valid
            grad_x = gather_sum(self.grad_x_rows, None, self.permutation, num_valid)
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


def _part(tensor: Tensor | None, start: int, end: int) -> Tensor | None:
    return None if tensor is None else tensor[start:end]
