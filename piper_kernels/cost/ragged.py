"""Raggedness as data: which rows an expert has, how tiles cut them, in which order programs run.

Letters: T num_tokens, K top_k, E num_experts, R = T*K num_rows.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

IntArray = NDArray[np.int64]


class Tiles(Protocol):
    """What the ledger reads of a GEMM's tiles; ``triton.tiles.TileConfig`` has it."""

    @property
    def block_m(self) -> int:
        """Rows of a tile."""

    @property
    def block_n(self) -> int:
        """Columns of a tile."""

    @property
    def group_m(self) -> int:
        """Row tiles that share a column tile in turn."""

    @property
    def num_xcds(self) -> int:
        """Chiplets among which consecutive programs are dealt out."""

    @property
    def split_rows(self) -> int | None:
        """Rows of a chunk of a long expert's weight gradient."""


def num_tiles(size: int, block: int) -> int:
    """Tiles of ``block`` that cover ``size``.

    Example:
        >>> num_tiles(5, 4)
        2
    """
    return -(-size // block)


def max_tiles(num_rows: int, num_experts: int, block_rows: int) -> int:
    """The most tiles that any split of ``num_rows`` rows over ``num_experts`` experts can need.

    All experts but one own a single row in the worst case.

    Example:
        >>> max_tiles(10, 4, 4), max_tiles(3, 8, 16)
        (5, 3)
    """
    if num_rows <= num_experts:
        return num_rows
    return num_experts - 1 + num_tiles(num_rows - num_experts + 1, block_rows)


def max_chunks(num_rows: int, chunk_rows: int) -> int:
    """The most chunks of experts longer than ``chunk_rows``: each at best has one row too many.

    Example:
        >>> max_chunks(10, 4)
        4
    """
    return 2 * num_rows // (chunk_rows + 1)


# not slots: cached properties need a dict
@dataclass(frozen=True, eq=False)
class RaggedRows:
    """The valid rows of one routing in expert-sorted order.

    Attributes:
        num_tokens: T.
        top_k: K.
        expert_counts: ``[E]`` rows of each expert.
        row_to_token: one token for each valid row.
    """

    num_tokens: int
    top_k: int
    expert_counts: IntArray
    row_to_token: IntArray

    @classmethod
    def from_expert_ids(
        cls, expert_ids: Sequence[Any] | IntArray, num_experts: int
    ) -> "RaggedRows":
        """Sort slots by expert, stably; ids that are no expert are sentinels.

        Args:
            expert_ids: ``[T, K]`` integers, nested or an array.
            num_experts: E.

        Example:
            >>> rows = RaggedRows.from_expert_ids([[2, 0], [0, 3]], num_experts=3)
            >>> rows.expert_counts.tolist(), rows.row_to_token.tolist()
            ([2, 0, 1], [0, 1, 0])
        """
        ids = np.asarray(expert_ids, dtype=np.int64)
        flat = ids.reshape(-1)
        flat = np.where((flat >= 0) & (flat < num_experts), flat, num_experts)
        counts = np.bincount(flat, minlength=num_experts + 1)[:num_experts]
        slots = np.argsort(flat, kind="stable")[: counts.sum()]
        return cls(ids.shape[0], ids.shape[1], counts, slots // ids.shape[1])

    @property
    def num_experts(self) -> int:
        """E."""
        return len(self.expert_counts)

    @property
    def num_rows(self) -> int:
        """R, sentinel rows included."""
        return self.num_tokens * self.top_k

    @property
    def num_valid(self) -> int:
        """Rows that belong to an expert."""
        return len(self.row_to_token)

    @cached_property
    def num_hit_experts(self) -> int:
        """Experts with a row."""
        return int((self.expert_counts > 0).sum())

    @cached_property
    def num_hit_tokens(self) -> int:
        """Tokens with a row."""
        return len(np.unique(self.row_to_token))

    @cached_property
    def expert_offsets(self) -> IntArray:
        """``[E + 1]``, exclusive."""
        return np.concatenate([[0], np.cumsum(self.expert_counts)]).astype(np.int64)

    def num_tiles(self, block_rows: int) -> int:
        """Tiles of ``block_rows`` rows over all experts."""
        return int(num_tiles_of(self.expert_counts, block_rows).sum())

    def schedule_length(self, block_rows: int) -> int:
        """Entries of the tile schedule, padding included."""
        return max_tiles(self.num_rows, self.num_experts, block_rows)

    def tiles(self, block_rows: int) -> tuple[IntArray, IntArray, IntArray]:
        """``(expert, first row, end)`` of every tile, expert-major.

        Example:
            >>> rows = RaggedRows.from_expert_ids([[0], [0], [1]], num_experts=2)
            >>> [array.tolist() for array in rows.tiles(1)]
            [[0, 0, 1], [0, 1, 2], [1, 2, 3]]
        """
        per_expert = num_tiles_of(self.expert_counts, block_rows)
        experts = np.repeat(np.arange(self.num_experts), per_expert)
        first_tiles = np.cumsum(per_expert) - per_expert
        place = np.arange(len(experts)) - first_tiles[experts]
        first_rows = self.expert_offsets[experts] + place * block_rows
        ends = np.minimum(first_rows + block_rows, self.expert_offsets[experts + 1])
        return experts, first_rows, ends


def num_tiles_of(counts: IntArray, block_rows: int) -> IntArray:
    """:func:`num_tiles` of each count."""
    return -(-counts // block_rows)


def program_order(
    num_row_tiles: int, num_col_tiles: int, *, group_m: int, num_xcds: int = 1
) -> tuple[IntArray, IntArray]:
    """``(row tile, column tile)`` of each program in launch order, as the kernels compute them.

    Example:
        >>> [tiles.tolist() for tiles in program_order(3, 2, group_m=2)]
        [[0, 1, 0, 1, 2, 2], [0, 0, 1, 1, 0, 1]]
    """
    pid = np.arange(num_row_tiles * num_col_tiles)
    share, num_longer = divmod(len(pid), num_xcds)
    xcd = pid % num_xcds
    pid = xcd * share + np.minimum(xcd, num_longer) + pid // num_xcds
    group_size = group_m * num_col_tiles
    first_tile = pid // group_size * group_m
    num_in_group = np.minimum(num_row_tiles - first_tile, group_m)
    place = pid % group_size
    return first_tile + place % num_in_group, place // num_in_group
