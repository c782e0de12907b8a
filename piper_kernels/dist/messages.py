"""Carries out one rank's part in an exchange: posts messages, waits for them, says what failed.

Rows travel as bytes, so every dtype moves bit by bit, also those that a backend does not know.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from datetime import timedelta

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor

from piper_kernels.dist.exchange_group import ExchangeGroup
from piper_kernels.dist.halo_phases import PhaseName
from piper_kernels.dist.halo_program import Buffer, PhaseProgram, RankProgram, Transfer
from piper_kernels.errors import TransferError

# gloo keeps messages of different tags apart: what is meant for another phase waits in vain instead
# of landing in the wrong place
TAGS = {"counts": 7100, "flat": 7101, "I": 7102, "II": 7103, "III": 7104}
COUNTS_BY_RAIL, COUNTS_IN_NODE = 7110, 7111


@dataclass(frozen=True, slots=True)
class Message:
    """A message under way, as one of its ends sees it.

    Attributes:
        is_send: this rank sends it.
        peer: the other end, a rank of the group.
        rows: what is sent, or where it lands.
    """

    is_send: bool
    peer: int
    rows: Tensor


class Posted:
    """Messages of one phase that are under way."""

    def __init__(
        self, exchange: ExchangeGroup, phase: str, messages: list[Message], tag: int | None = None
    ) -> None:
        self._exchange, self._phase, self._messages = exchange, phase, messages
        tag = TAGS[phase] if tag is None else tag
        self._works: list[dist.Work] = []
        if messages:
            try:
                self._works = dist.batch_isend_irecv(
                    [_operation(exchange, tag, m) for m in messages]
                )
            except RuntimeError as error:
                raise self._failure("starting its messages", error) from error

    def wait(self) -> None:
        """Wait for all of them.

        Raises:
            TransferError: a peer died, or the time is up; names both ranks, nodes and the phase.
        """
        seconds = self._exchange.timeout_s
        limit = () if seconds is None else (timedelta(seconds=seconds),)
        # NCCL answers for the whole batch at once
        is_each = len(self._works) == len(self._messages)
        for index, work in enumerate(self._works):
            try:
                work.wait(*limit)
            except RuntimeError as error:
                doing = self._describe(index) if is_each else "exchanging its messages"
                raise self._failure(doing, error) from error

    def _describe(self, index: int) -> str:
        message = self._messages[index]
        verb = "sending" if message.is_send else "receiving"
        way = "to" if message.is_send else "from"
        size = f"{len(message.rows)} rows, {message.rows.nbytes} bytes"
        return f"{verb} {size}, {way} {self._exchange.name(message.peer)}"

    def _failure(self, doing: str, error: RuntimeError) -> TransferError:
        place = self._exchange.where(self._phase)
        remedy = "Look at that rank's own log first: it died, hangs, or does something else."
        return TransferError(f"{place}: {doing}, failed: {str(error).strip()}\n{remedy}")


def _operation(exchange: ExchangeGroup, tag: int, message: Message) -> dist.P2POp:
    call = dist.isend if message.is_send else dist.irecv
    return dist.P2POp(call, message.rows, None, exchange.group, tag, message.peer)


class PostedPhase:
    """One phase under way; ``wait`` also puts what came in to its places."""

    def __init__(
        self, exchange: ExchangeGroup, phase: PhaseProgram, buffers: Mapping[Buffer, Tensor]
    ) -> None:
        source, self._target = buffers[phase.source], buffers[phase.target]
        own = exchange.rank
        arriving = [
            (recv, _landing(recv, self._target)) for recv in phase.recvs if recv.peer != own
        ]
        messages = [Message(False, recv.peer, rows) for recv, rows in arriving]
        leaving = [send for send in phase.sends if send.peer != own]
        messages += [Message(True, send.peer, _rows_of(send, source)) for send in leaving]
        self._posted = Posted(exchange, phase.name, messages)
        # rows in one piece have landed where they belong
        self._scattered = [(recv, rows) for recv, rows in arriving if len(recv.starts) > 1]
        # what stays on the rank is copied while the rest travels
        staying = [send for send in phase.sends if send.peer == own]
        kept = [recv for recv in phase.recvs if recv.peer == own]
        for send, recv in zip(staying, kept, strict=True):
            _put(recv, _rows_of(send, source), self._target)

    def wait(self) -> None:
        """Wait until every row of the phase is in its buffer.

        Raises:
            TransferError: as :meth:`Posted.wait`.
        """
        self._posted.wait()
        for recv, rows in self._scattered:
            _put(recv, rows, self._target)


class RunningProgram:
    """One rank's part in an exchange, under way from the start: phase I runs beside II and III.

    Args:
        exchange: the group; every rank of it takes part.
        program: this rank's.
        buffers: every buffer that the program names, ``[rows, bytes]`` uint8, contiguous.
        before: what to do before a phase starts, once those that it waits for have ended.

    Raises:
        TransferError: messages could not be started.
    """

    def __init__(
        self,
        exchange: ExchangeGroup,
        program: RankProgram,
        buffers: Mapping[Buffer, Tensor],
        before: Mapping[PhaseName, Callable[[], None]] | None = None,
    ) -> None:
        self._exchange, self._buffers, self._before = exchange, buffers, before or {}
        awaited = {name for phase in program.phases for name in phase.after}
        # first what others wait for; this order is the same on every rank
        free = [phase for phase in program.phases if not phase.after]
        free.sort(key=lambda phase: phase.name not in awaited)
        self._waiting = [phase for phase in program.phases if phase.after]
        self._posted: dict[PhaseName, PostedPhase] = {}
        for phase in free:
            self._post(phase)

    def finish(self) -> None:
        """Wait until every row is where it belongs.

        Raises:
            TransferError: a transfer failed.
        """
        for phase in self._waiting:
            for name in phase.after:
                self._posted.pop(name).wait()
            self._post(phase)
        for under_way in self._posted.values():
            under_way.wait()

    def _post(self, phase: PhaseProgram) -> None:
        if phase.name in self._before:
            self._before[phase.name]()
        self._posted[phase.name] = PostedPhase(self._exchange, phase, self._buffers)


def exchange_vectors(exchange: ExchangeGroup, mine: Tensor, *, is_direct: bool) -> Tensor:
    """Every rank's vector, ``[P, n]``, from this rank's ``[n]``; equally long everywhere.

    Messages rather than a collective: where one fails, the peer is known by name.

    Args:
        exchange: the group.
        mine: ``[n]``.
        is_direct: a message to each rank; else one to each other node, along the rails, and then
            one to each rank of the own node. For the second all ranks must have one topology.

    Raises:
        TransferError: a peer died, or the time is up.
    """
    table = mine.new_empty(exchange.num_ranks, len(mine))
    table[exchange.rank] = mine
    own = exchange.rank
    if is_direct:
        peers = [(own + shift) % exchange.num_ranks for shift in range(1, exchange.num_ranks)]
        arriving = {peer: [peer] for peer in peers}
        _swap(exchange, table, _each(peers, [own]), arriving, TAGS["counts"])
        return table
    routes = exchange.routes("halo")
    sources = {peer: [peer] for peer in routes.sources.tolist()}
    _swap(exchange, table, _each(routes.far_relays.tolist(), [own]), sources, COUNTS_BY_RAIL)
    near = [rank for rank in routes.near_ranks.tolist() if rank != own]
    held = {
        rank: [rank, *np.flatnonzero(routes.relay_in == rank).tolist()] for rank in (own, *near)
    }
    arriving = {peer: held[peer] for peer in near}
    _swap(exchange, table, _each(near, held[own]), arriving, COUNTS_IN_NODE)
    return table


def _each(peers: Sequence[int], rows: Sequence[int]) -> dict[int, Sequence[int]]:
    return dict.fromkeys(peers, rows)


def _swap(
    exchange: ExchangeGroup,
    table: Tensor,
    leaving: Mapping[int, Sequence[int]],
    arriving: Mapping[int, Sequence[int]],
    tag: int,
) -> None:
    """Send rows of the table to some ranks while receiving rows from others."""
    landings = {peer: table.new_empty(len(rows), table.shape[1]) for peer, rows in arriving.items()}
    messages = [Message(False, peer, rows) for peer, rows in landings.items()]
    messages += [Message(True, peer, table[list(rows)]) for peer, rows in leaving.items()]
    Posted(exchange, "counts", messages, tag).wait()
    for peer, rows in arriving.items():
        table[list(rows)] = landings[peer]


def _landing(recv: Transfer, target: Tensor) -> Tensor:
    """Where a message arrives: in place if it is one piece, else beside."""
    if len(recv.starts) == 1:
        return target[int(recv.starts[0]) : int(recv.stops[0])]
    return target.new_empty(recv.num_rows, target.shape[1])


def _rows_of(send: Transfer, source: Tensor) -> Tensor:
    """The rows of a message, in one piece."""
    pieces = zip(send.starts.tolist(), send.stops.tolist(), strict=True)
    parts = [source[start:stop] for start, stop in pieces]
    return parts[0] if len(parts) == 1 else torch.cat(parts)


def _put(recv: Transfer, rows: Tensor, target: Tensor) -> None:
    """Copy a message's rows to their places."""
    done = 0
    for start, stop in zip(recv.starts.tolist(), recv.stops.tolist(), strict=True):
        target[start:stop] = rows[done : done + stop - start]
        done += stop - start
