"""Weights do not depend on how a model is cut, and none is left undrawn."""

from typing import Any

import pytest
import torch

from piper_kernels.errors import ConfigError
from piper_kernels.huggingface.expert_counts import expert_modules
from piper_kernels.pipeline.stage import Stage, StagePlace, cut_stage
from piper_kernels.pipeline.stage_build import build_stage, draw_weights
from piper_kernels.testing.tiny_models import tiny_config

WHOLE = StagePlace(index=0, num_stages=1, layers=range(2))
FIRST = StagePlace(index=0, num_stages=2, layers=range(1))
LAST = StagePlace(index=1, num_stages=2, layers=range(1, 2))


def on_meta(config: Any, place: StagePlace) -> Any:
    from transformers import AutoModelForCausalLM

    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config, experts_implementation="piper")
    cut_stage(model, place)
    return model


def weights(*stages: Stage) -> dict[str, torch.Tensor]:
    return {name: tensor for s in stages for name, tensor in s.model.state_dict().items()}


@pytest.mark.parametrize("is_tied", [False, True])
@pytest.mark.parametrize("family", ["mixtral", "qwen3_moe", "deepseek_v3", "gpt_oss"])
def test_weights_do_not_depend_on_the_cut(family: str, is_tied: bool) -> None:
    config = tiny_config(family, tie_word_embeddings=is_tied, pad_token_id=5)
    whole = build_stage(config, WHOLE, seed=1)
    parts = [build_stage(config, place, seed=1) for place in (FIRST, LAST)]
    want, found = weights(whole), weights(*parts)
    assert found.keys() == want.keys()
    for name, tensor in want.items():
        assert torch.equal(found[name], tensor), name
    other = weights(build_stage(config, WHOLE, seed=2))
    # biases and norms are the same whatever the seed
    drawn = [name for name, tensor in want.items() if tensor.dim() > 1 and bool(tensor.any())]
    assert drawn
    assert all(not torch.equal(other[name], want[name]) for name in drawn)


def test_tied_weights_are_one_or_named() -> None:
    # field report A76: embedding on the first stage, head on the last
    config = tiny_config("mixtral", tie_word_embeddings=True)
    whole = build_stage(config, WHOLE, seed=0)
    assert whole.tied_weight is None
    assert whole.model.lm_head.weight is whole.model.model.embed_tokens.weight
    first, last = (build_stage(config, place, seed=0) for place in (FIRST, LAST))
    assert first.tied_weight is first.model.model.embed_tokens.weight
    assert last.tied_weight is last.model.lm_head.weight
    assert torch.equal(first.tied_weight, last.tied_weight)
    untied = build_stage(tiny_config("mixtral"), FIRST, seed=0)
    assert untied.tied_weight is None


def test_local_experts_are_the_whole_models() -> None:
    config = tiny_config("mixtral")
    whole = build_stage(config, WHOLE, seed=1).model
    model = on_meta(config, WHOLE)
    for _, module in expert_modules(model).values():
        for name, parameter in list(module.named_parameters()):
            module.register_parameter(name, torch.nn.Parameter(parameter[:3]))
    draw_weights(model, WHOLE, 1, torch.device("cpu"), local_experts=[6, 0, 3])
    for layer in range(2):
        for name in ("gate_up_proj", "down_proj"):
            want = getattr(whole.model.layers[layer].mlp.experts, name)[[6, 0, 3]]
            assert torch.equal(getattr(model.model.layers[layer].mlp.experts, name), want)


def test_the_global_generator_is_left_alone() -> None:
    torch.manual_seed(0)
    want = torch.rand(1)
    torch.manual_seed(0)
    build_stage(tiny_config("mixtral"), FIRST, seed=4)
    assert torch.equal(torch.rand(1), want)


def test_a_tensor_that_no_rule_draws_is_refused() -> None:
    model = on_meta(tiny_config("mixtral"), WHOLE)
    model.model.layers[0].mlp.forgotten = torch.nn.Parameter(torch.empty(3, device="meta"))
    message = r"draw every tensor .*, got none for model.layers.0.mlp.forgotten. Begin from saved"
    with pytest.raises(ConfigError, match=message):
        draw_weights(model, WHOLE, 0, torch.device("cpu"))
