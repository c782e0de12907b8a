from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn

from piper_kernels.errors import DtypeError, ShapeError
from piper_kernels.huggingface import explain_experts_function
from piper_kernels.testing import ROUTING_KINDS, assert_close_to_baseline, make_routing
from piper_kernels.testing.tiny_models import experts_classes, tiny_experts

# Their eager code takes one expert a row and no gates; test_every_family.py runs them in a model.
NOT_ALONE = {"ErgoExpertProjections"}
CLASSES = [
    (family, name)
    for family, names in experts_classes().items()
    for name in names
    if name not in NOT_ALONE
]
# One class for each way through the function: the six layouts, and a gate of its own.
KINDS = ["mixtral", "gpt_oss", "openai_privacy_filter", "aria", "nemotron_h", "muse_spark", "beam"]
# Their own code computes a part in fp32 even where everything else is fp64.
FP32_INSIDE = {"beam", "inkling2", "inkling2_loop", "muse_spark", "openai_privacy_filter"}


def module_of(family: str, dtype: torch.dtype = torch.float64) -> Any:
    return tiny_experts(family, experts_classes()[family][0], dtype=dtype)


def hidden_size_of(module: Any) -> int:
    return int(module.down_proj.shape[2 if module.is_transposed else 1])


def tolerance_of(family: str) -> float:
    return 2e-6 if family in FP32_INSIDE else 1e-11


def run(
    module: Any, experts: str, x: Tensor, expert_ids: Tensor, gates: Tensor, grad: Tensor
) -> dict[str, Tensor]:
    """Output and the gradient of everything that wants one."""
    module.config._experts_implementation = experts
    x, gates = x.detach().requires_grad_(), gates.detach().requires_grad_()
    y = module(x, expert_ids, gates)
    parameters = {n: p for n, p in module.named_parameters() if p.requires_grad}
    wanted = {"x": x, "gates": gates, **parameters}
    found = torch.autograd.grad(y, list(wanted.values()), grad)
    return {"y": y.detach(), **dict(zip(wanted, found, strict=True))}


def assert_same(ours: dict[str, Tensor], theirs: dict[str, Tensor], tolerance: float) -> None:
    assert ours.keys() == theirs.keys()
    for name, want in theirs.items():
        assert ours[name].dtype == want.dtype, name
        # at least the size of the terms, which are of order 1: a gate's gradient with T = K = 1 is
        # one dot product, and may be all cancellation
        unit = max(1.0, float(want.abs().max())) if want.numel() else 0.0
        torch.testing.assert_close(ours[name], want, rtol=0, atol=tolerance * unit, msg=name)


def inputs(
    module: Any,
    num_tokens: int = 9,
    top_k: int = 3,
    kind: Any = "skewed",
    dtype: torch.dtype = torch.float64,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    H = hidden_size_of(module)
    x = torch.randn(num_tokens, H, dtype=dtype)
    expert_ids, gates = make_routing(kind, num_tokens, module.num_experts, top_k, dtype=dtype)
    return x, expert_ids, gates, torch.randn(num_tokens, H, dtype=dtype)


@pytest.mark.parametrize(("family", "name"), CLASSES, ids=lambda part: part)
def test_experts_function_equals_eager_for_every_class(family: str, name: str) -> None:
    module = tiny_experts(family, name)
    arguments = inputs(module)
    ours = run(module, "piper", *arguments)
    assert_same(ours, run(module, "eager", *arguments), tolerance_of(family))


@given(
    family=st.sampled_from(KINDS),
    kind=st.sampled_from([kind for kind in ROUTING_KINDS if kind != "with_sentinels"]),
    num_tokens=st.integers(0, 40),
    top_k=st.integers(1, 8),
    seed=st.integers(0, 2**16),
)
def test_experts_function_equals_eager_for_any_routing(
    family: str, kind: str, num_tokens: int, top_k: int, seed: int
) -> None:
    torch.manual_seed(seed)
    module = module_of(family)
    arguments = inputs(module, num_tokens, top_k, kind)
    ours = run(module, "piper", *arguments)
    if num_tokens:
        assert_same(ours, run(module, "eager", *arguments), tolerance_of(family))
    else:
        assert ours["y"].shape == (0, hidden_size_of(module))
        assert not any(tensor.any() for tensor in ours.values())


@pytest.mark.parametrize("family", KINDS)
@pytest.mark.parametrize("num_tokens", [1, 9])
def test_experts_function_skips_sentinels(family: str, num_tokens: int) -> None:
    # a rank that holds experts 0 to 3 of 8, as transformers' expert parallelism calls it
    module = module_of(family)
    x, expert_ids, gates, grad = inputs(module, num_tokens)
    # id E, and beyond: what AllReduceEP marks as another rank's
    expert_ids[0, :2] = torch.tensor([8, 11])
    gates = gates.masked_fill(expert_ids >= 8, 0.0)
    module._is_expert_parallel = True
    ours = run(module, "piper", x, expert_ids, gates, grad)
    is_off_rank = expert_ids >= 8
    assert not ours["gates"][is_off_rank].any()
    # the same slots with any valid expert and gate 0 are worth nothing either
    valid = expert_ids.masked_fill(is_off_rank, 5)
    theirs = run(module, "eager", x, valid, gates, grad)
    theirs["gates"] = theirs["gates"].masked_fill(is_off_rank, 0.0)
    # but for expert 5, nothing that came by a sentinel slot may be left
    assert_same(ours, theirs, tolerance_of(family))


@pytest.mark.parametrize("family", KINDS)
def test_experts_function_of_sentinels_alone_is_zero(family: str) -> None:
    # gate 1 on purpose: the id decides
    module = module_of(family)
    x, expert_ids, gates, grad = inputs(module)
    ours = run(module, "piper", x, torch.full_like(expert_ids, 8), torch.ones_like(gates), grad)
    for name, tensor in ours.items():
        assert not tensor.any(), name


@pytest.mark.parametrize("family", ["mixtral", "muse_spark"])
def test_experts_function_takes_one_dummy_token(family: str) -> None:
    # AllToAllEP keeps an idle rank in the graph with one row, K = 1, of a sum of no rows
    module = module_of(family)
    H = hidden_size_of(module)
    x = torch.empty(0, H, dtype=torch.float64, requires_grad=True)
    ids, gates = torch.zeros(1, 1, dtype=torch.long), torch.ones(1, 1, dtype=torch.float64)
    y = module(x.sum(dim=0, keepdim=True), ids, gates)[:0]
    y.sum().backward()
    assert y.shape == (0, H)
    assert x.grad is not None
    assert x.grad.shape == (0, H)
    for parameter in module.parameters():
        assert parameter.grad is not None
        assert not parameter.grad.any()


def strided_copies(x: Tensor) -> dict[str, Tensor]:
    """Views with the values of x and other strides."""
    wide = x.new_full((x.shape[0], 2 * x.shape[1]), torch.nan)
    wide[:, ::2] = x
    return {"every other column": wide[:, ::2], "transposed": x.T.contiguous().T}


@pytest.mark.parametrize("family", KINDS)
def test_experts_function_takes_any_strides(family: str) -> None:
    module = module_of(family)
    x, expert_ids, gates, grad = inputs(module)
    expected = run(module, "piper", x, expert_ids, gates, grad)
    for view in strided_copies(x).values():
        other = view.T.contiguous().T if view.is_contiguous() else view
        ids = expert_ids.T.contiguous().T
        ours = run(module, "piper", other, ids, gates.T.contiguous().T, grad.T.contiguous().T)
        assert_same(ours, expected, 0.0)


def test_experts_function_takes_a_stride_0_gradient() -> None:
    module = module_of("mixtral")
    x, expert_ids, gates, grad = inputs(module)
    expanded = torch.ones((), dtype=torch.float64).expand_as(grad)
    ours = run(module, "piper", x, expert_ids, gates, expanded)
    assert_same(ours, run(module, "piper", x, expert_ids, gates, torch.ones_like(grad)), 0.0)


# -- field report A14: odd strides and views of packed weights ------------------------------------


def test_experts_function_with_weights_whose_rows_are_not_16_byte_aligned() -> None:
    # H = 1025 in bf16
    module = module_of("mixtral", torch.bfloat16)
    torch.manual_seed(0)
    module.gate_up_proj = nn.Parameter(torch.randn(8, 12, 1025).to(torch.bfloat16) / 32)
    module.down_proj = nn.Parameter(torch.randn(8, 1025, 6).to(torch.bfloat16))
    x, expert_ids, gates, grad = inputs(module, dtype=torch.bfloat16)
    ours = run(module, "piper", x, expert_ids, gates, grad)
    baseline = run(module, "eager", x, expert_ids, gates, grad)
    truth = run(module.double(), "eager", x.double(), expert_ids, gates.double(), grad.double())
    for name, want in truth.items():
        assert_close_to_baseline(name, ours[name], baseline[name], want)


def test_experts_function_with_views_of_one_packed_weight() -> None:
    # both projections of all experts in one buffer: odd expert strides, down_proj transposed
    module = module_of("mixtral")
    x, expert_ids, gates, grad = inputs(module)
    expected = run(module, "eager", x, expert_ids, gates, grad)
    two_i, H = module.gate_up_proj.shape[1:]
    width = two_i * 3 // 2
    packed = torch.empty(8, width, H, dtype=torch.float64)
    packed[:, :two_i] = module.gate_up_proj.data
    packed[:, two_i:] = module.down_proj.data.transpose(1, 2)
    packed.requires_grad_()
    del module.gate_up_proj, module.down_proj
    module.gate_up_proj = packed[:, :two_i]
    module.down_proj = packed[:, two_i:].transpose(1, 2)
    module.config._experts_implementation = "piper"
    y = module(x, expert_ids, gates)
    (found,) = torch.autograd.grad(y, [packed], grad)
    ours = {
        "y": y.detach(),
        "gate_up_proj": found[:, :two_i],
        "down_proj": found[:, two_i:].transpose(1, 2),
    }
    assert_same(ours, {name: expected[name] for name in ours}, 1e-11)


def test_experts_function_with_weights_stored_transposed() -> None:
    module = module_of("mixtral")
    arguments = inputs(module)
    expected = run(module, "eager", *arguments)
    for name in ("gate_up_proj", "down_proj"):
        stored = getattr(module, name).data.transpose(1, 2).contiguous()
        setattr(module, name, nn.Parameter(stored.transpose(1, 2)))
    assert_same(run(module, "piper", *arguments), expected, 1e-11)


# -- field report A15: the gradient of a fused gate and up ----------------------------------------


@pytest.mark.parametrize("family", ["mixtral", "gpt_oss", "aria", "nemotron_h"])
def test_experts_function_passes_gradcheck(family: str) -> None:
    module = module_of(family)
    H, intermediate, num_experts = 6, 7, 3
    up = intermediate * (2 if module.has_gate else 1)
    first = "gate_up_proj" if module.has_gate else "up_proj"
    shapes = {first: (num_experts, up, H), "down_proj": (num_experts, H, intermediate)}
    if module.is_transposed:
        shapes = {name: (E, columns, rows) for name, (E, rows, columns) in shapes.items()}
    if module.has_bias:
        shapes |= {f"{first}_bias": (num_experts, up), "down_proj_bias": (num_experts, H)}
    module.num_experts = num_experts
    names = list(shapes)
    tensors = [torch.randn(shapes[n], dtype=torch.float64, requires_grad=True) for n in names]
    x = torch.randn(5, H, dtype=torch.float64, requires_grad=True)
    expert_ids, gates = make_routing("uniform", 5, num_experts, 2, dtype=torch.float64)

    def call(x: Tensor, gates: Tensor, *weights: Tensor) -> Tensor:
        for name, weight in zip(names, weights, strict=True):
            module._parameters[name] = weight
        return module(x, expert_ids, gates)

    arguments = (x, gates.requires_grad_(), *tensors)
    assert torch.autograd.gradcheck(call, arguments, fast_mode=family != "mixtral")


# -- dtypes: field report A17 ---------------------------------------------------------------------


@pytest.mark.parametrize("family", KINDS)
def test_experts_function_in_bf16_is_as_good_as_eager(family: str) -> None:
    module = module_of(family, torch.bfloat16)
    x, expert_ids, gates, grad = inputs(module, dtype=torch.bfloat16)
    ours = run(module, "piper", x, expert_ids, gates, grad)
    baseline = run(module, "eager", x, expert_ids, gates, grad)
    truth = run(module.double(), "eager", x.double(), expert_ids, gates.double(), grad.double())
    for name, want in truth.items():
        assert ours[name].dtype == torch.bfloat16
        assert_close_to_baseline(f"{family} {name}", ours[name], baseline[name], want)


@pytest.mark.parametrize(
    ("x_dtype", "weight_dtype", "gate_dtype"),
    [
        (torch.float32, torch.bfloat16, torch.float32),
        (torch.bfloat16, torch.float32, torch.float32),
        (torch.bfloat16, torch.bfloat16, torch.float32),
        (torch.float32, torch.float32, torch.bfloat16),
        (torch.float32, torch.float64, torch.float32),
        (torch.float16, torch.float16, torch.float32),
    ],
)
@pytest.mark.parametrize("uses_autocast", [False, True])
def test_experts_function_with_mixed_dtypes(
    x_dtype: torch.dtype, weight_dtype: torch.dtype, gate_dtype: torch.dtype, uses_autocast: bool
) -> None:
    module = module_of("mixtral", weight_dtype)
    x, expert_ids, gates, grad = inputs(module)
    x, gates, grad = x.to(x_dtype), gates.to(gate_dtype), grad.to(x_dtype)
    with torch.autocast("cpu", torch.bfloat16, enabled=uses_autocast):
        ours = run(module, "piper", x, expert_ids, gates, grad)
    # y has x's dtype, each gradient that of its tensor
    assert ours["y"].dtype == ours["x"].dtype == x_dtype
    assert ours["gates"].dtype == gate_dtype
    assert ours["gate_up_proj"].dtype == ours["down_proj"].dtype == weight_dtype
    truth = run(module.double(), "eager", x.double(), expert_ids, gates.double(), grad.double())
    for name, want in truth.items():
        unit = float(want.abs().max())
        torch.testing.assert_close(ours[name].double(), want, rtol=2e-2, atol=2e-2 * unit)


def test_experts_function_refuses_two_weight_dtypes() -> None:
    module = module_of("mixtral", torch.float32)
    module.down_proj = nn.Parameter(module.down_proj.data.bfloat16())
    x, expert_ids, gates, _ = inputs(module, dtype=torch.float32)
    with pytest.raises(DtypeError, match=r"down_proj must .*float32.*got bfloat16"):
        module(x, expert_ids, gates)


def test_experts_function_refuses_a_wrong_width() -> None:
    module = module_of("mixtral")
    _, expert_ids, gates, _ = inputs(module)
    with pytest.raises(ShapeError, match=r"(gate_up|down)_proj must"):
        module(torch.randn(9, 31, dtype=torch.float64), expert_ids, gates)


# -- frozen parts: field report A57 ---------------------------------------------------------------


@pytest.mark.parametrize("family", KINDS)
@pytest.mark.parametrize("trained", ["first", "down_proj"])
def test_experts_function_leaves_frozen_weights_alone(family: str, trained: str) -> None:
    module = module_of(family)
    trained = trained if trained == "down_proj" else next(iter(dict(module.named_parameters())))
    arguments = inputs(module)
    expected = run(module, "eager", *arguments)
    for name, parameter in module.named_parameters():
        parameter.requires_grad_(name == trained)
    ours = run(module, "piper", *arguments)
    assert set(ours) == {"y", "x", "gates", trained}
    assert_same(ours, {name: expected[name] for name in ours}, tolerance_of(family))


def test_experts_function_reads_each_parameter_once() -> None:
    # a parametrized weight (PEFT) is computed at every read
    module = module_of("gpt_oss")
    reads: list[str] = []

    class Counting(type(module)):  # type: ignore[misc]
        def __getattr__(self, name: str) -> Any:
            if name.startswith(("gate_up_proj", "down_proj")):
                reads.append(name)
            return super().__getattr__(name)

    x, expert_ids, gates, _ = inputs(module)
    module.__class__ = Counting
    module(x, expert_ids, gates)
    assert sorted(reads) == ["down_proj", "down_proj_bias", "gate_up_proj", "gate_up_proj_bias"]


@pytest.mark.parametrize("family", KINDS)
def test_explain_experts_function_names_the_slow_path(family: str) -> None:
    module = module_of(family, torch.float32)
    x, expert_ids, gates, _ = inputs(module, dtype=torch.float32)
    explanation = explain_experts_function(module, x, expert_ids, gates)
    assert explanation.backend == "cpu"
    assert explanation.path == ("composed" if family in {"beam", "muse_spark"} else "fused")
    assert explanation.saved_bytes
    assert "path:" in str(explanation)
