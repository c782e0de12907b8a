"""The raw CPU backend against its contract."""

import pytest
import torch

from piper_kernels.contracts import ExpertsNeeds, ExpertsWeights
from piper_kernels.cpu.experts import experts_backward, experts_forward
from piper_kernels.permutation import Permutation
from piper_kernels.reference.grouped_gemm import grouped_gemm
from piper_kernels.reference.permute import permute
from piper_kernels.testing.experts import ExpertsInputs, make_experts_inputs
from piper_kernels.testing.memory import peak_bytes, poison_new_memory

ALL = ExpertsNeeds(
    x=True, gates=True, gate_up_proj=True, down_proj=True, gate_up_bias=True, down_bias=True
)
NONE = ExpertsNeeds(
    x=False, gates=False, gate_up_proj=False, down_proj=False, gate_up_bias=False, down_bias=False
)


def weights_of(inputs: ExpertsInputs) -> ExpertsWeights:
    return ExpertsWeights(
        gate_up_proj=inputs.gate_up_proj,
        down_proj=inputs.down_proj,
        gate_up_bias=inputs.gate_up_bias,
        down_bias=inputs.down_bias,
        layout=inputs.layout,
        activation=inputs.activation,
    )


def permutation_of(inputs: ExpertsInputs) -> Permutation:
    return Permutation.from_expert_ids(inputs.expert_ids, inputs.gate_up_proj.shape[0])


def test_experts_forward_returns_the_preactivation() -> None:
    inputs = make_experts_inputs(
        9, 8, 6, 4, 2, routing="with_sentinels", dtype=torch.float64, has_gate_up_bias=True
    )
    permutation = permutation_of(inputs)
    arguments = (inputs.x, inputs.gates, permutation, weights_of(inputs))
    y, preact = experts_forward(*arguments, needs_preact=True)
    offsets = permutation.expert_offsets
    expected = grouped_gemm(
        permute(inputs.x, permutation), inputs.gate_up_proj, offsets, bias=inputs.gate_up_bias
    )
    num_valid = int(offsets[-1])
    assert preact.shape == (18, 12)
    torch.testing.assert_close(preact[:num_valid], expected[:num_valid], rtol=1e-12, atol=1e-12)
    same_y, nothing = experts_forward(*arguments, needs_preact=False)
    assert nothing is None
    assert torch.equal(same_y, y)


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16], ids=str)
def test_experts_backward_recomputes_the_same_bits(dtype: torch.dtype) -> None:
    inputs = make_experts_inputs(
        9, 8, 6, 4, 2, routing="with_sentinels", dtype=dtype, has_down_bias=True
    )
    arguments = (inputs.x, inputs.gates, permutation_of(inputs), weights_of(inputs))
    _, preact = experts_forward(*arguments, needs_preact=True)
    with poison_new_memory():
        kept = experts_backward(inputs.grad_y, *arguments, preact, needs=ALL)
        anew = experts_backward(inputs.grad_y, *arguments, None, needs=ALL)
    for name in ("x", "gates", "gate_up_proj", "down_proj", "down_bias"):
        assert torch.equal(getattr(kept, name), getattr(anew, name)), name
        assert getattr(kept, name).isfinite().all()
    assert kept.gate_up_bias is None
    nothing = experts_backward(inputs.grad_y, *arguments, preact, needs=NONE)
    assert all(getattr(nothing, name) is None for name in ("x", "gates", "down_proj", "down_bias"))


def test_experts_memory_is_linear_in_tokens_and_independent_of_experts() -> None:
    # beyond parameters and their gradients
    before = torch.get_num_threads()
    torch.set_num_threads(1)

    def peak(num_tokens: int, num_experts: int) -> int:
        inputs = make_experts_inputs(num_tokens, 32, 24, num_experts, 2)
        arguments = (inputs.x, inputs.gates, permutation_of(inputs), weights_of(inputs))
        _, preact = experts_forward(*arguments, needs_preact=True)
        size = peak_bytes(lambda: experts_backward(inputs.grad_y, *arguments, preact, needs=ALL))
        return size - inputs.gate_up_proj.nbytes - inputs.down_proj.nbytes

    try:
        one, two = peak(4096, 8), peak(8192, 8)
        # rows: preact and activation gradients, x gradient; tokens: the result
        per_row = (2 * 24 + 24 + 32) * 4
        assert one < 1.5 * 4096 * 2 * per_row
        assert two < 2.1 * one
        assert peak(4096, 64) < 1.05 * one
    finally:
        torch.set_num_threads(before)
