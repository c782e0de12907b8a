"""Route: one exchange of rows, made once and executed as often as needed, both ways.

A route keeps what the forward decided - splits, messages, order - so the backward pass and a
recomputation send exactly the reverse, or the same, without counting anew.

Letters: P ranks, S rows that arrive.
"""

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from piper_kernels.dist.exchange_counts import ExchangeCounts
from piper_kernels.dist.exchange_group import ExchangeGroup
from piper_kernels.dist.halo_phases import Algorithm
from piper_kernels.dist.halo_program import Buffer, RankProgram, rank_counts
from piper_kernels.dist.messages import RunningProgram
from piper_kernels.dist.row_bytes import RowFormat
from piper_kernels.errors import check_shape


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class Route:
    """This rank's part in one exchange, there and back.

    Attributes:
        exchange: the group.
        algorithm: what it follows.
        there: this rank's part on the way there.
        back: the same turned round.
        source: buffer that holds the rows before.
        target: buffer that holds them after.
    """

    exchange: ExchangeGroup
    algorithm: Algorithm
    there: RankProgram
    back: RankProgram
    source: Buffer = "input"
    target: Buffer = "output"

    @property
    def num_sent(self) -> int:
        """Rows that leave this rank, or stay on it."""
        return self.there.buffer_rows[self.source]

    @property
    def num_received(self) -> int:
        """S, rows that this rank has in the end."""
        return self.there.buffer_rows[self.target]

    def reverse(self) -> "Route":
        """The way back: every row returns to where it came from."""
        return Route(
            exchange=self.exchange,
            algorithm=self.algorithm,
            there=self.back,
            back=self.there,
            source=self.target,
            target=self.source,
        )

    def move(self, rows: Tensor) -> Tensor:
        """Send ``[num_sent, bytes]`` uint8 rows, receive ``[num_received, bytes]``.

        Raises:
            TransferError: a peer died, hangs, or the time is up.
        """
        running, buffers = self.start(rows)
        running.finish()
        return buffers[self.target]

    def start(self, rows: Tensor) -> tuple[RunningProgram, dict[Buffer, Tensor]]:
        """Begin to send; once ``finish`` has returned, the buffer ``target`` holds the rows.

        Raises:
            TransferError: messages could not be started.
        """
        buffers: dict[Buffer, Tensor] = {
            name: rows.new_empty(count, rows.shape[1])
            for name, count in self.there.buffer_rows.items()
            if name != self.source
        }
        buffers[self.source] = rows
        return RunningProgram(self.exchange, self.there, buffers), buffers


def plan_route(exchange: ExchangeGroup, counts: ExchangeCounts, algorithm: Algorithm) -> Route:
    """The route of an exchange without de-duplication.

    Args:
        exchange: the group.
        counts: the same on every rank.
        algorithm: ``flat`` or ``halo``.
    """
    mine = rank_counts(exchange.topology, counts, exchange.rank, algorithm)
    program = exchange.routes(algorithm).program(mine)
    return Route(exchange=exchange, algorithm=algorithm, there=program, back=program.reverse())


def move_rows(route: Route, *tensors: Tensor) -> tuple[Tensor, ...]:
    """Send rows along a route; differentiable, any number of times.

    The gradient travels the same route backwards. Moves are bit by bit, in any dtype.

    Args:
        route: for the rows.
        *tensors: each ``[num_sent, width]``; what belongs to a row travels in one message.

    Returns:
        For each ``[num_received, width]``, by source rank, then as the source had them.

    Raises:
        ShapeError: another number of rows.
        TransferError: a peer died, hangs, or the time is up.
    """
    for index, tensor in enumerate(tensors):
        name, wanted = f"tensors[{index}]", (route.num_sent, None)
        check_shape("move_rows", name, tensor, ("num_sent", "width"), wanted)
    moved: tuple[Tensor, ...] = _MoveRows.apply(route, *tensors)
    return moved


class _MoveRows(torch.autograd.Function):
    """The move of rows; its backward is the move back of their gradients."""

    @staticmethod
    def forward(ctx: Any, route: Route, *tensors: Tensor) -> tuple[Tensor, ...]:
        ctx.route, ctx.is_needed = route, [tensor.is_floating_point() for tensor in tensors]
        row = RowFormat.of(tensors)
        moved = tuple(row.unpack(route.move(row.pack(tensors))))
        ctx.mark_non_differentiable(*(t for t in moved if not t.is_floating_point()))
        return moved

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        pairs = list(zip(grads, ctx.is_needed, strict=True))
        back = iter(move_rows(ctx.route.reverse(), *(grad for grad, needed in pairs if needed)))
        return (None, *(next(back) if needed else None for _, needed in pairs))
