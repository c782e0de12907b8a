"""The model's own balance loss goes on working: with "piper" experts and with replaced blocks."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from piper_kernels.huggingface import replace_moe_blocks
from piper_kernels.moe import PiperMoE
from piper_kernels.testing.model_steps import token_ids
from piper_kernels.testing.tiny_models import tiny_model, tiny_vision_language_model

WAYS = ("eager", "piper", "replaced")
by_way = pytest.mark.parametrize("way", WAYS)
COEFFICIENT = 0.5


def prepare(model: Any, way: str) -> Any:
    if way == "replaced":
        replace_moe_blocks(model)
    else:
        model.set_experts_implementation(way)
    return model


# -- field report A38: raw logits, not probabilities ----------------------------------------------


@by_way
@pytest.mark.parametrize(
    "family", ["mixtral", "qwen2_moe", "qwen3_moe", "olmoe", "deepseek_v3", "gpt_oss"]
)
def test_router_logits_are_raw(family: str, way: str) -> None:
    model = tiny_model(family)
    with torch.no_grad():
        model.set_experts_implementation("eager")
        want = model(token_ids(), output_router_logits=True).router_logits
        have = prepare(model, way)(token_ids(), output_router_logits=True).router_logits
    assert len(have) == len(want) > 0
    for ours, theirs in zip(have, want, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-5, atol=1e-5)
        assert ours.shape == (14, 8)
        assert not torch.allclose(ours.sum(-1), torch.ones(14), atol=0.1)


@by_way
def test_aux_loss_of_known_logits(way: str) -> None:
    # every token's logits are [6, 0, 0, 0], K = 1: aux is 4 * softmax(6, 0, 0, 0)[0]
    model = tiny_model("mixtral", num_local_experts=4, num_experts_per_tok=1, num_hidden_layers=1)
    prepare(model, way)
    inputs: list[Tensor] = []
    router = model.model.layers[0].mlp.gate
    handle = router.register_forward_pre_hook(lambda _, args: inputs.append(args[0]))
    ids = torch.full((2, 5), 7)
    with torch.no_grad():
        # equal tokens attend to equal values, so all of them reach the router as one vector h
        model(ids)
        h = inputs[0][0]
        router.weight.zero_()
        router.weight[0] = 6.0 * h / h.square().sum()
        handle.remove()
        output = model(ids, output_router_logits=True)
    expected = torch.tensor([6.0, 0.0, 0.0, 0.0]).expand(10, 4)
    torch.testing.assert_close(output.router_logits[0], expected, rtol=1e-4, atol=1e-4)
    assert output.aux_loss.item() == pytest.approx(3.970, abs=1e-3)


# -- field report A44: the coefficient is applied behind every wrapper ----------------------------


class Engine(nn.Module):
    """What training engines do: keep the model as ``module``."""

    def __init__(self, module: nn.Module) -> None:
        super().__init__()
        self.module = module

    def forward(self, **inputs: Any) -> Any:
        return self.module(**inputs)


@pytest.fixture
def one_rank(tmp_path: Path) -> Iterator[None]:
    dist.init_process_group("gloo", init_method=f"file://{tmp_path}/store", rank=0, world_size=1)
    yield
    dist.destroy_process_group()


def build(kind: str, coefficient: float) -> Any:
    settings = {"router_aux_loss_coef": coefficient, "output_router_logits": True}
    if kind == "outer-config":
        return tiny_vision_language_model(**settings)
    return tiny_model("mixtral", **settings)


def wrap(model: nn.Module, kind: str) -> nn.Module:
    match kind:
        case "ddp":
            return DistributedDataParallel(model)
        case "engine":
            return Engine(model)
    return model


def loss_and_router_grad(kind: str, way: str, coefficient: float) -> tuple[Tensor, Tensor, Tensor]:
    """Loss, aux loss and the gradient of the last layer's router."""
    model = wrap(prepare(build(kind, coefficient), way), kind)
    ids = token_ids()
    output = model(input_ids=ids, labels=ids)
    output.loss.backward()
    routers = [p for name, p in model.named_parameters() if name.endswith("mlp.gate.weight")]
    grad = routers[-1].grad
    assert grad is not None
    return output.loss.detach(), output.aux_loss.detach(), grad


@by_way
@pytest.mark.parametrize("kind", ["plain", "ddp", "engine", "outer-config"])
@pytest.mark.usefixtures("one_rank")
def test_aux_loss_is_part_of_the_loss_behind_a_wrapper(kind: str, way: str) -> None:
    with_aux, aux, grad = loss_and_router_grad(kind, way, COEFFICIENT)
    without, _, grad_without = loss_and_router_grad(kind, way, 0.0)
    assert aux.item() > 1.0
    torch.testing.assert_close(with_aux - without, COEFFICIENT * aux, rtol=1e-4, atol=1e-5)
    _, _, twice = loss_and_router_grad(kind, way, 2 * COEFFICIENT)
    # linear in the coefficient, and not nothing
    torch.testing.assert_close(
        twice - grad_without, 2 * (grad - grad_without), rtol=1e-3, atol=1e-5
    )
    assert float((grad - grad_without).abs().max()) > 1e-3


@pytest.mark.parametrize("way", ["piper", "replaced"])
@pytest.mark.parametrize("kind", ["plain", "outer-config"])
def test_loss_with_aux_equals_eager(kind: str, way: str) -> None:
    for ours, theirs in zip(
        loss_and_router_grad(kind, way, COEFFICIENT),
        loss_and_router_grad(kind, "eager", COEFFICIENT),
        strict=True,
    ):
        torch.testing.assert_close(ours, theirs, rtol=1e-5, atol=1e-5)


@by_way
def test_aux_loss_leaves_padding_out(way: str) -> None:
    model = prepare(tiny_model("mixtral"), way)
    ids = token_ids(2, 7)
    mask = torch.ones_like(ids)
    mask[1, 4:] = 0
    other = ids.clone()
    other[1, 4:] = 5
    with torch.no_grad():
        first, second = (
            model(i, attention_mask=mask, output_router_logits=True).aux_loss for i in (ids, other)
        )
    torch.testing.assert_close(first, second, rtol=1e-5, atol=1e-5)


def test_balance_loss_times_k_is_the_loss_of_transformers() -> None:
    # A39: transformers pools the layers' tokens first; ours is per layer, 1 at balance
    model = prepare(tiny_model("mixtral", num_hidden_layers=1), "replaced")
    (moe,) = [module for module in model.modules() if isinstance(module, PiperMoE)]
    seen: list[Tensor] = []
    moe.register_forward_hook(lambda _, args, __: seen.append(args[0]))
    with torch.no_grad():
        theirs = model(token_ids(), output_router_logits=True).aux_loss
        _, stats = moe(seen[0], return_stats=True)
    # "per_slot" times K is transformers' "per_token"
    torch.testing.assert_close(stats.balance_loss * 2, theirs, rtol=1e-5, atol=1e-5)
