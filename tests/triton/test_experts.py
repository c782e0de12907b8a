"""Triton's experts equal the oracle: every layout, activation, routing, dtype, stride and need."""

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor
from triton.runtime.interpreter import GridExecutor

from piper_kernels.config import (
    GEGLU,
    GPT_OSS_SWIGLU,
    REGLU,
    RELU2,
    SWIGLU,
    Activation,
    WeightLayout,
)
from piper_kernels.contracts import ExpertsGrads, ExpertsNeeds
from piper_kernels.errors import DeviceError, DtypeError, ShapeError
from piper_kernels.reference.experts import experts as reference_experts
from piper_kernels.testing import (
    ROUTING_KINDS,
    ExpertsInputs,
    RoutingKind,
    assert_close_to_baseline,
    assert_experts_match_oracle,
    guard_with_nan,
    make_experts_inputs,
    run_experts,
)
from piper_kernels.triton.experts import experts_backward, experts_forward
from piper_kernels.triton.tiles import ExpertsTiles, TileConfig

SIZES = (37, 40, 24, 5, 2)  # T, H, I, E, K: nothing is a multiple of a tile
GRADS = ("x", "gates", "gate_up_proj", "down_proj", "gate_up_bias", "down_bias")


def make_tiles(block_m: int, block_n: int, block_k: int, split_rows: int | None) -> ExpertsTiles:
    gemm = TileConfig(block_m=block_m, block_n=block_n, block_k=block_k, group_m=2, num_xcds=3)
    wgrad = replace(gemm, block_m=64, split_rows=split_rows)
    return ExpertsTiles(
        gate_up=gemm, down=gemm, grad_act=gemm, grad_x=gemm, grad_gate_up=wgrad, grad_down=wgrad
    )


TILES = {"default": None, "small": make_tiles(32, 32, 16, 16), "large": make_tiles(64, 64, 32, 40)}
LAYOUTS = {
    "halves": WeightLayout(),
    "halves_transposed": WeightLayout(is_transposed=True),
    "interleaved": WeightLayout(is_interleaved=True),
    "interleaved_transposed": WeightLayout(is_interleaved=True, is_transposed=True),
    "ungated": WeightLayout(is_gated=False),
    "ungated_transposed": WeightLayout(is_gated=False, is_transposed=True),
}


NEEDS_ALL = ExpertsNeeds(**dict.fromkeys(GRADS, True))


def make_inputs(
    sizes: tuple[int, int, int, int, int], *, has_bias: bool = False, **options: Any
) -> ExpertsInputs:
    options = {"routing": "skewed"} | options
    return make_experts_inputs(*sizes, has_gate_up_bias=has_bias, has_down_bias=has_bias, **options)


def map_but_gates(inputs: ExpertsInputs, change: Callable[[Tensor], Tensor]) -> ExpertsInputs:
    return inputs.map(lambda name, tensor: tensor if name == "gates" else change(tensor))


def run(
    inputs: ExpertsInputs,
    *,
    needs: ExpertsNeeds = NEEDS_ALL,
    keeps_preact: bool = True,
    tiles: ExpertsTiles | None = None,
) -> tuple[Tensor, ExpertsGrads]:
    args = inputs.x, inputs.gates, inputs.permutation, inputs.weights
    y, preact = experts_forward(*args, needs_preact=keeps_preact, tiles=tiles)
    assert (preact is not None) == keeps_preact
    return y, experts_backward(inputs.grad_y, *args, preact, needs=needs, tiles=tiles)


def check(
    inputs: ExpertsInputs, *, keeps_preact: bool = True, tiles: ExpertsTiles | None = None
) -> None:
    """Forward and every gradient, inputs inside NaN, outputs NaN-filled before launch."""
    guarded = map_but_gates(inputs, guard_with_nan)
    y, grads = run(guarded, keeps_preact=keeps_preact, tiles=tiles)
    assert_equals_oracle(inputs, y, grads)


def assert_equals_oracle(inputs: ExpertsInputs, y: Tensor, grads: ExpertsGrads) -> None:
    found = {name: grad for name in GRADS if (grad := getattr(grads, name)) is not None}
    # the interpreter truncates fp32 -> bf16 where hardware rounds: twice the error per store
    slack = 8.0 if inputs.x.dtype == torch.bfloat16 else 4.0
    assert_experts_match_oracle({"y": y, **found}, inputs, slack=slack)


@pytest.mark.parametrize("tiles", TILES)
@pytest.mark.parametrize("layout", LAYOUTS)
def test_experts_every_layout(layout: str, tiles: str) -> None:
    inputs = make_inputs(SIZES, layout=LAYOUTS[layout], has_bias=True)
    check(inputs, tiles=TILES[tiles])


@pytest.mark.parametrize("kind", ROUTING_KINDS)
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
def test_experts_every_routing(kind: RoutingKind, dtype: torch.dtype) -> None:
    check(make_inputs((50, 32, 16, 7, 3), routing=kind, dtype=dtype), tiles=TILES["large"])


@pytest.mark.parametrize(
    "activation",
    [SWIGLU, GEGLU, REGLU, RELU2, GPT_OSS_SWIGLU, Activation(function="gelu_tanh")],
    ids=lambda activation: f"{activation.function}-{activation.limit}",
)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_experts_every_activation(activation: Activation, dtype: torch.dtype) -> None:
    if activation.limit is not None:
        # so that many values are clamped; in bf16 few, because the derivative jumps at the bound,
        # and a pre-activation that the interpreter rounds to its other side shows a whole gradient
        activation = replace(activation, limit=0.75 if dtype == torch.float32 else 7.0)
    check(make_inputs((9, 16, 20, 3, 2), activation=activation, dtype=dtype, has_bias=True))


# sizes smaller than, and no multiple of, any tile (A08, A09)
@pytest.mark.parametrize("sizes", [(7, 8, 8, 2, 1), (5, 17, 24, 3, 3), (3, 100, 13, 4, 2)], ids=str)
@pytest.mark.parametrize("layout", ["halves", "interleaved_transposed"])
def test_experts_odd_sizes(sizes: tuple[int, int, int, int, int], layout: str) -> None:
    check(make_inputs(sizes, layout=LAYOUTS[layout], dtype=torch.bfloat16))


@pytest.mark.slow
@pytest.mark.parametrize("hidden", [8, 17, 48, 100, 255, 257, 320])
@pytest.mark.parametrize("intermediate", [8, 24, 96, 130])
def test_experts_sweep_of_odd_sizes(hidden: int, intermediate: int) -> None:
    check(make_inputs((11, hidden, intermediate, 3, 2)))


@pytest.mark.slow
@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16], ids=str)
@pytest.mark.parametrize("kind", ROUTING_KINDS)
def test_experts_product(kind: RoutingKind, dtype: torch.dtype, layout: str) -> None:
    for tiles in TILES.values():
        inputs = make_inputs(
            SIZES, routing=kind, dtype=dtype, layout=LAYOUTS[layout], has_bias=True
        )
        check(inputs, tiles=tiles)


@pytest.mark.slow
@pytest.mark.parametrize("top_k", [2, 8])
def test_experts_every_token_count(top_k: int) -> None:
    for num_tokens in range(1, 131):
        check(make_inputs((num_tokens, 64, 48, 8, top_k)), tiles=TILES["large"])


def test_experts_without_kept_preact_gives_equal_bits() -> None:
    inputs = make_inputs(SIZES, dtype=torch.bfloat16, has_bias=True)
    y, kept = run(inputs)
    y_again, recomputed = run(inputs, keeps_preact=False)
    assert torch.equal(y, y_again)
    for name in GRADS:
        assert torch.equal(getattr(kept, name), getattr(recomputed, name)), name


def test_experts_runs_give_equal_bits() -> None:
    inputs = make_inputs(SIZES, routing="all_to_one", has_bias=True)
    y, grads = run(inputs, tiles=TILES["large"])
    y_again, again = run(inputs, tiles=TILES["large"])
    assert torch.equal(y, y_again)
    for name in GRADS:
        assert torch.equal(getattr(grads, name), getattr(again, name)), name


# A01: forced counts, empty experts first, inside and last
@pytest.mark.parametrize("counts", [[16, 0, 257, 44, 0, 8], [0, 3, 0], [0, 5, 7]], ids=str)
def test_experts_empty_experts_get_exact_zeros(counts: list[int]) -> None:
    ids = torch.repeat_interleave(torch.arange(len(counts)), torch.tensor(counts))
    ids = ids[torch.randperm(len(ids))][:, None]
    inputs = make_inputs((len(ids), 16, 8, len(counts), 1), has_bias=True)
    inputs = replace(inputs, expert_ids=ids)
    y, grads = run(inputs, tiles=TILES["large"])
    assert_equals_oracle(inputs, y, grads)
    is_empty = torch.tensor(counts) == 0
    for name in GRADS[2:]:
        assert (getattr(grads, name)[is_empty] == 0).all(), name


# A02: no tokens
def test_experts_of_no_tokens() -> None:
    inputs = make_inputs((0, 16, 8, 3, 2), has_bias=True)
    y, grads = run(inputs)
    assert y.shape == (0, 16)
    assert grads.x is not None
    assert grads.x.shape == (0, 16)
    assert grads.gates is not None
    assert grads.gates.shape == (0, 2)
    for name in GRADS[2:]:
        grad = getattr(grads, name)
        assert grad.shape == getattr(inputs.weights, name).shape, name
        assert (grad == 0).all(), name


def test_experts_all_sentinels() -> None:
    inputs = make_inputs((6, 16, 8, 3, 2), has_bias=True)
    inputs = replace(inputs, expert_ids=torch.full_like(inputs.expert_ids, 3))
    y, grads = run(inputs)
    assert (y == 0).all()
    for name in GRADS:
        assert (getattr(grads, name) == 0).all(), name


# A12, A13: any strides of x and of the incoming gradient, 0 too
def strided(tensor: Tensor, how: str) -> Tensor:
    num_rows, num_cols = tensor.shape
    if how == "every_other":
        wide = torch.full((num_rows, 2 * num_cols), torch.nan, dtype=tensor.dtype)
        wide[:, ::2] = tensor
        return wide[:, ::2]
    if how == "transposed":
        return tensor.t().contiguous().t()
    return (
        tensor[:1].expand(num_rows, num_cols)
        if how == "expanded"
        else tensor[:1, :1].expand(num_rows, num_cols)
    )


@pytest.mark.parametrize("how", ["every_other", "transposed", "expanded", "one_value"])
def test_experts_any_strides(how: str) -> None:
    inputs = make_inputs(SIZES)
    inputs = replace(inputs, x=strided(inputs.x, how), grad_y=strided(inputs.grad_y, how))
    before = inputs.x.clone()
    y, grads = run(inputs)
    assert_equals_oracle(inputs, y, grads)
    assert torch.equal(inputs.x, before)


# A14: weights are views of packed storage; gates are a slice
def test_experts_any_weight_strides() -> None:
    inputs = make_inputs(SIZES, has_bias=True)
    weights = inputs.weights

    def view(tensor: Tensor) -> Tensor:
        packed = torch.full((tensor.shape[0], tensor.shape[1] + 3, *tensor.shape[2:]), torch.nan)
        packed[:, 1:-2] = tensor
        return packed[:, 1:-2]

    views = {name: view(getattr(weights, name)) for name in GRADS[2:]}
    gates = torch.stack([inputs.gates, inputs.gates], -1)[..., 0]
    inputs = replace(inputs, **views, gates=gates)
    y, grads = run(inputs)
    assert_equals_oracle(inputs, y, grads)


def test_experts_transposed_view_equals_transposed_layout() -> None:
    inputs = make_inputs(SIZES, layout=WeightLayout(is_transposed=True))
    views = replace(
        inputs,
        gate_up_proj=inputs.gate_up_proj.mT,
        down_proj=inputs.down_proj.mT,
        layout=WeightLayout(),
    )
    y, grads = run(inputs)
    y_view, grads_view = run(views)
    assert torch.equal(y, y_view)
    assert torch.equal(grads.gate_up_proj.mT, grads_view.gate_up_proj)
    assert grads_view.gate_up_proj.stride() == views.gate_up_proj.stride()


@pytest.mark.parametrize("needed", GRADS)
def test_experts_single_need(needed: str) -> None:
    inputs = make_inputs((9, 16, 8, 3, 2), has_bias=True)
    needs = ExpertsNeeds(**{name: name == needed for name in GRADS})
    _, everything = run(inputs)
    _, grads = run(inputs, needs=needs)
    for name in GRADS:
        if name == needed:
            assert torch.equal(getattr(grads, name), getattr(everything, name))
        else:
            assert getattr(grads, name) is None, name


def test_experts_no_need_launches_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    inputs = make_inputs((9, 16, 8, 3, 2))
    args = inputs.x, inputs.gates, inputs.permutation, inputs.weights
    launched: list[object] = []
    for module in ("gate_up", "grad_act", "grouped_gemm", "grouped_gemm_wgrad", "grouped_sum"):
        monkeypatch.setattr(
            f"piper_kernels.triton.{module}.launch",
            lambda kernel, *_, **__: launched.append(kernel),
        )
    needs = ExpertsNeeds(**dict.fromkeys(GRADS, False))
    grads = experts_backward(inputs.grad_y, *args, None, needs=needs)
    assert all(getattr(grads, name) is None for name in GRADS)
    assert not launched


# A21: integers survive bf16 exactly, or the interpreter multiplied bits
def test_experts_bf16_integers_are_exact() -> None:
    inputs = make_inputs((16, 16, 16, 2, 1), activation=Activation(function="identity"))
    inputs = map_but_gates(
        inputs, lambda tensor: torch.randint(-1, 2, tensor.shape).to(torch.bfloat16)
    )
    inputs = replace(inputs, gates=torch.ones_like(inputs.gates))
    y, _ = run(inputs)
    assert torch.equal(
        y.double(),
        run_experts(reference_experts, inputs.to(torch.float64))["y"].to(torch.bfloat16).double(),
    )


# A10, A11: row, token and expert offsets past 2^31 elements; the gaps take no memory
def spread(tensor: Tensor) -> Tensor:
    """The same values, 2^30 elements apart: the stride fits 32 bits, two times the stride not."""
    torch.use_deterministic_algorithms(False)  # do not fill the gaps with NaN
    stride = 2**30 + 64
    storage = torch.empty((len(tensor) - 1) * stride + tensor[0].numel(), dtype=tensor.dtype)
    torch.use_deterministic_algorithms(True)
    view = storage.as_strided(tensor.shape, (stride, *tensor[0].stride()))
    return view.copy_(tensor)


def test_experts_offsets_past_int32(monkeypatch: pytest.MonkeyPatch) -> None:
    # the interpreter copies storages back onto themselves, which would touch every page
    monkeypatch.setattr(GridExecutor, "_restore_args_dev", lambda *_: None)
    inputs = make_inputs((3, 16, 8, 3, 2), dtype=torch.float16, has_bias=True)
    y, grads = run(inputs)
    y_far, grads_far = run(map_but_gates(inputs, spread))
    assert torch.equal(y, y_far)
    for name in GRADS:
        assert torch.equal(getattr(grads, name), getattr(grads_far, name)), name


# decode: few tokens read only the experts that they hit
def test_experts_few_tokens_read_only_hit_experts() -> None:
    inputs = make_inputs((2, 48, 40, 16, 2), has_bias=True)
    is_hit = torch.zeros(16, dtype=torch.bool)
    is_hit[inputs.expert_ids.flatten()] = True

    def poison(tensor: Tensor) -> Tensor:
        if len(tensor) != 16:
            return tensor
        rest = is_hit.view(-1, *[1] * (tensor.dim() - 1))
        return torch.where(rest, tensor, torch.nan)

    poisoned = map_but_gates(inputs, poison)
    y, preact = experts_forward(
        poisoned.x, poisoned.gates, poisoned.permutation, poisoned.weights, needs_preact=False
    )
    assert preact is None
    truth = run_experts(reference_experts, inputs.to(torch.float64))["y"]
    assert_close_to_baseline("y", y, run_experts(reference_experts, inputs)["y"], truth)


def test_experts_duplicate_ids_in_a_token() -> None:
    inputs = make_inputs((6, 16, 8, 3, 2))
    check(replace(inputs, expert_ids=torch.ones_like(inputs.expert_ids)))


# 2I == H and I == H: only the flags tell the layouts apart
@pytest.mark.parametrize("intermediate", [8, 16])
@pytest.mark.parametrize("layout", ["halves_transposed", "interleaved"])
def test_experts_sizes_where_layouts_look_alike(layout: str, intermediate: int) -> None:
    check(make_inputs((5, 16, intermediate, 2, 1), layout=LAYOUTS[layout]))


def test_experts_refuse_what_does_not_fit() -> None:
    inputs = make_inputs((9, 16, 8, 3, 2))
    args = inputs.gates, inputs.permutation, inputs.weights
    with pytest.raises(ShapeError, match=r"x must have shape \(T, H\) = \(9, 16\), got \(8, 16\)"):
        experts_forward(inputs.x[:8], *args, needs_preact=False)
    with pytest.raises(DtypeError, match="gate_up_proj must be one of bfloat16, got"):
        experts_forward(inputs.x.bfloat16(), *args, needs_preact=False)
    with pytest.raises(
        DtypeError, match="x must be one of bfloat16, float16, float32, got float64"
    ):
        experts_forward(inputs.x.double(), *args, needs_preact=False)
    rest = inputs.permutation, inputs.weights
    with pytest.raises(DtypeError, match="gates must be one of float32, got bfloat16"):
        experts_forward(inputs.x, inputs.gates.bfloat16(), *rest, needs_preact=False)
    with pytest.raises(DeviceError, match=r"gates must be on the device of x \(cpu\), got meta"):
        experts_forward(inputs.x, inputs.gates.to("meta"), *rest, needs_preact=False)
    with pytest.raises(ShapeError, match="grad_y must have shape"):
        experts_backward(inputs.grad_y[:, :8], inputs.x, *args, None, needs=NEEDS_ALL)


# nobody looks at the ids of a GPU: a negative one is a sentinel there
def test_experts_negative_ids_are_sentinels() -> None:
    inputs = make_inputs((9, 16, 8, 3, 2), has_bias=True)
    is_bad = torch.zeros_like(inputs.expert_ids, dtype=torch.bool)
    is_bad[::3, 1] = True
    is_bad[4] = True
    negative = replace(inputs, expert_ids=inputs.expert_ids.masked_fill(is_bad, -2))
    marked = replace(inputs, expert_ids=inputs.expert_ids.masked_fill(is_bad, 3))
    y, grads = run(negative)
    assert (y[4] == 0).all()
    assert grads.gates is not None
    assert (grads.gates[is_bad] == 0).all()
    # the oracle of the marked ids, and the oracle itself takes negative ones alike
    assert_equals_oracle(marked, y, grads)
    for name, value in run_experts(reference_experts, marked).items():
        assert torch.equal(run_experts(reference_experts, negative)[name], value), name
