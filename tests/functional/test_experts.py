"""experts on the CPU against the oracle: values and every gradient."""

import dataclasses
import itertools
from collections.abc import Callable
from typing import Any

import hypothesis
import pytest
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
from piper_kernels.cpu import matrices
from piper_kernels.errors import ConfigError
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
WEIGHTS = ("gate_up_proj", "down_proj")
DTYPES = [torch.float64, torch.float32, torch.bfloat16, torch.float16]


# Units in the last place of a row's scale, on top of the baseline's own error. In wide dtypes any
# fault that is not rounding is far above.
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
    # the sums of a row of one or two elements cancel by chance, and its scale says nothing of their
    # rounding: narrow dtypes have no margin for that
    narrowest = 1 if dtype.itemsize >= 4 else 8
    sizes = [size for size in (1, 2, 3, 5, 8, 11, 16, 17, 24, 33) if size >= narrowest]
    inputs = make_experts_inputs(
        num_tokens=draw(st.integers(0, 40)),
        hidden_size=draw(st.sampled_from(sizes)),
        intermediate_size=draw(st.sampled_from(sizes)),
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


@pytest.mark.parametrize("save", ["preact", "x"])
@pytest.mark.parametrize("layout", LAYOUTS, ids=str)
def test_experts_gradcheck(layout: WeightLayout, save: str) -> None:
    # numerical derivatives, which share nothing with the oracle; field report A15: I != H != 2I
    activation = GPT_OSS_SWIGLU if layout.is_gated else Activation(function="gelu")
    inputs = make_experts_inputs(
        5,
        6,
        7,
        3,
        2,
        dtype=torch.float64,
        layout=layout,
        activation=activation,
        has_gate_up_bias=True,
        has_down_bias=True,
    )

    def call(x: Tensor, gates: Tensor, w1: Tensor, w2: Tensor, b1: Tensor, b2: Tensor) -> Tensor:
        return experts(
            x,
            inputs.expert_ids,
            gates,
            w1,
            w2,
            layout=layout,
            activation=activation,
            gate_up_bias=b1,
            down_bias=b2,
            save=save,
        )

    names = ("x", "gates", "gate_up_proj", "down_proj", "gate_up_bias", "down_bias")
    leaves = [getattr(inputs, name).requires_grad_() for name in names]
    assert torch.autograd.gradcheck(call, leaves, fast_mode=True)


def with_counts(counts: list[int]) -> Tensor:
    """``expert_ids [T, 1]`` in random order in which expert e occurs ``counts[e]`` times."""
    ids = torch.arange(len(counts)).repeat_interleave(torch.tensor(counts))
    return ids[torch.randperm(len(ids))][:, None]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize(
    "counts", [[162, 0, 2577, 446, 0, 83], [0, 300, 0, 21], [7, 90, 0]], ids=str
)
def test_experts_empty_experts_get_exact_zeros(counts: list[int], dtype: torch.dtype) -> None:
    # field report A01; also empty first and last; 2577 rows are several pieces of work
    inputs = make_experts_inputs(
        sum(counts), 32, 24, len(counts), 1, dtype=dtype, has_gate_up_bias=True, has_down_bias=True
    )
    inputs = dataclasses.replace(inputs, expert_ids=with_counts(counts))
    with poison_new_memory():
        actual = run_experts(experts, inputs)
    assert_experts_match_oracle(actual, inputs, slack=SLACK[dtype])
    for expert, count in enumerate(counts):
        for name in ("gate_up_proj", "down_proj", "gate_up_bias", "down_bias"):
            assert bool((actual[name][expert] == 0).all()) == (count == 0), (name, expert)


@pytest.mark.parametrize("num_experts", [1, 2, 3, 60, 64, 160, 257, 512])
def test_experts_any_number_of_experts(num_experts: int) -> None:
    # field reports A02, A03: T = 0 and E that are no powers of two
    for num_tokens in (0, 1, 2):
        inputs = make_experts_inputs(num_tokens, 4, 3, num_experts, min(8, num_experts))
        actual = run_experts(experts, inputs)
        assert actual["y"].shape == inputs.x.shape
        assert_experts_match_oracle(actual, inputs, slack=SLACK[torch.float32])
        if num_tokens == 0:
            assert not any(grad.any() for grad in actual.values())


@pytest.mark.parametrize("top_k", [2, 8])
def test_experts_any_number_of_tokens(top_k: int) -> None:
    # field report A04: many odd T; K = E and K < E
    for num_tokens in range(1, 131, 3):
        inputs = make_experts_inputs(num_tokens, 16, 12, 8, top_k, dtype=torch.float64)
        assert_experts_match_oracle(run_experts(experts, inputs), inputs, slack=1000.0)


@pytest.mark.parametrize("expert_ids", [[15], [14, 15]], ids=str)
def test_experts_all_tokens_to_the_last(expert_ids: list[int]) -> None:
    # field report A05
    inputs = make_experts_inputs(1024, 16, 12, 16, len(expert_ids))
    ids = torch.tensor(expert_ids).expand(1024, -1)
    inputs = dataclasses.replace(inputs, expert_ids=ids)
    actual = run_experts(experts, inputs)
    assert_experts_match_oracle(actual, inputs, slack=SLACK[torch.float32])
    assert not actual["down_proj"][:14].any()


@pytest.mark.parametrize(
    ("hidden_size", "intermediate_size"),
    [(8, 8), (17, 24), (48, 96), (100, 130), (255, 8), (257, 24), (320, 96), (3584, 8), (8, 2816)],
)
def test_experts_any_width(hidden_size: int, intermediate_size: int) -> None:
    # field report A08: no column is left out
    inputs = make_experts_inputs(9, hidden_size, intermediate_size, 3, 2)
    with poison_new_memory():
        actual = run_experts(experts, inputs.map(lambda _, tensor: guard_with_nan(tensor)))
    assert_experts_match_oracle(actual, inputs, slack=SLACK[torch.float32])


@pytest.mark.parametrize("hidden_size", [8, 48])
@pytest.mark.parametrize("intermediate_size", [8, 72])
def test_experts_is_reproducible(hidden_size: int, intermediate_size: int) -> None:
    # field reports A09, A19: the same bits in every run
    inputs = make_experts_inputs(
        200, hidden_size, intermediate_size, 5, 4, routing="skewed", dtype=torch.bfloat16
    )
    inputs = inputs.map(lambda _, tensor: guard_with_nan(tensor))
    first = run_experts(experts, inputs)
    for _ in range(20):
        again = run_experts(experts, inputs)
        for name, value in first.items():
            assert torch.equal(value, again[name]), name


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_experts_does_not_depend_on_the_number_of_threads(dtype: torch.dtype) -> None:
    # 5 rows, and 97 x 131, are where MKL's own threads change the last bits; 700 rows are several
    # pieces of work
    before = torch.get_num_threads()
    inputs = make_experts_inputs(1500, 97, 131, 4, 1, dtype=dtype)
    inputs = dataclasses.replace(inputs, expert_ids=with_counts([5, 700, 1, 794]))
    results = []
    try:
        for num_threads in (1, 2, 4):
            torch.set_num_threads(num_threads)
            results.append(run_experts(experts, inputs))
            assert torch.get_num_threads() == num_threads
    finally:
        torch.set_num_threads(before)
    for name, value in results[0].items():
        assert torch.equal(value, results[1][name]), name
        assert torch.equal(value, results[2][name]), name


def test_experts_offsets_beyond_2_to_31() -> None:
    # field report A10: two rows 2^31 elements apart; only two pages of the 4 GiB are touched
    hidden_size = 8
    x = torch.empty(2**31 + hidden_size, dtype=torch.bfloat16)
    x = x.as_strided((2, hidden_size), (2**31, 1)).copy_(torch.randn(2, hidden_size))
    inputs = make_experts_inputs(2, hidden_size, 6, 3, 2, dtype=torch.bfloat16)
    inputs = dataclasses.replace(inputs, x=x, grad_y=x)
    actual = run_experts(experts, inputs)
    assert_experts_match_oracle(actual, inputs, slack=SLACK[torch.bfloat16])


def test_experts_weight_offsets_beyond_2_to_31() -> None:
    # field report A11, cheaply: expert 1 lies 2^31 elements behind expert 0
    inputs = make_experts_inputs(4, 8, 6, 2, 2, dtype=torch.bfloat16)
    down = torch.empty(2**31 + 48, dtype=torch.bfloat16)
    down = down.as_strided((2, 8, 6), (2**31, 6, 1)).copy_(inputs.down_proj)
    arguments = (inputs.x, inputs.expert_ids, inputs.gates, inputs.gate_up_proj)
    assert torch.equal(experts(*arguments, down), experts(*arguments, inputs.down_proj))


@pytest.mark.parametrize("top_k", [1, 2, 3, 4, 5, 8])
def test_experts_x_of_any_strides(top_k: int) -> None:
    # field report A12
    num_tokens, hidden_size = 12, 10
    views = {
        "columns": torch.randn(num_tokens, 2 * hidden_size)[:, ::2],
        "transposed": torch.randn(hidden_size, num_tokens).t(),
        "sequence_first": torch.randn(4, 3, hidden_size).transpose(0, 1).flatten(0, 1),
        "expanded": torch.randn(1, hidden_size).expand(num_tokens, hidden_size),
    }
    inputs = make_experts_inputs(num_tokens, hidden_size, 6, 8, top_k)
    for name, view in views.items():
        before = view.clone()
        actual = run_experts(experts, dataclasses.replace(inputs, x=view))
        expected = run_experts(experts, dataclasses.replace(inputs, x=view.contiguous()))
        for key, value in expected.items():
            assert torch.equal(actual[key], value), (name, key)
        assert torch.equal(view, before), name


@pytest.mark.parametrize(
    ("finish", "make_grad"),
    [
        (lambda y: y.sum(), lambda y: torch.ones_like(y)),
        (lambda y: y.mean(), lambda y: torch.full_like(y, 1 / y.numel())),
        (lambda y: y[:, 0].sum(), lambda y: (torch.arange(y.shape[1]) == 0).float().expand_as(y)),
        (lambda y: y.t().contiguous().sum(), lambda y: torch.ones_like(y)),
    ],
    ids=["sum", "mean", "one_column", "transposed"],
)
def test_experts_grad_y_of_any_strides(
    finish: Callable[[Tensor], Tensor], make_grad: Callable[[Tensor], Tensor]
) -> None:
    # field report A13: these send back gradients with stride 0
    inputs = make_experts_inputs(7, 10, 6, 4, 2)
    leaves = [inputs.x, inputs.gates, inputs.gate_up_proj, inputs.down_proj]
    leaves = [leaf.requires_grad_() for leaf in leaves]
    y = experts(leaves[0], inputs.expert_ids, *leaves[1:])
    actual = torch.autograd.grad(finish(y), leaves, retain_graph=True)
    expected = torch.autograd.grad(y, leaves, make_grad(y.detach()).contiguous())
    for a, b in zip(actual, expected, strict=True):
        assert torch.equal(a, b)


def test_experts_odd_width_in_bf16() -> None:
    # field report A14a: rows that are not 16-byte aligned
    inputs = make_experts_inputs(11, 1025, 9, 3, 2, dtype=torch.bfloat16)
    actual = run_experts(experts, inputs)
    assert_experts_match_oracle(actual, inputs, slack=SLACK[torch.bfloat16])


def test_experts_weights_inside_a_bigger_tensor() -> None:
    # field report A14b: the expert stride is not 2I*H, and the gradient lands in the right part
    inputs = make_experts_inputs(9, 8, 6, 3, 2)
    packed = torch.full((3, 12 + 8, 8), torch.nan)
    packed[:, 4:16] = inputs.gate_up_proj
    packed.requires_grad_()
    arguments = (inputs.x, inputs.expert_ids, inputs.gates)
    y = experts(*arguments, packed[:, 4:16], inputs.down_proj)
    (grad,) = torch.autograd.grad(y, packed, inputs.grad_y)
    expected = run_experts(experts, inputs)
    assert torch.equal(y, expected["y"])
    assert torch.equal(grad[:, 4:16], expected["gate_up_proj"])
    assert not grad[:, :4].any()
    assert not grad[:, 16:].any()


def test_experts_transposed_weights_without_a_flag() -> None:
    # field report A14c: stored [E, H, 2I], passed as a transposed view in the default layout
    inputs = make_experts_inputs(9, 8, 6, 3, 2)
    stored = {name: getattr(inputs, name).transpose(1, 2).contiguous() for name in WEIGHTS}
    views = {name: tensor.transpose(1, 2) for name, tensor in stored.items()}
    actual = run_experts(experts, dataclasses.replace(inputs, **views))
    expected = run_experts(experts, inputs)
    for name, value in expected.items():
        torch.testing.assert_close(actual[name], value, rtol=1e-5, atol=1e-5)
    for name in WEIGHTS:
        assert actual[name].stride() == views[name].stride(), "the gradient is laid out alike"


def test_experts_duplicate_ids_count_twice() -> None:
    # never from a top-k, but nothing forbids it here
    inputs = make_experts_inputs(4, 8, 6, 3, 2, dtype=torch.float64)
    inputs = dataclasses.replace(inputs, expert_ids=torch.tensor([[1, 1], [0, 2], [2, 2], [1, 0]]))
    assert_experts_match_oracle(run_experts(experts, inputs), inputs, slack=1000.0)


def test_experts_int32_ids() -> None:
    inputs = make_experts_inputs(6, 8, 6, 3, 2)
    expected = run_experts(experts, inputs)["y"]
    inputs = dataclasses.replace(inputs, expert_ids=inputs.expert_ids.int())
    assert torch.equal(run_experts(experts, inputs)["y"], expected)


def test_experts_sentinels_cost_and_give_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    # every slot of token 0, one of token 1; their gates are NaN and must not be read
    inputs = make_experts_inputs(3, 8, 6, 4, 2)
    ids = torch.tensor([[4, 9], [0, 4], [2, 1]])
    gates = torch.tensor([[torch.nan, torch.nan], [0.5, torch.nan], [0.25, 0.75]])
    inputs = dataclasses.replace(inputs, expert_ids=ids, gates=gates)
    rows = []
    real = matrices.matmul_into

    def count(out: Tensor, left: Tensor, right: Tensor) -> None:
        rows.append(out.shape[0])
        real(out, left, right)

    monkeypatch.setattr(matrices, "matmul_into", count)
    actual = run_experts(experts, inputs)
    assert sum(rows) == 2 * 3, "two GEMMs over three valid rows"
    assert not actual["y"][0].any()
    assert not actual["x"][0].any()
    assert not actual["gates"][0].any()
    assert actual["gates"][1, 1] == 0
    assert not actual["down_proj"][3].any()
    assert all(value.isfinite().all() for value in actual.values())


def test_experts_numeric_example() -> None:
    # by hand: relu(2 * 5) * 5 * 0.5 + relu(2 * 3) * 3 * 0.5 = 25 + 9
    weight = torch.tensor([[[3.0]], [[5.0]]])
    y = experts(
        torch.tensor([[2.0]]),
        torch.tensor([[1, 0]]),
        torch.tensor([[0.5, 0.5]]),
        weight,
        weight,
        layout=WeightLayout(is_gated=False),
        activation=REGLU,
    )
    assert y.tolist() == [[34.0]]


def test_experts_functional_call_and_views() -> None:
    # parameters swapped in by functional_call, y from a module
    class Experts(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.gate_up_proj = torch.nn.Parameter(torch.randn(3, 12, 8))
            self.down_proj = torch.nn.Parameter(torch.randn(3, 8, 6))

        def forward(self, x: Tensor, ids: Tensor, gates: Tensor) -> Tensor:
            return experts(x, ids, gates, self.gate_up_proj, self.down_proj)

    inputs = make_experts_inputs(5, 8, 6, 3, 2)
    parameters = {"gate_up_proj": inputs.gate_up_proj, "down_proj": inputs.down_proj}
    arguments = (inputs.x, inputs.expert_ids, inputs.gates)
    y = torch.func.functional_call(Experts(), parameters, arguments)
    assert torch.equal(y, run_experts(experts, inputs)["y"])


@pytest.mark.parametrize(
    ("options", "match"),
    [
        ({"activation": "silu"}, "activation must be of type Activation, got 'silu'"),
        ({"layout": "halves"}, "layout must be of type WeightLayout, got 'halves'"),
    ],
)
def test_experts_refuses_names_for_objects(options: dict[str, Any], match: str) -> None:
    x, ids, gates = torch.randn(2, 4), torch.zeros(2, 1, dtype=torch.int64), torch.ones(2, 1)
    with pytest.raises(ConfigError, match=f"^experts: {match}"):
        experts(x, ids, gates, torch.randn(3, 6, 4), torch.randn(3, 4, 3), **options)
