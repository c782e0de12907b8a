from collections.abc import Callable
from itertools import pairwise

import pytest
import torch

from piper_kernels.train.model import build_model
from piper_kernels.train.optimizer import build_optimizer, learning_rate
from piper_kernels.train.settings import TrainSettings


def test_build_optimizer_decays_matrices_only(tiny_settings: Callable[..., TrainSettings]) -> None:
    # gpt-oss has biases per expert, of two dims
    override = {"num_hidden_layers": 1, "layer_types": ["full_attention"]}
    settings = tiny_settings(model="gpt_oss", model_override=override)
    model = build_model(settings, 256, torch.device("cpu"))
    decayed, free = build_optimizer(model, settings).param_groups
    names = {id(parameter): name for name, parameter in model.named_parameters()}
    groups = [[names[id(p)] for p in group["params"]] for group in (decayed, free)]
    assert (decayed["weight_decay"], free["weight_decay"]) == (0.1, 0.0)
    assert {name.rpartition(".")[2] for name in groups[0]} == {
        "weight",
        "gate_up_proj",
        "down_proj",
    }
    assert "model.layers.0.mlp.experts.gate_up_proj_bias" in groups[1]
    assert "model.norm.weight" in groups[1]
    assert "model.embed_tokens.weight" in groups[0]
    assert len(groups[0]) + len(groups[1]) == len(names)
    assert (decayed["betas"], decayed["eps"]) == ((0.9, 0.95), 1e-8)


def test_learning_rate_warms_up_and_follows_a_cosine() -> None:
    settings = TrainSettings(
        steps=100, warmup_fraction=0.1, learning_rate=2.0, final_learning_rate_fraction=0.1
    )
    rates = [learning_rate(step, settings) for step in range(1, 101)]
    assert rates[:10] == pytest.approx([0.2 * step for step in range(1, 11)])
    assert rates[54] == pytest.approx((2.0 + 0.2) / 2)
    assert rates[-1] == pytest.approx(0.2)
    assert all(late < early for early, late in pairwise(rates[9:]))
    without = TrainSettings(steps=10, warmup_fraction=0.0, learning_rate=1.0)
    assert learning_rate(1, without) < 1.0
