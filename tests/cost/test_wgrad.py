"""Weight gradients: accumulation and wide outputs are counted, and re-reads follow the cache."""

from collections.abc import Callable

import pytest
import torch

from piper_kernels.cost.ragged import RaggedRows
from piper_kernels.cost.traffic import Memory
from piper_kernels.cost.wgrad import Operand, wgrad_traffic
from piper_kernels.permutation import Permutation
from piper_kernels.testing import make_routing
from piper_kernels.testing.kernel_traffic import count_kernel_traffic
from piper_kernels.triton.grouped_gemm_wgrad import RowSource, weight_grad
from piper_kernels.triton.tiles import TileConfig


@pytest.mark.parametrize("split_rows", [None, 16, 40])
@pytest.mark.parametrize("accumulates", [True, False])
def test_wgrad_traffic_is_counted(
    split_rows: int | None,
    accumulates: bool,
    ledger_rows: Callable[..., RaggedRows],
    check_counted: Callable[..., None],
) -> None:
    ids, _ = make_routing("skewed", 33, 4, 2)
    permutation = Permutation.from_expert_ids(ids, 4)
    tiles = TileConfig(block_m=16, block_n=32, block_k=16, group_m=2, split_rows=split_rows)
    grad, x = torch.randn(66, 24).half(), torch.randn(33, 40).half()
    out = torch.zeros(4, 24, 40)
    with count_kernel_traffic() as launches:
        weight_grad(
            RowSource(grad),
            RowSource(x, permutation.row_to_token),
            permutation.expert_offsets,
            66,
            out=out,
            is_transposed=False,
            accumulate=accumulates,
            tiles=tiles,
        )
    traffic = wgrad_traffic(
        ledger_rows(permutation),
        Operand(24),
        Operand(40, is_gathered=True),
        tiles,
        out_bytes=4,
        accumulates=accumulates,
    )
    check_counted(launches, traffic, "wgrad")
    rows_flops = 2 * 66 * 24 * 40
    assert traffic.flops >= rows_flops


def test_wgrad_rereads_are_none_with_room_and_all_without() -> None:
    ids, _ = make_routing("uniform", 64, 4, 2)
    rows = RaggedRows.from_expert_ids(ids.numpy(), 4)
    tiles = TileConfig(block_m=16, block_n=32, block_k=16, group_m=1)

    def reread(cache_bytes: float) -> int:
        memory = Memory(cache_bytes=cache_bytes, num_programs=1)
        operands = Operand(32), Operand(64, is_gathered=True)
        return wgrad_traffic(rows, *operands, tiles, memory=memory).reread

    assert reread(1e9) == 0
    # one program at a time and nothing is held: 2 column tiles read grad, 2 row tiles read x
    loaded = rows.num_valid * (2 * 32 + 2 * 64) * 2
    distinct = (rows.num_valid * 32 + rows.num_hit_tokens * 64) * 2
    assert reread(0) == loaded - distinct
