"""The unfused layer's ledger: its sums against the tensors that its launches read and write."""

import torch

from piper_kernels.cost import ExpertsSizes
from piper_kernels.cost.layer import total
from piper_kernels.cost.ragged import RaggedRows
from piper_kernels.cost.unfused import (
    unfused_backward_ledger,
    unfused_forward_ledger,
    unfused_kept_bytes,
)
from piper_kernels.testing import make_routing
from piper_kernels.triton.tiles import default_experts_tiles

T, H, I, E, K = 64, 32, 24, 4, 2
SIZES = ExpertsSizes(num_tokens=T, hidden_size=H, intermediate_size=I, num_experts=E, top_k=K)


def ledgers() -> tuple[dict, dict]:
    ids, _ = make_routing("uniform", T, E, K)
    rows = RaggedRows.from_expert_ids(ids.numpy(), E)
    tiles = default_experts_tiles(
        num_rows=T * K, num_experts=E, sizes=(H, I, 2 * I), element_bytes=2
    )
    return (
        unfused_forward_ledger(SIZES, rows, tiles),
        unfused_backward_ledger(SIZES, rows, tiles),
    )


def test_unfused_forward_moves_its_tensors() -> None:
    forward, _ = ledgers()
    rows_h, rows_i = T * K * H * 2, T * K * I * 2
    # three copies of the rows (gather, times_gate, to_slots), read and written, then the sum
    copies = ["gather", "times_gate", "to_slots", "sum_over_k"]
    moved = sum(forward[name].compulsory for name in copies)
    large = T * H * 2 + rows_h + 2 * rows_h + 2 * rows_h + rows_h + T * H * 2
    small = T * K * (8 + 2 + 8)
    assert moved == large + small
    assert forward["silu"].compulsory + forward["times_up"].compulsory == 5 * rows_i
    assert forward["gather"].issued == 2 * rows_h + T * K * 8


def test_unfused_flops_are_the_gemms_of_three_matrices() -> None:
    forward, backward = ledgers()
    gemms = 2 * T * K * 3 * H * I
    names = ("gate_up", "down")
    assert sum(forward[name].flops for name in names) == gemms
    names = ("grad_act", "grad_rows", "grad_down", "grad_gate_up")
    assert sum(backward[name].flops for name in names) == 2 * gemms
    assert total(backward).compulsory > total(forward).compulsory


def test_unfused_kept_bytes_is_what_autograd_keeps_of_transformers() -> None:
    from transformers import Qwen3MoeConfig
    from transformers.models.qwen3_moe.modeling_qwen3_moe import Qwen3MoeExperts

    config = Qwen3MoeConfig(
        hidden_size=H, moe_intermediate_size=I, num_experts=E, num_experts_per_tok=K
    )
    config._experts_implementation = "grouped_mm"
    module = Qwen3MoeExperts(config).bfloat16()
    with torch.no_grad():
        for parameter in module.parameters():
            parameter.normal_()
    ids, gates = make_routing("uniform", T, E, K, dtype=torch.bfloat16)
    x = torch.randn(T, H).bfloat16().requires_grad_()
    kept: dict[int, int] = {}
    own = {parameter.data_ptr() for parameter in module.parameters()}

    def keep(tensor: torch.Tensor) -> torch.Tensor:
        if tensor.untyped_storage().data_ptr() not in own:
            kept[tensor.untyped_storage().data_ptr()] = tensor.untyped_storage().nbytes()
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        module(x, ids, gates.requires_grad_())
    # the gathered input is kept by the GEMM; x itself is not, and belongs to its owner
    modelled = unfused_kept_bytes(SIZES)
    offsets = E * 4
    assert sum(kept.values()) == sum(modelled.values()) - modelled["x"] + offsets
