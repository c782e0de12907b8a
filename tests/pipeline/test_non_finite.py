"""The first layer that gives NaN or infinity is named."""

import torch

from piper_kernels.pipeline.non_finite import NonFiniteWatch
from piper_kernels.pipeline.stage import StagePlace
from piper_kernels.pipeline.stage_build import build_stage
from piper_kernels.testing.model_steps import token_ids
from piper_kernels.testing.tiny_models import tiny_config


def test_the_first_bad_layer_is_named() -> None:
    config = tiny_config("mixtral", num_hidden_layers=3)
    stage = build_stage(config, StagePlace(index=0, num_stages=1, layers=range(3)), seed=0)
    watch = NonFiniteWatch(stage)
    stage(token_ids())
    assert watch.finding() == ""
    weight = stage.model.model.layers[1].mlp.experts.down_proj
    kept = weight.detach().clone()
    weight.data.fill_(float("inf"))
    stage(token_ids())
    assert watch.finding() == "layer 1"
    weight.data.copy_(kept)
    watch.reset()
    stage(token_ids())
    assert watch.finding() == ""
    stage.model.model.embed_tokens.weight.data[:] = float("nan")
    stage(token_ids())
    assert watch.finding() == "embedding"


def test_a_middle_stage_watches_its_own_layers() -> None:
    config = tiny_config("mixtral", num_hidden_layers=4)
    stage = build_stage(config, StagePlace(index=1, num_stages=3, layers=range(1, 3)), seed=0)
    watch = NonFiniteWatch(stage)
    stage(torch.full((1, 2, 32), float("nan")))
    assert watch.finding() == "layer 1"
