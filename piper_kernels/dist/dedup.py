"""De-duplicated exchange: a token crosses once per destination node, and its sums come back once.

There, a row goes once to each node that needs it and is spread there, once to each rank. Back, the
node adds up what its ranks have made of a row before the sum crosses. The two directions are each
other's gradient.

Sums are taken in fp32 (fp64 for fp64), in a fixed order and without atomics; they cross in the
dtype of the rows.

Letters: T tokens of this rank, P ranks, N nodes, g ranks of the own node, S rows that arrive.
"""

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from piper_kernels.dist.exchange_counts import ExchangeCounts
from piper_kernels.dist.exchange_group import ExchangeGroup
from piper_kernels.dist.halo_program import Buffer, rank_counts
from piper_kernels.dist.messages import RunningProgram
from piper_kernels.dist.row_bytes import RowFormat
from piper_kernels.errors import TransferError, check_shape


class Selection:
    """Rows of one buffer that go to another, target after target; a row may go to several.

    Args:
        is_wanted: ``[rows, targets]`` bool.

    Attributes:
        rows: which rows, by target, then rising.
        sizes: how many for each target.
        num_rows: of the buffer that is selected from.
    """

    def __init__(self, is_wanted: Tensor) -> None:
        self.num_rows = len(is_wanted)
        self.rows = is_wanted.T.nonzero()[:, 1]
        self.sizes: list[int] = is_wanted.sum(0).tolist()

    def take(self, wire: Tensor) -> Tensor:
        """The rows, copied."""
        return wire.index_select(0, self.rows)

    def add_to(self, sums: Tensor, rows: Tensor) -> None:
        """Add what came back to where it came from; no row occurs twice for one target."""
        for where, part in zip(self.rows.split(self.sizes), rows.split(self.sizes), strict=True):
            sums.index_add_(0, where, part.to(sums.dtype))


class DedupRoute:
    """This rank's part in a de-duplicated exchange, there and back; kept from the first use on.

    Args:
        exchange: the group.
        counts: the same on every rank.
        is_on_rank: ``[T, P]`` bool, whether a token is needed there.
        is_on_node: ``[T, N]`` bool.
    """

    algorithm = "halo_dedup"

    def __init__(
        self,
        exchange: ExchangeGroup,
        counts: ExchangeCounts,
        is_on_rank: Tensor,
        is_on_node: Tensor,
    ) -> None:
        self.exchange = exchange
        mine = rank_counts(exchange.topology, counts, exchange.rank, "halo_dedup")
        self._there = exchange.routes("halo_dedup").program(mine)
        self._back = self._there.reverse()
        node = int(exchange.topology.maps.rank_to_node[exchange.rank])
        self.near_ranks = sorted(exchange.topology.nodes[node].ranks)
        self._near = Selection(is_on_rank[:, self.near_ranks])
        is_far = is_on_node.clone()
        is_far[:, node] = False
        self._far = Selection(is_far)
        # which relayed rows go to which rank of the node: known once the first have come
        self._spread: Selection | None = None

    @property
    def num_received(self) -> int:
        """S."""
        return self._there.buffer_rows["output"]

    def spread_bytes(self, wire: Tensor, targets_of: Callable[[Tensor], Tensor]) -> Tensor:
        """``[S, bytes]`` from ``[T, bytes]``.

        Args:
            wire: a row for each token.
            targets_of: says of relayed rows ``[n, bytes]`` which ranks need them, ``[n, P]``
                bool; asked once in the life of the route.

        Raises:
            TransferError: a transfer failed, or rows do not belong to the counts.
        """
        buffers = self._buffers(wire, ("relay", "spread", "output"))
        buffers["near"], buffers["far"] = self._near.take(wire), self._far.take(wire)

        def expand() -> None:
            if self._spread is None:
                self._spread = self._find_spread(targets_of(buffers["relay"]))
            buffers["spread"] = self._spread.take(buffers["relay"])

        RunningProgram(self.exchange, self._there, buffers, {"III": expand}).finish()
        return buffers["output"]

    def collect_bytes(self, wire: Tensor, row: RowFormat) -> list[Tensor]:
        """``[T, width]`` sums from ``[S, bytes]``, for each part of the rows."""
        assert self._spread is not None, "rows return after they have been spread"
        spread = self._spread
        buffers = self._buffers(wire, ("spread", "far", "near", "relay"))
        buffers["output"] = wire

        def add_up() -> None:
            parts = [(spread, buffers["spread"])]
            buffers["relay"] = row.pack(_sums(row, spread.num_rows, parts))

        RunningProgram(self.exchange, self._back, buffers, {"II": add_up}).finish()
        parts = [(self._near, buffers["near"]), (self._far, buffers["far"])]
        return _sums(row, self._near.num_rows, parts)

    def _buffers(self, wire: Tensor, names: Sequence[Buffer]) -> dict[Buffer, Tensor]:
        sizes = self._there.buffer_rows
        return {name: wire.new_empty(sizes[name], wire.shape[1]) for name in names}

    def _find_spread(self, is_on_rank: Tensor) -> Selection:
        found = Selection(is_on_rank[:, self.near_ranks])
        expected = self._there.buffer_rows["spread"]
        if len(found.rows) != expected:
            place = self.exchange.where("II")
            sentence = f"relayed rows name {len(found.rows)} targets, the counts say {expected}"
            raise TransferError(f"{place}: {sentence}. The rows were damaged on the way.")
        return found


def _sums(row: RowFormat, num_rows: int, parts: Sequence[tuple[Selection, Tensor]]) -> list[Tensor]:
    """What each selection's rows add up to, in their own dtypes."""
    unpacked = [(selection, row.unpack(wire)) for selection, wire in parts]
    totals = []
    for index, (dtype, width) in enumerate(row.parts):
        wide = torch.float64 if dtype == torch.float64 else torch.float32
        sums = parts[0][1].new_zeros(num_rows, width, dtype=wide)
        for selection, tensors in unpacked:
            selection.add_to(sums, tensors[index])
        totals.append(sums.to(dtype))
    return totals


def spread_rows(
    route: DedupRoute, targets_of: Callable[[Tensor], Tensor], *tensors: Tensor
) -> tuple[Tensor, ...]:
    """A row for each (token, rank) that needs it, from a row for each token; differentiable.

    Args:
        route: for the tokens.
        targets_of: says of ``[n]`` relayed rows of the *last* tensor which ranks need them,
            ``[n, P]`` bool.
        *tensors: each ``[T, width]``.

    Returns:
        For each ``[S, width]``, by source rank, then token.

    Raises:
        TransferError: a transfer failed.
    """
    spread: tuple[Tensor, ...] = _Spread.apply(route, targets_of, *tensors)
    return spread


def collect_rows(route: DedupRoute, *tensors: Tensor) -> tuple[Tensor, ...]:
    """For each token the sum of its rows on all ranks; differentiable.

    Args:
        route: along which the tokens were spread.
        *tensors: each ``[S, width]``, floating.

    Returns:
        For each ``[T, width]``; 0 for a token that went nowhere.

    Raises:
        ShapeError: another number of rows.
        TransferError: a transfer failed.
    """
    for index, tensor in enumerate(tensors):
        name, wanted = f"tensors[{index}]", (route.num_received, None)
        check_shape("collect_rows", name, tensor, ("S", "width"), wanted)
    collected: tuple[Tensor, ...] = _Collect.apply(route, *tensors)
    return collected


def _unknown_targets(_: Tensor) -> Tensor:
    raise AssertionError("the gradient is spread after the tokens were")


class _Spread(torch.autograd.Function):
    """Tokens to the ranks that need them; backward: the sum of their gradients."""

    @staticmethod
    def forward(
        ctx: Any, route: DedupRoute, targets_of: Callable[[Tensor], Tensor], *tensors: Tensor
    ) -> tuple[Tensor, ...]:
        ctx.route, ctx.is_needed = route, [tensor.is_floating_point() for tensor in tensors]
        row = RowFormat.of(tensors)
        wire = route.spread_bytes(
            row.pack(tensors), lambda relay: targets_of(row.unpack(relay)[-1])
        )
        spread = tuple(row.unpack(wire))
        ctx.mark_non_differentiable(*(t for t in spread if not t.is_floating_point()))
        return spread

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        pairs = list(zip(grads, ctx.is_needed, strict=True))
        back = iter(collect_rows(ctx.route, *(grad for grad, needed in pairs if needed)))
        return (None, None, *(next(back) if needed else None for _, needed in pairs))


class _Collect(torch.autograd.Function):
    """Sums of rows, per token; backward: the tokens' gradients go to the rows."""

    @staticmethod
    def forward(ctx: Any, route: DedupRoute, *tensors: Tensor) -> tuple[Tensor, ...]:
        ctx.route = route
        row = RowFormat.of(tensors)
        return tuple(route.collect_bytes(row.pack(tensors), row))

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        return (None, *spread_rows(ctx.route, _unknown_targets, *grads))
