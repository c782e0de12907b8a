"""Permutation: the one object that carries raggedness.

Letters: T num_tokens, K top_k, E num_experts, R = T*K num_rows.
A *slot* is a (token, k) pair in token order, ``t*K + k``. A *row* is a position in expert-sorted
order. Rows of one expert are contiguous and keep slot order, so every sum over rows is
reproducible.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from piper_kernels.errors import (
    RoutingError,
    ShapeError,
    check_dtype,
    check_shape,
    instruction,
    require,
)

MAX_ROWS = 2**31 - 1
ID_DTYPES = (torch.int64, torch.int32)


def mark_sentinels(expert_ids: Tensor, num_experts: int) -> Tensor:
    """The ids with E in place of everything that is no expert's, without synchronising.

    This is the meaning of every id, on every backend; the Triton kernels say the same.

    Args:
        expert_ids: any shape, int64 or int32.
        num_experts: E.

    Example:
        >>> mark_sentinels(torch.tensor([1, -1, 2, 3, 99]), 3)
        tensor([1, 3, 2, 3, 3])
    """
    is_expert = (expert_ids >= 0) & (expert_ids < num_experts)
    return torch.where(is_expert, expert_ids, num_experts)


def refuse_negative_ids(function: str, expert_ids: Tensor, num_experts: int) -> None:
    """Raise if an id is negative. Looks at values: free on the CPU, a synchronisation elsewhere.

    Args:
        function: the public function, for the message.
        expert_ids: ``[T, K]``.
        num_experts: E.

    Raises:
        RoutingError: saying how many are negative.
    """
    num_negative = int((expert_ids < 0).sum())
    if num_negative:
        value = f"{num_negative} negative ids"
        remedy = f"Mark slots that nobody computes with E = {num_experts}."
        raise RoutingError(instruction(function, "expert_ids", "be >= 0", value, remedy))


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class Permutation:
    """Counts, offsets and the maps between slots and rows. Shapes depend on (T, K, E) alone.

    Slots whose id is a sentinel (no expert's: another rank owns it, or the slot was dropped)
    are carried to the tail: rows from ``expert_offsets[E]`` on are not computed, give output 0 and
    receive no gradient.

    Attributes:
        num_experts: E.
        top_k: K.
        expert_counts: ``[E]`` int32, rows of each expert.
        expert_offsets: ``[E + 1]`` int32, exclusive: expert e owns rows
            ``expert_offsets[e]:expert_offsets[e + 1]``. The last entry is the number of valid rows.
        row_to_slot: ``[R]`` int32.
        slot_to_row: ``[R]`` int32, its inverse.
        row_to_token: ``[R]`` int32, ``row_to_slot // K``.

    Example:
        Three tokens, K = 2, E = 3; token 2's second slot belongs to another rank (id 3)::

            expert_ids     = [[2, 0], [0, 1], [2, 3]]
            expert_counts  = [2, 1, 2]
            expert_offsets = [0, 2, 3, 5]
            row_to_slot    = [1, 2, 3, 0, 4, 5]
            slot_to_row    = [3, 0, 1, 2, 4, 5]
            row_to_token   = [0, 1, 1, 0, 2, 2]
    """

    num_experts: int
    top_k: int
    expert_counts: Tensor
    expert_offsets: Tensor
    row_to_slot: Tensor
    slot_to_row: Tensor
    row_to_token: Tensor

    @property
    def num_rows(self) -> int:
        """R, sentinel rows included."""
        return self.row_to_slot.shape[0]

    @property
    def num_tokens(self) -> int:
        """T."""
        return self.num_rows // self.top_k

    @classmethod
    def from_expert_ids(cls, expert_ids: Tensor, num_experts: int) -> "Permutation":
        """Sort slots by expert, stably and without a host synchronisation.

        Args:
            expert_ids: ``[T, K]`` int64 or int32. Ids outside ``[0, num_experts)`` are sentinels.
                An id below 0 is a caller's error: :meth:`check` and, on the CPU, ``experts`` find
                it; elsewhere finding it would synchronise, so such slots are dropped.
            num_experts: E.

        Returns:
            The permutation, on the device of ``expert_ids``.

        Raises:
            ShapeError: ``expert_ids`` is not two-dimensional, has K = 0, or T*K reaches 2^31.
            DtypeError: ``expert_ids`` is not an integer tensor.
            ConfigError: ``num_experts`` is below 1.
        """
        name = "Permutation.from_expert_ids"
        check_shape(name, "expert_ids", expert_ids, ("T", "K"), (None, None))
        check_dtype(name, "expert_ids", expert_ids, ID_DTYPES)
        require(num_experts >= 1, name, "num_experts", "be at least 1", num_experts)
        num_tokens, top_k = expert_ids.shape
        require(top_k >= 1, name, "top_k", "be at least 1", top_k, error=ShapeError)
        num_rows = num_tokens * top_k
        require(
            num_rows <= MAX_ROWS,
            name,
            "T * K",
            f"be below 2^31 (row maps are int32), with shape {tuple(expert_ids.shape)}",
            num_rows,
            "Use a smaller microbatch.",
            error=ShapeError,
        )
        device = expert_ids.device
        slot_ids = mark_sentinels(expert_ids.reshape(-1), num_experts)
        sorted_ids, row_to_slot = torch.sort(slot_ids, stable=True)
        edges = torch.arange(num_experts + 1, device=device, dtype=sorted_ids.dtype)
        expert_offsets = torch.searchsorted(sorted_ids, edges, out_int32=True)
        slot_to_row = torch.empty(num_rows, dtype=torch.int32, device=device)
        slot_to_row[row_to_slot] = torch.arange(num_rows, dtype=torch.int32, device=device)
        row_to_slot = row_to_slot.to(torch.int32)
        return cls(
            num_experts=num_experts,
            top_k=top_k,
            expert_counts=expert_offsets.diff(),
            expert_offsets=expert_offsets,
            row_to_slot=row_to_slot,
            slot_to_row=slot_to_row,
            row_to_token=torch.div(row_to_slot, top_k, rounding_mode="floor"),
        )

    def check(self, expert_ids: Tensor) -> None:
        """Verify every promise of this class against ``expert_ids``. Synchronises: for tests.

        Raises:
            RoutingError: an id is negative, or a map, a count or an offset is wrong.
        """
        name = "Permutation.check"
        slot_ids = expert_ids.reshape(-1).cpu().long()
        lowest = int(slot_ids.min()) if slot_ids.numel() else 0
        if lowest < 0:
            remedy = f"Mark slots that nobody computes with {self.num_experts}."
            raise RoutingError(instruction(name, "expert_ids", "be >= 0", lowest, remedy))
        row_to_slot, slot_to_row = self.row_to_slot.cpu().long(), self.slot_to_row.cpu().long()
        rows = torch.arange(self.num_rows)
        offsets = self.expert_offsets.cpu().long()
        # a sentinel may be any number: bincount would make room for the largest
        slot_ids = slot_ids.clamp(max=self.num_experts)
        sorted_ids = slot_ids[row_to_slot]
        expected_counts = torch.bincount(slot_ids, minlength=self.num_experts)[: self.num_experts]
        same_expert = sorted_ids[1:] == sorted_ids[:-1]
        promises = {
            "slot_to_row must be the inverse of row_to_slot": torch.equal(
                slot_to_row[row_to_slot], rows
            ),
            "rows must be sorted by expert": bool((sorted_ids[1:] >= sorted_ids[:-1]).all()),
            "rows of one expert must keep slot order": bool(
                (row_to_slot[1:] > row_to_slot[:-1])[same_expert].all()
            ),
            "expert_counts must count the ids": torch.equal(
                self.expert_counts.cpu().long(), expected_counts
            ),
            "expert_offsets must be the exclusive cumulative counts": bool(offsets[0] == 0)
            and torch.equal(offsets.diff(), expected_counts),
            "row_to_token must be row_to_slot // top_k": torch.equal(
                self.row_to_token.cpu().long(), row_to_slot // self.top_k
            ),
        }
        for promise, holds in promises.items():
            if not holds:
                raise RoutingError(f"{name}: {promise}.")
