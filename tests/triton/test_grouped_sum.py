"""grouped_sum equals a sum per expert, gathered and weighted or not."""

import pytest
import torch

from piper_kernels.permutation import Permutation
from piper_kernels.testing import assert_close_to_baseline, guard_with_nan, make_routing
from piper_kernels.triton.grouped_sum import grouped_sum
from piper_kernels.triton.tile_schedule import tile_schedules


@pytest.mark.parametrize("has_gates", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16], ids=str)
def test_grouped_sum(dtype: torch.dtype, has_gates: bool) -> None:
    # expert 3 takes every token's first choice: more rows than one tile sums
    ids, gates = make_routing("all_to_one", 150, 4, 2)
    ids[ids == 1] = 4  # expert 1 is empty, and there are sentinels
    permutation = Permutation.from_expert_ids(ids, 4)
    values = torch.randn(150 if has_gates else 300, 70).to(dtype)
    slots = permutation.row_to_slot.long()
    rows = values.double()
    if has_gates:
        rows = gates.flatten()[slots, None].double() * rows[slots // 2]
    ends = permutation.expert_offsets.tolist()
    truth = torch.stack([rows[ends[e] : ends[e + 1]].sum(0) for e in range(4)])
    out = grouped_sum(
        guard_with_nan(values),
        permutation,
        tile_schedules(permutation.expert_offsets, 300),
        out=torch.empty(4, 70, dtype=dtype),
        gates=gates if has_gates else None,
    )
    assert_close_to_baseline("out", out, truth.to(dtype), truth)
    assert (out[1] == 0).all()


def test_grouped_sum_example() -> None:
    permutation = Permutation.from_expert_ids(torch.tensor([[0], [0], [2]]), 3)
    schedules = tile_schedules(permutation.expert_offsets, 3)
    values = torch.tensor([[1.0], [2.0], [4.0]])
    out = grouped_sum(values, permutation, schedules, out=torch.empty(3, 1))
    assert out.tolist() == [[3.0], [0.0], [4.0]]
