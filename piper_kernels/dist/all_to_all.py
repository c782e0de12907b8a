"""All-to-all with torch's signature over any topology, and the same as a differentiable function.

Letters: P ranks of the group.
"""

import math
from collections.abc import Sequence
from typing import Literal

import numpy as np
from torch import Tensor

from piper_kernels.config import check_choice
from piper_kernels.dist.collectives import GroupLike
from piper_kernels.dist.exchange_counts import plain_counts
from piper_kernels.dist.exchange_group import ExchangeGroup
from piper_kernels.dist.halo import Route, move_rows, plan_route
from piper_kernels.dist.header import Header, check_splits, exchange_headers
from piper_kernels.dist.topology import IntArray, Topology
from piper_kernels.errors import ConfigError, PiperError, ShapeError, check_dtype, instruction

MoveAlgorithm = Literal["auto", "flat", "halo"]
Splits = Sequence[int] | None


def all_to_all_single(
    output: Tensor,
    input: Tensor,
    output_splits: Splits = None,
    input_splits: Splits = None,
    group: GroupLike | ExchangeGroup = None,
    *,
    topology: Topology | None = None,
    algorithm: MoveAlgorithm = "auto",
    timeout_s: float | None = None,
) -> None:
    """``torch.distributed.all_to_all_single`` over nodes: same arguments, same result, bit for bit.

    What the ranks mean to send is compared before anything is sent, so a mistake ends in an error
    on every rank instead of a hang, old memory or an abort. Not differentiable, like torch's:
    :func:`all_to_all_rows` is.

    Args:
        output: contiguous; dim 0 is the sum of ``output_splits``. Any dtype and trailing dims.
        input: of the same dtype and trailing dims; dim 0 is the sum of ``input_splits``.
        output_splits: ``[P]`` rows from each rank; ``None``: equal parts.
        input_splits: ``[P]`` rows to each rank; ``None``: equal parts.
        group: a process group, a one-dimensional mesh, ``None`` for the default group, or an
            :class:`ExchangeGroup`, which keeps what would be worked out anew at every call.
        topology: of the group's ranks, or of all ranks of the job; not beside an ExchangeGroup.
            ``None``: the exchange is flat.
        algorithm: ``flat``: a message to each rank. ``halo``: one to each other node, spread
            there. ``auto``: what the traffic model says is faster.
        timeout_s: for one message, in seconds; ``None``: the process group's own.

    Raises:
        ShapeError, DtypeError, DeviceError, ConfigError: an argument is wrong on this rank.
        TransferError: ranks disagree, a peer died or hangs. It names ranks, nodes and the phase.

    Example:
        >>> import tempfile, torch
        >>> import torch.distributed as dist
        >>> store = f"file://{tempfile.mkdtemp()}/store"
        >>> dist.init_process_group("gloo", init_method=store, rank=0, world_size=1)
        >>> output = torch.empty(2)
        >>> all_to_all_single(output, torch.tensor([1.0, 2.0]))
        >>> output
        tensor([1., 2.])
        >>> dist.destroy_process_group()
    """
    name = "all_to_all_single"
    exchange = as_exchange_group(name, group, topology, timeout_s)
    fault: PiperError | None = None
    try:
        _check_pair(name, output, input)
        check_choice(name, "algorithm", algorithm, MoveAlgorithm)
        exchange.check_device(name, "input", input)
        exchange.check_device(name, "output", output)
        sent = _splits(name, "input_splits", input_splits, len(input), exchange)
        expected = _splits(name, "output_splits", output_splits, len(output), exchange)
    except PiperError as error:
        fault, sent = error, np.zeros(exchange.num_ranks, dtype=np.int64)
        expected = sent
    route = _agree(name, exchange, input, sent, expected, algorithm, fault)
    output.copy_(_moved(route, input.detach()))


def all_to_all_rows(
    rows: Tensor,
    output_splits: Splits = None,
    input_splits: Splits = None,
    group: GroupLike | ExchangeGroup = None,
    *,
    topology: Topology | None = None,
    algorithm: MoveAlgorithm = "auto",
    timeout_s: float | None = None,
) -> Tensor:
    """Like :func:`all_to_all_single`, but returns the output, and is differentiable.

    The gradient goes back the same way with the same splits; nothing is counted anew. On every
    rank it must be computed if it is on one.

    Args:
        rows: dim 0 is the sum of ``input_splits``.
        output_splits: ``[P]``; ``None``: equal parts of as many rows as ``rows`` has.
        input_splits: as there.
        group: as there.
        topology: as there.
        algorithm: as there.
        timeout_s: as there.

    Returns:
        ``[sum(output_splits), ...]``.

    Raises:
        PiperError: as there.
    """
    name = "all_to_all_rows"
    exchange = as_exchange_group(name, group, topology, timeout_s)
    fault: PiperError | None = None
    try:
        check_choice(name, "algorithm", algorithm, MoveAlgorithm)
        exchange.check_device(name, "rows", rows)
        sent = _splits(name, "input_splits", input_splits, len(rows), exchange)
        num_arriving = len(rows) if output_splits is None else sum(output_splits)
        expected = _splits(name, "output_splits", output_splits, num_arriving, exchange)
    except PiperError as error:
        fault, sent = error, np.zeros(exchange.num_ranks, dtype=np.int64)
        expected = sent
    route = _agree(name, exchange, rows, sent, expected, algorithm, fault)
    return _moved(route, rows)


def as_exchange_group(
    function: str,
    group: GroupLike | ExchangeGroup,
    topology: Topology | None,
    timeout_s: float | None,
) -> ExchangeGroup:
    """The exchange group that is meant.

    Raises:
        ConfigError: an ExchangeGroup together with what it already holds.
    """
    if not isinstance(group, ExchangeGroup):
        return ExchangeGroup(group, topology, timeout_s=timeout_s)
    if topology is not None or timeout_s is not None:
        requirement = "be None beside an ExchangeGroup, which has its own"
        argument = "topology" if topology is not None else "timeout_s"
        raise ConfigError(instruction(function, argument, requirement, "a value"))
    return group


def _agree(
    name: str,
    exchange: ExchangeGroup,
    rows: Tensor,
    sent: IntArray,
    expected: IntArray,
    algorithm: MoveAlgorithm,
    fault: PiperError | None,
) -> Route:
    """Compare with the other ranks and plan; raises this rank's own fault after telling them."""
    row_elements = math.prod(rows.shape[1:])
    header = Header(
        function=name,
        dtype=str(rows.dtype).removeprefix("torch."),
        row_elements=row_elements,
        algorithm=algorithm,
        counts=(sent, expected, np.zeros_like(sent)),
        has_fault=fault is not None,
    )
    table = exchange_headers(exchange, header, exchange.device_for(rows))
    if fault is not None:
        raise fault
    check_splits(exchange, name, table.counts[0], table.counts[1])
    counts = plain_counts(exchange.topology, table.counts[0])
    if algorithm != "auto":
        return plan_route(exchange, counts, algorithm)
    row_bytes = max(row_elements * rows.dtype.itemsize, 1)
    return plan_route(exchange, counts, exchange.move_choice.choose(counts, row_bytes, row_bytes))


def _moved(route: Route, rows: Tensor) -> Tensor:
    """The rows at their targets; rows without elements do not travel."""
    shape = (route.num_received, *rows.shape[1:])
    row_elements = math.prod(rows.shape[1:])
    if row_elements == 0:
        return rows.new_empty(shape)
    return move_rows(route, rows.reshape(len(rows), row_elements))[0].reshape(shape)


def _check_pair(name: str, output: Tensor, input: Tensor) -> None:
    check_dtype(name, "output", output, (input.dtype,), "Give both one dtype.")
    if output.shape[1:] != input.shape[1:]:
        requirement = f"have the input's trailing dims {tuple(input.shape[1:])}"
        raise ShapeError(instruction(name, "output", requirement, tuple(output.shape[1:])))
    if not output.is_contiguous():
        raise ShapeError(instruction(name, "output", "be contiguous", f"strides {output.stride()}"))


def _splits(
    name: str, argument: str, splits: Splits, num_rows: int, exchange: ExchangeGroup
) -> IntArray:
    """``[P]`` int64, checked against the tensor it cuts."""
    num_ranks = exchange.num_ranks
    if splits is None:
        each, rest = divmod(num_rows, num_ranks)
        if rest:
            requirement = f"be given, since {num_rows} rows are no multiple of {num_ranks} ranks"
            raise ConfigError(instruction(name, argument, requirement, None))
        return np.full(num_ranks, each, dtype=np.int64)
    given = list(splits)
    if len(given) != num_ranks or min(given) < 0 or sum(given) != num_rows:
        requirement = f"be {num_ranks} numbers >= 0 with the sum {num_rows}"
        raise ConfigError(instruction(name, argument, requirement, given))
    return np.array(given, dtype=np.int64)
