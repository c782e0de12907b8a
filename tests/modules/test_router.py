"""Router: wide logits, the buffer for the loss-free update, parameters from elsewhere."""

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from piper_kernels import MoEConfig, RouterConfig
from piper_kernels.errors import ConfigError, DeviceError, DtypeError, ShapeError
from piper_kernels.modules.router import Router, wide_linear


def config(**router: Any) -> MoEConfig:
    return MoEConfig(
        hidden_size=8,
        intermediate_size=6,
        num_experts=4,
        top_k=2,
        router=RouterConfig(**router),
    )


@pytest.mark.parametrize("has_bias", [True, False], ids=["bias", "no_bias"])
@pytest.mark.parametrize("x_dtype", [torch.bfloat16, torch.float16, torch.float32, torch.float64])
@pytest.mark.parametrize("weight_dtype", [torch.bfloat16, torch.float32, torch.float64])
def test_wide_linear_equals_a_linear_layer_in_the_wide_dtype(
    weight_dtype: torch.dtype, x_dtype: torch.dtype, has_bias: bool
) -> None:
    x = torch.randn(7, 8).to(x_dtype)
    weight, bias = torch.randn(4, 8).to(weight_dtype), torch.randn(4).to(weight_dtype)
    grad = torch.randn(7, 4)
    wide = torch.promote_types(x_dtype, torch.float32)
    results = []
    for function in (
        wide_linear,
        lambda x, w, b: F.linear(x.to(wide), w.to(wide), b if b is None else b.to(wide)),
    ):
        leaves = [
            t.clone().requires_grad_() for t in ((x, weight, bias) if has_bias else (x, weight))
        ]
        with torch.autocast("cpu", torch.bfloat16, enabled=function is wide_linear):
            out = function(*leaves) if has_bias else function(*leaves, None)
            # a backward inside the autocast region must not narrow either
            (out * grad.to(wide)).sum().backward()
        assert out.dtype == wide
        results.append([out, *(leaf.grad for leaf in leaves)])
    for found, expected in zip(*results, strict=True):
        assert found.dtype == expected.dtype
        torch.testing.assert_close(found, expected)


def test_wide_linear_passes_gradcheck() -> None:
    tensors = [
        torch.randn(s, dtype=torch.float64, requires_grad=True) for s in ((5, 8), (4, 8), (4,))
    ]
    assert torch.autograd.gradcheck(wide_linear, tensors)
    assert torch.autograd.gradgradcheck(wide_linear, tensors)


def test_wide_linear_keeps_a_narrow_x_and_no_wide_copy() -> None:
    x = torch.randn(100, 8, dtype=torch.bfloat16, requires_grad=True)
    weight = torch.randn(4, 8, requires_grad=True)
    kept: list[Tensor] = []
    with torch.autograd.graph.saved_tensors_hooks(lambda t: kept.append(t) or t, lambda t: t):
        wide_linear(x, weight, None)
    kept_bytes = sum(
        t.nbytes for t in kept if t.data_ptr() not in (x.data_ptr(), weight.data_ptr())
    )
    assert x.data_ptr() in {tensor.data_ptr() for tensor in kept}
    assert kept_bytes == 0


@pytest.mark.parametrize("frozen", ["x", "weight", "bias"])
def test_wide_linear_skips_what_is_frozen(frozen: str) -> None:
    leaves = {
        "x": torch.randn(5, 8, dtype=torch.bfloat16),
        "weight": torch.randn(4, 8),
        "bias": torch.randn(4),
    }
    for name, leaf in leaves.items():
        leaf.requires_grad_(name != frozen)
    wide_linear(**leaves).sum().backward()
    assert {name for name, leaf in leaves.items() if leaf.grad is None} == {frozen}


# ---- the correction bias


def test_update_correction_bias_moves_against_the_load() -> None:
    router = Router.build(config(kind="sigmoid_topk", has_correction_bias=True))
    bias = router.correction_bias
    router.update_correction_bias(torch.tensor([9, 3, 2, 2]), speed=0.5)
    assert bias.tolist() == [-0.5, 0.5, 0.5, 0.5]
    assert router.correction_bias is bias, "optimizers, wrappers and buffers' owners keep theirs"
    router.update_correction_bias(torch.tensor([4, 4, 4, 4]))
    assert bias.tolist() == [-0.5, 0.5, 0.5, 0.5]


def test_update_correction_bias_balances_a_skewed_router() -> None:
    """Loss-free balancing from end to end: the counts of real tokens, then the update."""
    router = Router.build(config(kind="sigmoid_topk", has_correction_bias=True))
    with torch.no_grad():
        router.weight[:, 0] = torch.tensor([2.0, 1.0, 0.0, -1.0])
    x = torch.randn(200, 8)
    x[:, 0] = 1.0
    mask = torch.arange(200) < 160

    def counts() -> Tensor:
        return torch.bincount(router(x, mask).expert_ids.flatten(), minlength=5)[:4]

    assert counts().sum() == 320
    before = counts().max()
    for _ in range(200):
        router.update_correction_bias(counts(), speed=0.01)
    assert before > 140
    assert counts().max() < 95, "80 each is balance"


def test_update_correction_bias_words_its_errors() -> None:
    with pytest.raises(ConfigError, match=r"correction_bias must exist, got None. Build the layer"):
        Router.build(config()).update_correction_bias(torch.ones(4, dtype=torch.int64))
    router = Router.build(config(kind="sigmoid_topk", has_correction_bias=True))
    with pytest.raises(ShapeError, match=r"expert_counts must have shape .*got \(3\)"):
        router.update_correction_bias(torch.ones(3, dtype=torch.int64))


# ---- around given parameters


def test_router_adopts_parameters_and_buffer() -> None:
    weight, bias = nn.Parameter(torch.randn(4, 8)), nn.Parameter(torch.randn(4))
    correction_bias = torch.randn(4)
    settings = config(kind="sigmoid_topk", has_bias=True, has_correction_bias=True)
    router = Router(settings, weight, bias, correction_bias)
    assert router.weight is weight
    assert router.bias is bias
    assert router.correction_bias is correction_bias
    assert dict(router.named_parameters()).keys() == {"weight", "bias"}


def test_router_words_its_errors() -> None:
    weight = nn.Parameter(torch.randn(4, 8))
    with pytest.raises(ShapeError, match=r"Router: weight must have shape \(4, 8\), got \(8, 4\)"):
        Router(config(), nn.Parameter(torch.randn(8, 4)))
    with pytest.raises(ConfigError, match="Router: bias must be given for this config, got None"):
        Router(config(has_bias=True), weight)
    with pytest.raises(ConfigError, match="Router: bias must be None for this config, got a ten"):
        Router(config(), weight, nn.Parameter(torch.randn(4)))
    with pytest.raises(DtypeError, match=r"correction_bias must be one of float32.*Use .float"):
        Router(config(has_correction_bias=True), weight, None, torch.zeros(4, dtype=torch.bfloat16))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32, torch.float64], ids=str)
def test_router_is_wide_whatever_its_dtype(dtype: torch.dtype) -> None:
    router = Router.build(config(has_bias=True), dtype=dtype)
    x = torch.randn(5, 8, dtype=dtype)
    with torch.autocast("cpu", torch.bfloat16):
        routing = router(x)
    wide = torch.promote_types(dtype, torch.float32)
    assert routing.logits.dtype == routing.gates.dtype == wide
    expected = F.linear(x.to(wide), router.weight.to(wide), router.bias.to(wide))
    torch.testing.assert_close(routing.logits, expected)


def test_router_names_a_device_that_differs() -> None:
    config = MoEConfig(hidden_size=4, intermediate_size=4, num_experts=3, top_k=1)
    match = r"Router: x must be on the device of weight \(meta\), got cpu"
    with pytest.raises(DeviceError, match=match):
        Router.build(config, device="meta")(torch.randn(2, 4))
