"""Re-reads of the ragged GEMMs; what they load and store is counted in test_layer.py."""

from dataclasses import replace

from piper_kernels.cost import ExpertsSizes
from piper_kernels.cost.gemm import gate_up_traffic, grouped_gemm_traffic
from piper_kernels.cost.ragged import RaggedRows
from piper_kernels.cost.traffic import Memory
from piper_kernels.testing import make_routing
from piper_kernels.triton.tiles import TileConfig

TILES = TileConfig(block_m=16, block_n=16, block_k=16, group_m=1)
SIZES = ExpertsSizes(num_tokens=64, hidden_size=32, intermediate_size=24, num_experts=4, top_k=2)


def uniform_rows() -> RaggedRows:
    ids, _ = make_routing("uniform", 64, 4, 2)
    return RaggedRows.from_expert_ids(ids.numpy(), 4)


def test_gemm_rereads_of_one_program_and_no_cache_are_every_load() -> None:
    rows, memory = uniform_rows(), Memory(cache_bytes=0, num_programs=1)
    sizes = {"in_size": 32, "out_size": 48}
    traffic = grouped_gemm_traffic(rows, TILES, **sizes, memory=memory)
    # 3 column tiles read the rows, each row tile reads the weight
    row_tiles = rows.num_tiles(16)
    loaded = 3 * rows.num_valid * 32 * 2 + row_tiles * 32 * 48 * 2
    distinct = rows.num_valid * 32 * 2 + rows.num_hit_experts * 32 * 48 * 2
    assert traffic.reread == loaded - distinct


def test_gemm_column_first_order_reads_rows_once() -> None:
    rows = uniform_rows()
    # room for a few row tiles (1 KiB each) and nothing like all weights (12 KiB)
    memory = Memory(cache_bytes=6144, num_programs=1)
    sizes = {"in_size": 32, "out_size": 48}
    column_first = grouped_gemm_traffic(rows, TILES, **sizes, memory=memory)
    row_first = grouped_gemm_traffic(rows, replace(TILES, group_m=64), **sizes, memory=memory)
    assert column_first.reread < row_first.reread
    assert column_first.issued == row_first.issued
    assert column_first.compulsory == row_first.compulsory


def test_gate_up_rereads_only_the_gather_when_weights_fit() -> None:
    rows = uniform_rows()
    every_token = (rows.num_valid - rows.num_hit_tokens) * 32 * 2
    weights = 4 * 48 * 32 * 2
    memory = Memory(cache_bytes=weights + 1500, num_programs=6)
    reread = gate_up_traffic(SIZES, rows, TILES, keeps_preact=False, memory=memory).reread
    assert 0 < reread <= every_token
    assert gate_up_traffic(SIZES, rows, TILES, keeps_preact=False).reread == 0
