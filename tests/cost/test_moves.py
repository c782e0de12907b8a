"""Launches without a GEMM move what the ledger says, and what it says of a gather's re-reads."""

from collections.abc import Callable

import pytest
import torch

from piper_kernels.config import SWIGLU, WeightLayout
from piper_kernels.cost import moves
from piper_kernels.cost.ragged import RaggedRows
from piper_kernels.cost.traffic import Memory
from piper_kernels.permutation import Permutation
from piper_kernels.testing import RoutingKind, make_routing
from piper_kernels.testing.kernel_traffic import count_kernel_traffic
from piper_kernels.triton.activation import activation_forward
from piper_kernels.triton.permute import permute_backward, permute_forward
from piper_kernels.triton.unpermute import unpermute_backward, unpermute_forward


@pytest.mark.parametrize("kind", ["uniform", "with_sentinels", "one_expert_empty"])
@pytest.mark.parametrize("hidden", [24, 300])
def test_moves_are_counted(
    kind: RoutingKind,
    hidden: int,
    ledger_rows: Callable[..., RaggedRows],
    check_counted: Callable[..., None],
) -> None:
    ids, gates = make_routing(kind, 37, 4, 2)
    permutation = Permutation.from_expert_ids(ids, 4)
    rows = ledger_rows(permutation)
    x, values = torch.randn(37, hidden).half(), torch.randn(74, hidden).half()
    size = {"hidden_size": hidden, "element_bytes": 2}
    with count_kernel_traffic() as launches:
        permute_forward(x, permutation)
        permute_backward(values, permutation)
        unpermute_forward(values, gates, permutation)
        unpermute_backward(x, values, gates, permutation)
    expected = [
        moves.permute_traffic(rows, **size),
        moves.sum_over_rows_traffic(rows, has_gates=False, **size),
        moves.sum_over_rows_traffic(rows, has_gates=True, **size),
        moves.unpermute_backward_traffic(rows, **size),
    ]
    assert len(launches) == len(expected)
    for launch, traffic in zip(launches, expected, strict=True):
        check_counted([launch], traffic, launch.kernel)


@pytest.mark.parametrize("layout", [WeightLayout(), WeightLayout(is_gated=False)], ids=str)
@pytest.mark.parametrize("has_gates", [True, False])
def test_activation_traffic_is_counted(
    layout: WeightLayout,
    has_gates: bool,
    ledger_rows: Callable[..., RaggedRows],
    check_counted: Callable[..., None],
) -> None:
    ids, gates = make_routing("with_sentinels", 21, 3, 2)
    permutation = Permutation.from_expert_ids(ids, 3)
    preact = torch.randn(42, layout.preact_size(300))
    with count_kernel_traffic() as launches:
        given = gates if has_gates else None
        activation_forward(preact, permutation, SWIGLU, layout, gates=given)
    traffic = moves.activation_traffic(
        ledger_rows(permutation),
        intermediate_size=300,
        layout=layout,
        has_gates=has_gates,
        element_bytes=4,
    )
    check_counted(launches, traffic, "activation")


def test_gather_rereads_lie_between_none_and_all() -> None:
    ids, _ = make_routing("uniform", 400, 8, 4)
    rows = RaggedRows.from_expert_ids(ids.numpy(), 8)

    def rereads(cache_rows: float) -> int:
        memory = Memory(cache_bytes=cache_rows * 64, num_programs=1)
        return moves.gather_rereads(rows, row_bytes=64, written_bytes=0, memory=memory)

    # every token fits: none twice; next to nothing fits: every row is read
    assert rereads(400) == 0
    every_row = (rows.num_valid - rows.num_hit_tokens) * 64
    assert rereads(1) == every_row
    assert 0 < rereads(200) < every_row
