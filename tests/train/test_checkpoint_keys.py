from collections.abc import Callable

import torch

from piper_kernels.train.checkpoint_keys import (
    allocate_moments,
    keyed_parameters,
    model_tensors,
    moment_tensors,
)
from piper_kernels.train.loop import Trainer

Make = Callable[..., Trainer]
ONE_LAYER = {"hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2}


def test_keys_are_one_per_logical_expert_and_moment(make_trainer: Make) -> None:
    override = {**ONE_LAYER, "num_key_value_heads": 2, "intermediate_size": 8, "num_experts": 2}
    trainer = make_trainer(model_override=override)
    assert moment_tensors(trainer.model, trainer.optimizer) == {}
    trainer.train_step()
    parameters = {
        "experts.0.0.gate_up_proj",
        "experts.0.0.down_proj",
        "experts.0.1.gate_up_proj",
        "experts.0.1.down_proj",
        "dense.lm_head.weight",
        "dense.model.embed_tokens.weight",
        "dense.model.norm.weight",
        "dense.model.layers.0.input_layernorm.weight",
        "dense.model.layers.0.post_attention_layernorm.weight",
        "dense.model.layers.0.mlp.gate.weight",
        *(f"dense.model.layers.0.self_attn.{name}_proj.weight" for name in "qkvo"),
        *(f"dense.model.layers.0.self_attn.{name}_norm.weight" for name in "qk"),
    }
    assert model_tensors(trainer.model).keys() == parameters
    moments = moment_tensors(trainer.model, trainer.optimizer)
    kinds = ("exp_avg", "exp_avg_sq", "step")
    assert moments.keys() == {f"{key}.{kind}" for key in parameters for kind in kinds}
    assert tuple(moments["experts.0.1.down_proj.exp_avg"].shape) == (16, 8)
    assert float(moments["experts.0.1.down_proj.step"]) == 1.0


def test_keys_cover_biases_and_buffers_of_other_families(make_trainer: Make) -> None:
    gpt_oss = make_trainer(model="gpt_oss", model_override={"num_hidden_layers": 1}).model
    keys = model_tensors(gpt_oss).keys()
    assert {"experts.0.7.gate_up_proj_bias", "experts.0.7.down_proj_bias"} <= keys
    deepseek = make_trainer(model="deepseek_v3", model_override={"num_hidden_layers": 2}).model
    keys = model_tensors(deepseek).keys()
    assert "dense.model.layers.1.mlp.gate.e_score_correction_bias" in keys
    assert "dense.model.layers.1.mlp.shared_experts.down_proj.weight" in keys
    assert "experts.1.0.gate_up_proj" in keys
    nemotron = make_trainer(model="nemotron_h", model_override={}).model
    assert "experts.3.7.up_proj" in model_tensors(nemotron)


def test_tied_parameters_are_saved_once(make_trainer: Make) -> None:
    override = {**ONE_LAYER, "num_key_value_heads": 2, "tie_word_embeddings": True}
    trainer = make_trainer(model_override=override)
    keys = model_tensors(trainer.model).keys()
    assert "dense.model.embed_tokens.weight" in keys
    assert "dense.lm_head.weight" not in keys
    assert len(keyed_parameters(trainer.model)) == len(list(trainer.model.parameters()))


def test_tensors_are_views_of_the_live_ones(make_trainer: Make) -> None:
    trainer = make_trainer()
    trainer.train_step()
    layer = trainer.model.model.layers[1].mlp.experts
    model_tensors(trainer.model)["experts.1.3.down_proj"].fill_(7.0)
    assert bool((layer.down_proj[3] == 7.0).all())
    assert not bool((layer.down_proj[2] == 7.0).any())
    moments = moment_tensors(trainer.model, trainer.optimizer)
    moments["experts.1.3.down_proj.exp_avg"].fill_(5.0)
    state = trainer.optimizer.state[layer.down_proj]
    assert bool((state["exp_avg"][3] == 5.0).all())
    assert not bool((state["exp_avg"][2] == 5.0).any())


def test_allocate_moments_only_where_they_were_saved(make_trainer: Make) -> None:
    trainer = make_trainer()
    allocate_moments(trainer.model, trainer.optimizer, {"dense.lm_head.weight.step"})
    assert list(trainer.optimizer.state) == [trainer.model.lm_head.weight]
    assert moment_tensors(trainer.model, trainer.optimizer).keys() == {
        f"dense.lm_head.weight.{kind}" for kind in ("exp_avg", "exp_avg_sq", "step")
    }
    assert torch.equal(
        trainer.optimizer.state[trainer.model.lm_head.weight]["exp_avg"],
        torch.zeros_like(trainer.model.lm_head.weight),
    )
