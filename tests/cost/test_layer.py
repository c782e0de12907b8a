"""The ledger of a layer equals what its kernels load and store, launch by launch."""

from collections.abc import Callable
from typing import Any

import pytest
import torch

from piper_kernels.config import WeightLayout
from piper_kernels.contracts import ExpertsNeeds
from piper_kernels.cost import ExpertsSizes, experts_backward_cost, experts_forward_cost
from piper_kernels.cost.layer import (
    experts_backward_ledger,
    experts_forward_ledger,
    kept_bytes,
    total,
)
from piper_kernels.cost.ragged import RaggedRows
from piper_kernels.cost.traffic import Memory
from piper_kernels.functional import experts
from piper_kernels.testing import ExpertsInputs, RoutingKind, make_experts_inputs, make_routing
from piper_kernels.testing.kernel_traffic import count_kernel_traffic
from piper_kernels.triton.experts import experts_backward, experts_forward
from piper_kernels.triton.tiles import ExpertsTiles, TileConfig, default_experts_tiles

ALL = ExpertsNeeds(
    x=True, gates=True, gate_up_proj=True, down_proj=True, gate_up_bias=True, down_bias=True
)
# which kernels a line of the ledger stands for; zeroing is torch's own launch
KERNELS = {
    "tile_schedule": ["_tile_schedule_kernel"],
    "gate_up": ["_gate_up_kernel"],
    "down": ["_grouped_gemm_kernel"],
    "combine": ["_sum_over_rows_kernel"],
    "grad_act": ["_grad_act_kernel"],
    "grad_gates": ["_add_shares_kernel"],
    "grad_rows": ["_grouped_gemm_kernel"],
    "grad_x": ["_sum_over_rows_kernel"],
    "grad_gate_up": ["_wgrad_kernel"],
    "grad_down": ["_wgrad_kernel"],
    "grad_gate_up_bias": ["_sum_tiles_kernel", "_sum_experts_kernel"],
    "grad_down_bias": ["_sum_tiles_kernel", "_sum_experts_kernel"],
}
SPLIT_WGRAD = ["_tile_schedule_kernel", "_wgrad_kernel", "_add_chunks_kernel"]


def make_tiles(block_m: int, block_n: int, split_rows: int | None) -> ExpertsTiles:
    gemm = TileConfig(block_m=block_m, block_n=block_n, block_k=16, group_m=2, num_xcds=3)
    wgrad = TileConfig(block_m=32, block_n=64, block_k=16, group_m=2, split_rows=split_rows)
    return ExpertsTiles(
        gate_up=gemm, down=gemm, grad_act=gemm, grad_x=gemm, grad_gate_up=wgrad, grad_down=wgrad
    )


TILES = {"small": make_tiles(16, 32, None), "split": make_tiles(32, 16, 16)}


def sizes_of(inputs: ExpertsInputs) -> ExpertsSizes:
    return ExpertsSizes(
        num_tokens=inputs.x.shape[0],
        hidden_size=inputs.x.shape[1],
        intermediate_size=inputs.weights.intermediate_size,
        num_experts=len(inputs.gate_up_proj),
        top_k=inputs.expert_ids.shape[1],
        element_bytes=inputs.x.element_size(),
        layout=inputs.layout,
    )


def assert_ledger(
    launches: list[Any], ledger: dict[str, Any], check: Callable[..., None], *, is_split: bool
) -> None:
    """Walk over launches and lines side by side; nothing may be left over."""
    left = list(launches)
    for name, traffic in ledger.items():
        if name == "zero_grad_gates":
            continue
        kernels = KERNELS[name]
        if is_split and kernels == ["_wgrad_kernel"]:
            kernels = SPLIT_WGRAD
        mine, left = left[: len(kernels)], left[len(kernels) :]
        assert [launch.kernel for launch in mine] == kernels, name
        check(mine, traffic, name)
    assert not left


# T, H, I, E, K: nothing is a multiple of a tile, and several tiles in every direction
@pytest.mark.parametrize(
    ("routing", "tiles", "layout", "has_bias", "dtype"),
    [
        ("skewed", "small", WeightLayout(), True, torch.float32),
        (
            "one_expert_empty",
            "split",
            WeightLayout(is_interleaved=True, is_transposed=True),
            False,
            torch.float16,
        ),
        ("with_sentinels", "small", WeightLayout(is_gated=False), True, torch.bfloat16),
        ("all_to_one", "split", WeightLayout(), True, torch.float32),
    ],
    ids=["skewed", "one_expert_empty", "with_sentinels", "all_to_one"],
)
def test_experts_ledger_is_what_the_kernels_move(
    routing: RoutingKind,
    tiles: str,
    layout: WeightLayout,
    has_bias: bool,
    dtype: torch.dtype,
    ledger_rows: Callable[..., RaggedRows],
    check_counted: Callable[..., None],
) -> None:
    inputs = make_experts_inputs(
        33,
        56,
        40,
        5,
        2,
        routing=routing,
        layout=layout,
        dtype=dtype,
        has_gate_up_bias=has_bias,
        has_down_bias=has_bias,
    )
    args = inputs.x, inputs.gates, inputs.permutation, inputs.weights
    with count_kernel_traffic() as forward:
        _, preact = experts_forward(*args, needs_preact=True, tiles=TILES[tiles])
    with count_kernel_traffic() as backward:
        experts_backward(inputs.grad_y, *args, preact, needs=ALL, tiles=TILES[tiles])
    sizes, rows = sizes_of(inputs), ledger_rows(inputs.permutation)
    bias = {"bias_bytes": inputs.x.element_size() if has_bias else 0}
    ledger = experts_forward_ledger(sizes, rows, TILES[tiles], keeps_preact=True, **bias)
    assert_ledger(forward, ledger, check_counted, is_split=False)
    ledger = experts_backward_ledger(sizes, rows, TILES[tiles], **bias)
    assert_ledger(backward, ledger, check_counted, is_split=tiles == "split")


def test_experts_ledger_skips_what_nobody_needs(
    ledger_rows: Callable[..., RaggedRows], check_counted: Callable[..., None]
) -> None:
    inputs = make_experts_inputs(20, 32, 24, 3, 2)
    args = inputs.x, inputs.gates, inputs.permutation, inputs.weights
    tiles, sizes, rows = TILES["small"], sizes_of(inputs), ledger_rows(inputs.permutation)
    with count_kernel_traffic() as forward:
        experts_forward(*args, needs_preact=False, tiles=tiles)
    ledger = experts_forward_ledger(sizes, rows, tiles, keeps_preact=False)
    assert_ledger(forward, ledger, check_counted, is_split=False)
    needs = ExpertsNeeds(
        x=True,
        gates=False,
        gate_up_proj=False,
        down_proj=False,
        gate_up_bias=False,
        down_bias=False,
    )
    with count_kernel_traffic() as backward:
        experts_backward(inputs.grad_y, *args, None, needs=needs, tiles=tiles)
    ledger = experts_backward_ledger(
        sizes, rows, tiles, has_preact=False, needs_weights=False, needs_gates=False
    )
    assert_ledger(backward, ledger, check_counted, is_split=False)


QWEN3 = ExpertsSizes(
    num_tokens=32768, hidden_size=2048, intermediate_size=768, num_experts=128, top_k=8
)


def test_experts_ledger_keeps_to_the_plan_at_qwen3_30b() -> None:
    expert_ids, _ = make_routing("uniform", 32768, 128, 8)
    rows = RaggedRows.from_expert_ids(expert_ids.numpy(), 128)
    tiles = default_experts_tiles(
        num_rows=rows.num_rows, num_experts=128, sizes=(2048, 768, 1536), element_bytes=2
    )
    forward = total(experts_forward_ledger(QWEN3, rows, tiles, keeps_preact=True))
    plan = experts_forward_cost(QWEN3, keeps_preact=True)
    assert plan.bytes <= forward.compulsory <= 1.02 * plan.bytes
    assert forward.flops == plan.flops
    backward = total(experts_backward_ledger(QWEN3, rows, tiles))
    plan = experts_backward_cost(QWEN3)
    assert plan.bytes <= backward.compulsory <= 1.02 * plan.bytes
    # an infinite cache loses nothing, a finite one reads tokens again
    assert forward.dram == forward.compulsory
    memory = Memory(cache_bytes=50e6, num_programs=132)
    lossy = experts_forward_ledger(QWEN3, rows, tiles, keeps_preact=True, memory=memory)
    gathered_again = (rows.num_valid - rows.num_hit_tokens) * 2048 * 2
    assert 0 < total(lossy).reread <= gathered_again


def test_kept_bytes_is_what_autograd_keeps() -> None:
    inputs = make_experts_inputs(12, 24, 8, 4, 2)
    weights = inputs.gate_up_proj.requires_grad_(), inputs.down_proj.requires_grad_()
    kept: dict[int, int] = {}
    own = {weight.data_ptr() for weight in weights}

    def keep(tensor: torch.Tensor) -> torch.Tensor:
        if tensor.data_ptr() not in own:
            kept[tensor.data_ptr()] = tensor.untyped_storage().nbytes()
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        experts(inputs.x, inputs.expert_ids, inputs.gates, *weights)
    assert sum(kept.values()) == sum(kept_bytes(sizes_of(inputs)).values())
