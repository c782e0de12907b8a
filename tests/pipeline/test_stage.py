"""Stages in a row are the whole model: outputs, gradients, losses, names and refusals."""

from collections.abc import Sequence
from typing import Any

import pytest
import torch
from torch import nn

from piper_kernels.errors import ConfigError, PlanError
from piper_kernels.pipeline.stage import Stage, StagePlace, base_model, cut_stage
from piper_kernels.pipeline.stage_build import build_stage
from piper_kernels.testing.model_steps import token_ids
from piper_kernels.testing.tiny_models import tiny_config

NUM_LAYERS = 4


def build(config: Any, cuts: Sequence[int] = (), *, experts: str = "piper") -> list[Stage]:
    """The stages between the cuts, in fp64."""
    bounds = [0, *cuts, NUM_LAYERS]
    places = [
        StagePlace(index=i, num_stages=len(bounds) - 1, layers=range(bounds[i], bounds[i + 1]))
        for i in range(len(bounds) - 1)
    ]
    options: dict[str, Any] = {"seed": 3, "dtype": torch.float64, "experts": experts}
    return [build_stage(config, place, **options) for place in places]


def run(stages: Sequence[Stage], **options: Any) -> torch.Tensor:
    hidden = token_ids()
    for stage in stages:
        hidden = stage(hidden, **options)
    return hidden


def gradients(stages: Sequence[Stage]) -> dict[str, torch.Tensor]:
    found: dict[str, torch.Tensor] = {}
    for stage in stages:
        for name, parameter in stage.model.named_parameters():
            if parameter.grad is not None:
                total = found.get(name)
                found[name] = parameter.grad if total is None else total + parameter.grad
    return found


def backward(output: torch.Tensor) -> None:
    generator = torch.Generator().manual_seed(2)
    (output * torch.randn(output.shape, generator=generator, dtype=output.dtype)).sum().backward()


# routers without noise; sliding and full attention by layer number, dense first layers, latent
# attention, scaled embeddings, linear attention
FAMILIES = [
    "mixtral",
    "qwen2_moe",
    "qwen3_moe",
    "olmoe",
    "granitemoe",
    "deepseek_v2",
    "deepseek_v3",
    "glm4_moe",
    "gpt_oss",
    "minimax",
    "ernie4_5_moe",
    "hunyuan_v1_moe",
]


@pytest.mark.parametrize("family", FAMILIES)
def test_stages_are_the_whole_model(family: str) -> None:
    config = tiny_config(family, num_hidden_layers=NUM_LAYERS, tie_word_embeddings=False)
    whole, parts = build(config), build(config, (1, 3))
    mask = torch.ones(2, 7, dtype=torch.int64)
    mask[0, :2] = 0
    want, found = run(whole, attention_mask=mask), run(parts, attention_mask=mask)
    assert torch.equal(found, want)
    backward(want)
    backward(found)
    want_grads, found_grads = gradients(whole), gradients(parts)
    assert found_grads.keys() == want_grads.keys()
    for name, grad in want_grads.items():
        assert torch.equal(found_grads[name], grad), name
    names = [name for stage in parts for name, _ in stage.model.named_parameters()]
    assert sorted(names) == sorted(name for name, _ in whole[0].model.named_parameters())


@pytest.mark.parametrize("family", ["mixtral", "deepseek_v2"])
def test_balance_losses_of_the_stages_are_the_whole_models(family: str) -> None:
    config = tiny_config(family, num_hidden_layers=NUM_LAYERS, output_router_logits=False)
    whole, parts = build(config), build(config, (2,))
    for stage in (*whole, *parts):
        stage.balance_scale = 0.25
    for stages in (whole, parts):
        backward(run(stages))
    want_grads, found_grads = gradients(whole), gradients(parts)
    for name, grad in want_grads.items():
        torch.testing.assert_close(found_grads[name], grad, rtol=1e-12, atol=1e-14, msg=name)
    want = float(whole[0].balance_loss)
    assert want > 1.0
    assert sum(float(stage.balance_loss) for stage in parts) == pytest.approx(want)
    # and the loss is in those gradients
    plain = build(config)
    backward(run(plain))
    routers = [name for name in want_grads if name.endswith("gate.weight")]
    assert len(routers) == whole[0].num_expert_layers
    for name in routers:
        assert not torch.allclose(gradients(plain)[name], want_grads[name]), name


def test_counters_speak_of_their_own_layers() -> None:
    config = tiny_config("deepseek_v3", num_hidden_layers=NUM_LAYERS)
    first, second = build(config, (2,))
    run([first, second])
    assert first.counter is not None
    assert second.counter is not None
    assert (first.counter.layers, second.counter.layers) == ([1], [2, 3])
    for stage in (first, second):
        assert stage.counter is not None
        assert stage.counter.counts.sum(1).tolist() == [2 * 7 * 2] * len(stage.counter.layers)
    second.eval()
    run([first, second])
    assert second.counter.counts.sum(1).tolist() == [28, 28]


def test_a_stage_without_experts_has_nothing_to_count() -> None:
    # field report A80
    config = tiny_config("deepseek_v3", num_hidden_layers=NUM_LAYERS)
    dense, rest = build(config, (1,))
    dense.balance_scale = rest.balance_scale = 1.0
    assert dense.counter is None
    backward(run([dense, rest]))
    assert all(parameter.grad is not None for parameter in dense.parameters())


def test_outputs_are_no_views() -> None:
    for stage in build(tiny_config("mixtral", num_hidden_layers=NUM_LAYERS), (1, 3)):
        given = token_ids() if stage.place.is_first else torch.zeros(2, 7, 32, dtype=torch.float64)
        assert not stage(given)._is_view()


@pytest.mark.parametrize("layers", [range(0), range(2, 5), range(0, 4, 2), range(3, 1)])
def test_cut_stage_refuses_layers_that_are_not_there(layers: range) -> None:
    config = tiny_config("mixtral", num_hidden_layers=NUM_LAYERS)
    place = StagePlace(index=0, num_stages=2, layers=layers)
    message = r"cut_stage: layers must be consecutive numbers in 0 .. 3, one at least, got range"
    with pytest.raises(PlanError, match=message):
        build_stage(config, place, seed=0)


def test_cut_stage_refuses_other_architectures() -> None:
    place = StagePlace(index=0, num_stages=1, layers=range(1))
    message = "with layers, embed_tokens, norm and lm_head, got Linear without layers, embed_tokens"
    with pytest.raises(ConfigError, match=message):
        cut_stage(nn.Linear(2, 2), place)


def test_a_model_that_changes_what_is_handed_on_is_refused() -> None:
    config = tiny_config("mixtral", num_hidden_layers=NUM_LAYERS)
    place = StagePlace(index=1, num_stages=2, layers=range(2, 4))
    model = build_stage(config, place, seed=0).model

    def scale(module: nn.Module, args: Any, output: Any) -> Any:
        output.last_hidden_state = output.last_hidden_state * 12.0
        return output

    base_model(model).register_forward_hook(scale)
    message = r"hand hidden states to its first layer unchanged, got MixtralModel, which changes"
    with pytest.raises(ConfigError, match=message):
        Stage(model, place, num_expert_layers=4)
