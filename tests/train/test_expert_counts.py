from collections.abc import Callable

import pytest
import torch
from torch import nn

from piper_kernels.errors import CheckpointError
from piper_kernels.huggingface.expert_counts import ExpertCounter, expert_modules
from piper_kernels.train.model import build_model, forward_logits
from piper_kernels.train.settings import TrainSettings

Make = Callable[..., TrainSettings]
CPU = torch.device("cpu")


def test_expert_modules_are_numbered_by_layer(tiny_settings: Make) -> None:
    # the first layer of DeepSeek-V3 is dense
    settings = tiny_settings(model="deepseek_v3", model_override={"num_hidden_layers": 3})
    found = expert_modules(build_model(settings, 256, CPU))
    names = {layer: name for layer, (name, _) in found.items()}
    assert names == {1: "model.layers.1.mlp.experts", 2: "model.layers.2.mlp.experts"}


def test_expert_modules_refuses_two_in_one_layer(tiny_settings: Make) -> None:
    model = build_model(tiny_settings(), 256, CPU)
    twice = nn.ModuleDict({"one": model, "two": model.model})
    twice["two"] = build_model(tiny_settings(), 256, CPU)
    message = "have one module of experts per layer, got one.model.layers.0.mlp.experts and two."
    with pytest.raises(CheckpointError, match=message):
        expert_modules(twice)


@pytest.mark.parametrize("experts", ["eager", "grouped_mm"])
@pytest.mark.parametrize("is_recomputed", [False, True])
def test_expert_counter_counts_what_the_router_chose(
    tiny_settings: Make, experts: str, is_recomputed: bool
) -> None:
    settings = tiny_settings(experts=experts, checkpoint_activations=is_recomputed)
    model = build_model(settings, 256, CPU)
    counter = ExpertCounter(model)
    inputs = torch.randint(0, 256, (2, 16))
    forward_logits(model, inputs)
    assert counter.take() == [[0] * 4] * 2
    with counter.counting():
        logits, router_logits = forward_logits(model, inputs, wants_router_logits=True)
    # recomputation in backward runs the experts again, and must not count
    logits.sum().backward()
    assert router_logits is not None
    wanted = [layer.topk(2).indices.flatten().bincount(minlength=4) for layer in router_logits]
    routed_ids = [counter.routed[layer][0].flatten().bincount(minlength=4) for layer in (0, 1)]
    assert [ids.tolist() for ids in routed_ids] == [count.tolist() for count in wanted]
    with counter.counting():
        forward_logits(model, inputs)
    assert counter.take() == [(2 * count).tolist() for count in wanted]
    assert counter.take() == [[0] * 4] * 2
