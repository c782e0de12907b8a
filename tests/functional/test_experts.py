"""experts on the CPU against the oracle: values and every gradient."""

import itertools

import hypothesis
import torch
from hypothesis import strategies as st
from torch import Tensor

from piper_kernels.config import (
    GEGLU,
    GPT_OSS_SWIGLU,
    REGLU,
    RELU2,
    SWIGLU,
    Activation,
    WeightLayout,
)
from piper_kernels.functional.experts import experts
from piper_kernels.testing import ROUTING_KINDS, guard_with_nan
from piper_kernels.testing.experts import (
    ExpertsInputs,
    assert_experts_match_oracle,
    make_experts_inputs,
    run_experts,
)
from piper_kernels.testing.memory import poison_new_memory

LAYOUTS = [
    WeightLayout(is_transposed=is_transposed, is_interleaved=is_interleaved, is_gated=is_gated)
    for is_transposed, is_interleaved, is_gated in itertools.product((False, True), repeat=3)
    if is_gated or not is_interleaved
]
SMOOTH = [
    SWIGLU,
    GEGLU,
    RELU2,
    GPT_OSS_SWIGLU,
    Activation(function="gelu_tanh"),
    Activation(function="identity"),
]
# Their derivatives jump, so a pre-activation that rounds to the other side of the jump moves the
# gradient by more than rounding: not for narrow dtypes (tests/cpu/test_activation.py has those).
KINKED = [
    REGLU,
    # so tight that most elements are clamped
    Activation(function="silu", alpha=0.7, limit=0.5),
    Activation(function="gelu", limit=0.3, up_offset=0.5),
]
DTYPES = [torch.float64, torch.float32, torch.bfloat16, torch.float16]


# Units in the last place of a row's scale, on top of the baseline's own error. Where H, I or an
# expert's rows are few, sums cancel by chance and the scale says little: narrow dtypes hold tight,
# wide ones still find any fault that is not rounding.
SLACK = {torch.float64: 1000.0, torch.float32: 30.0, torch.bfloat16: 6.0, torch.float16: 6.0}


def strided(tensor: Tensor, kind: str) -> Tensor:
    """The same values with other strides, inside memory that is NaN elsewhere."""
    match kind:
        case "contiguous":
            return guard_with_nan(tensor)
        case "transposed":
            return guard_with_nan(tensor.transpose(-1, -2)).transpose(-1, -2)
        case "every_other":
            wide = tensor.new_full((*tensor.shape[:-1], 2 * tensor.shape[-1]), torch.nan)
            view = wide[..., ::2]
            return view.copy_(tensor)
        case "part_of_rows":
            wide = tensor.new_full((*tensor.shape[:-1], tensor.shape[-1] + 3), torch.nan)
            view = wide[..., 1 : tensor.shape[-1] + 1]
            return view.copy_(tensor)
        case "expanded":
            # every row is row 0, at stride 0
            return tensor[:1].expand(tensor.shape) if tensor.shape[0] else tensor
    raise AssertionError(kind)


DENSE = ("contiguous", "transposed", "every_other", "part_of_rows")
STRIDES = (*DENSE, "expanded")


@st.composite
def experts_inputs(draw: st.DrawFn) -> ExpertsInputs:
    layout = draw(st.sampled_from(LAYOUTS))
    dtype = draw(st.sampled_from(DTYPES))
    activations = SMOOTH + KINKED if dtype.itemsize >= 4 else SMOOTH
    fits = [a for a in activations if layout.is_gated or (a.limit is None and not a.up_offset)]
    num_experts = draw(st.integers(1, 13))
    inputs = make_experts_inputs(
        num_tokens=draw(st.integers(0, 40)),
        hidden_size=draw(st.sampled_from((1, 2, 5, 8, 16, 17, 33))),
        intermediate_size=draw(st.sampled_from((1, 3, 8, 11, 16, 24))),
        num_experts=num_experts,
        top_k=draw(st.one_of(st.integers(1, min(num_experts, 8)), st.just(num_experts))),
        routing=draw(st.sampled_from(ROUTING_KINDS)),
        dtype=dtype,
        layout=layout,
        activation=draw(st.sampled_from(fits)),
        has_gate_up_bias=draw(st.booleans()),
        has_down_bias=draw(st.booleans()),
        seed=draw(st.integers(0, 2**16)),
    )
    kinds = {
        "x": draw(st.sampled_from(STRIDES)),
        "grad_y": draw(st.sampled_from(STRIDES)),
        "gate_up_proj": draw(st.sampled_from(DENSE)),
        "down_proj": draw(st.sampled_from(DENSE)),
    }
    return inputs.map(lambda name, tensor: strided(tensor, kinds.get(name, "contiguous")))


@hypothesis.given(inputs=experts_inputs(), save=st.sampled_from(("preact", "x")))
def test_experts_matches_oracle(inputs: ExpertsInputs, save: str) -> None:
    before = inputs.map(lambda _, tensor: tensor.clone())
    with poison_new_memory():
        actual = run_experts(experts, inputs, save=save, backend="cpu")
    assert_experts_match_oracle(actual, inputs, slack=SLACK[inputs.x.dtype])
    for name in ("x", "gates", "gate_up_proj", "down_proj", "grad_y"):
        assert torch.equal(getattr(inputs, name), getattr(before, name)), f"{name} was changed"
