"""The safety header: what every rank means to send, compared before any row moves.

A backend does not protect its users. With gloo a message that is shorter than expected leaves old
memory in the output without a word, and one that is longer, or of a wider dtype, ends the receiving
process (torch 2.13). So row counts, dtype, row size and digests of plan and placement travel ahead
of the rows, equally long on every rank, and every rank compares the same table.

Letters: P ranks, N nodes.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from piper_kernels.dist.exchange_group import ExchangeGroup
from piper_kernels.dist.messages import exchange_vectors
from piper_kernels.dist.topology import IntArray
from piper_kernels.errors import TransferError

# a field is text of so many bytes, so that any rank can read any other's
_WORD_BYTES = 24
_NUM_KINDS = 3


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class Header:
    """What one rank means to do. Ranks must agree on everything but the counts and the two flags.

    Attributes:
        function: that exchanges.
        dtype: of the rows, e.g. ``bfloat16``.
        row_elements: in a row.
        top_k: K, or 0.
        algorithm: as asked for, ``auto`` included.
        placement: digest, or empty.
        is_recording: whether a backward pass may follow: it exchanges too.
        needs_grad: whether this rank's rows need a gradient; ranks may differ.
        has_fault: this rank's arguments are wrong, and it is about to raise.
        counts: three times ``[P]`` numbers of rows, what they mean depends on the function.
    """

    function: str
    dtype: str
    row_elements: int
    algorithm: str
    counts: tuple[IntArray, IntArray, IntArray]
    top_k: int = 0
    placement: str = ""
    is_recording: bool = False
    needs_grad: bool = False
    has_fault: bool = False

    def fields(self, topology_digest: str) -> dict[str, str]:
        """What must agree, by name."""
        return {
            "function": self.function,
            "dtype": self.dtype,
            "elements per row": str(self.row_elements),
            "top_k": str(self.top_k),
            "algorithm": self.algorithm,
            "topology": topology_digest[:_WORD_BYTES],
            "placement": self.placement[:_WORD_BYTES],
            "gradient mode": "grad" if self.is_recording else "no_grad",
        }


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class Table:
    """All ranks' headers, the same on every rank.

    Attributes:
        counts: ``[3, P, P]`` int64, kind of count, whose header, for which rank (or node).
        needs_grad: whether any rank's rows need a gradient.
    """

    counts: IntArray
    needs_grad: bool


def exchange_headers(exchange: ExchangeGroup, header: Header, device: torch.device) -> Table:
    """Tell every rank, hear from every rank, compare.

    Args:
        exchange: the group.
        header: this rank's.
        device: on which the group's backend sends from.

    Raises:
        TransferError: ranks disagree, a rank reports a fault, or one did not answer in time.
    """
    fields = header.fields(exchange.topology_digest)
    words = b"".join(
        word.encode().ljust(_WORD_BYTES, b"\0")[:_WORD_BYTES] for word in fields.values()
    )
    flags = [int(header.has_fault), int(header.needs_grad)]
    parts = [np.frombuffer(words, dtype=np.int64), np.array(flags), *header.counts]
    mine = torch.from_numpy(np.concatenate(parts).astype(np.int64)).to(device)
    # along rails only once all are known to mean the same rails
    is_direct = not exchange.has_one_topology
    table = _to_numpy(exchange_vectors(exchange, mine, is_direct=is_direct))
    num_words = len(words) // 8
    faulty = np.flatnonzero(table[:, num_words])
    if len(faulty) and not header.has_fault:
        names = ", ".join(exchange.name(rank) for rank in faulty.tolist())
        message = f"{header.function}: the arguments of {names} are wrong. See the error there."
        raise TransferError(f"{exchange.where('counts')}: {message}")
    if not len(faulty):
        _compare(exchange, list(fields), table[:, :num_words])
        exchange.has_one_topology = True
    counts = table[:, num_words + 2 :].reshape(exchange.num_ranks, _NUM_KINDS, -1)
    return Table(
        counts=np.ascontiguousarray(counts.transpose(1, 0, 2)),
        needs_grad=bool(table[:, num_words + 1].any()),
    )


def check_splits(
    exchange: ExchangeGroup, function: str, sent: IntArray, expected: IntArray
) -> None:
    """Raise unless what each rank sends is what its receiver expects.

    Args:
        exchange: the group.
        function: for the message.
        sent: ``[P, P]`` rows, from row to column.
        expected: ``[P, P]`` rows, at row from column.

    Raises:
        TransferError: naming the first pair of ranks that disagrees, and both numbers.
    """
    wrong = np.argwhere(sent != expected.T)
    if len(wrong):
        source, target = wrong[0].tolist()
        sentence = (
            f"{function}: {exchange.name(source)} sends {sent[source, target]} rows to "
            f"{exchange.name(target)}, which expects {expected[target, source]} "
            f"({len(wrong)} pairs of ranks disagree). input_splits of one must be output_splits of "
            "the other. Nothing was sent."
        )
        raise TransferError(f"{exchange.where('counts')}: {sentence}")


def _compare(exchange: ExchangeGroup, names: Sequence[str], words: NDArray[np.int64]) -> None:
    """Raise unless all ranks' fields are equal; the first rank is what the others are held to."""
    differs = (words != words[0]).reshape(len(words), len(names), -1).any(axis=2)
    if not differs.any():
        return
    rank, field = np.argwhere(differs)[0].tolist()
    theirs, ours = (_read(words[r], field) for r in (rank, 0))
    function = _read(words[0], names.index("function"))
    raise TransferError(
        f"{exchange.where('counts')}: {function}: {names[field]} must be the same on every rank, "
        f"but {exchange.name(0)} has {ours} and {exchange.name(rank)} has {theirs}. "
        "Nothing was sent."
    )


def _read(words: NDArray[np.int64], field: int) -> str:
    size = _WORD_BYTES // 8
    raw = words[field * size : (field + 1) * size].tobytes()
    return raw.rstrip(b"\0").decode(errors="replace")


def _to_numpy(table: Tensor) -> IntArray:
    array: IntArray = table.cpu().numpy()
    return array
