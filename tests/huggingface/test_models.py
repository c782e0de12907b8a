"""Whole models with "piper" experts, in depth for one family of each weight layout."""

import copy
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from piper_kernels.testing import assert_close_to_baseline
from piper_kernels.testing.model_steps import ModelStep, assert_steps_close, run_step, token_ids
from piper_kernels.testing.tiny_models import (
    experts_modules,
    first_output,
    tiny_model,
    tiny_vision_language_model,
)

# layout -> family; the two without a causal language model are base models here
LAYOUTS = {
    "halves": "mixtral",
    "halves-qwen": "qwen3_moe",
    "halves-own-gate": "deepseek_v4",
    "transposed-interleaved-bias": "gpt_oss",
    "transposed-bias": "openai_privacy_filter",
    "transposed": "aria",
    "ungated": "nemotron_h",
    "post-expert-norm": "muse_spark",
}
CAUSAL = {k: f for k, f in LAYOUTS.items() if f not in {"openai_privacy_filter", "muse_spark"}}

by_layout = pytest.mark.parametrize("family", LAYOUTS.values(), ids=LAYOUTS)
by_causal_layout = pytest.mark.parametrize("family", CAUSAL.values(), ids=CAUSAL)


def train_step(model: Any, experts: str) -> dict[str, Tensor]:
    """One AdamW step in training mode; the parameters after it."""
    model = copy.deepcopy(model).train()
    model.set_experts_implementation(experts)
    # an eps above the rounding noise of gradients, which AdamW would blow up to a full step
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, eps=1e-5)
    ids = token_ids(3, 9)
    torch.manual_seed(0)
    loss = model(input_ids=ids, labels=ids).loss
    loss.backward()
    optimizer.step()
    return {"loss": loss.detach(), **{n: p.detach() for n, p in model.named_parameters()}}


@by_causal_layout
def test_one_training_step_equals_eager(family: str) -> None:
    model = tiny_model(family)
    eager, piper = train_step(model, "eager"), train_step(model, "piper")
    moved = 0
    for name, want in eager.items():
        torch.testing.assert_close(piper[name], want, rtol=1e-5, atol=1e-5, msg=name)
        moved += name != "loss" and not torch.equal(want, model.get_parameter(name))
    assert moved > 0.8 * len(eager)


@by_layout
def test_reloaded_model_equals_eager(family: str, tmp_path: Path) -> None:
    model = tiny_model(family)
    model.save_pretrained(tmp_path)
    reloaded = type(model).from_pretrained(tmp_path, experts_implementation="piper").eval()
    assert {m.config._experts_implementation for m in experts_modules(reloaded)} == {"piper"}
    with torch.no_grad():
        want = first_output(model(input_ids=token_ids()))
        have = first_output(reloaded(input_ids=token_ids()))
    torch.testing.assert_close(have, want, rtol=1e-5, atol=1e-5)
    # the choice is not part of the checkpoint
    assert "piper" not in (tmp_path / "config.json").read_text()


@by_causal_layout
def test_generate_with_a_left_padded_batch_equals_eager(family: str) -> None:
    # the prompt is one call with T = 3 * 7 tokens, each new token one with T = 3
    model = tiny_model(family)
    ids = token_ids(3, 7)
    mask = torch.ones_like(ids)
    mask[1, :3] = 0
    mask[2, :6] = 0
    ids = ids.masked_fill(mask == 0, 0)
    made = {}
    for experts in ("eager", "piper"):
        model.set_experts_implementation(experts)
        options = {"max_new_tokens": 6, "do_sample": False, "pad_token_id": 0}
        made[experts] = model.generate(ids, attention_mask=mask, **options)
        assert model.get_experts_implementation()[""] == experts
    assert made["eager"].shape == (3, 13)
    assert torch.equal(made["piper"], made["eager"])


def test_generate_one_token_at_a_time() -> None:
    # T = 1 in every call but the first
    model = tiny_model("mixtral", experts="piper")
    ids = token_ids(1, 1)
    cached = model.generate(ids, max_new_tokens=8, do_sample=False, pad_token_id=0)
    with torch.no_grad():
        logits = model(cached[:, :-1]).logits
    assert torch.equal(logits.argmax(-1), cached[:, 1:])


@by_layout
@pytest.mark.parametrize("use_reentrant", [False, True], ids=["non-reentrant", "reentrant"])
def test_gradient_checkpointing_changes_no_gradient(family: str, use_reentrant: bool) -> None:
    model = tiny_model(family).train()
    if not model.supports_gradient_checkpointing:
        pytest.skip(f"transformers' {family} has no gradient checkpointing")
    plain = run_step(model, "piper")
    model.activation_checkpointing_enable({"use_reentrant": use_reentrant})
    model.enable_input_require_grads()
    assert_steps_close(run_step(model, "piper"), plain, 1e-6)


# torch's own: dynamo looks at things that warn when they are looked at
quiet_dynamo = pytest.mark.filterwarnings(
    "ignore:The .grad attribute of a Tensor:UserWarning",
    "ignore:.*Function'> should not be instantiated:DeprecationWarning",
)


@quiet_dynamo
@pytest.mark.parametrize(
    "family",
    [
        "mixtral",
        *(pytest.param(f, marks=pytest.mark.slow) for f in ("gpt_oss", "aria", "nemotron_h")),
    ],
)
def test_compiled_model_equals_eager(family: str) -> None:
    model = tiny_model(family, num_hidden_layers=1) if family == "mixtral" else tiny_model(family)
    eager = run_step(model, "eager")
    compiled = copy.deepcopy(model)
    compiled.forward = torch.compile(compiled.forward, backend="aot_eager")
    assert_steps_close(run_step(compiled, "piper"), eager, 1e-5)


@quiet_dynamo
def test_compiled_model_has_one_graph() -> None:
    model = tiny_model("mixtral", experts="piper", num_hidden_layers=1)
    compiled = torch.compile(model, backend="eager", fullgraph=True)
    with torch.no_grad():
        torch.testing.assert_close(compiled(token_ids()).logits, model(token_ids()).logits)


def test_half_precision_model_is_as_good_as_eager() -> None:
    model = tiny_model("mixtral", dtype=torch.bfloat16, num_hidden_layers=1)
    steps: dict[str, ModelStep] = {e: run_step(model, e) for e in ("piper", "eager")}
    truth = run_step(model.float(), "eager")
    pairs = [("output", s.output) for s in steps.values()]
    assert all(output.dtype == torch.bfloat16 for _, output in pairs)
    assert_close_to_baseline("logits", steps["piper"].output, steps["eager"].output, truth.output)
    for name, want in truth.grads.items():
        ours, baseline = steps["piper"].grads[name], steps["eager"].grads[name]
        assert ours is not None
        assert baseline is not None
        assert want is not None
        assert_close_to_baseline(name, ours, baseline, want)


@pytest.mark.parametrize("family", ["mixtral", "gpt_oss"])
def test_model_under_autocast_is_as_good_as_eager(family: str) -> None:
    model = tiny_model(family).train()
    truth = run_step(model, "eager").output
    with torch.autocast("cpu", torch.bfloat16):
        eager, piper = run_step(model, "eager"), run_step(model, "piper")
    assert piper.output.dtype == eager.output.dtype
    for name, grad in piper.grads.items():
        assert grad is not None, name
        assert grad.dtype == torch.float32
    # a norm over all tokens: some of them change experts, in either mode
    allowed = 1.5 * (eager.output.float() - truth).norm()
    assert (piper.output.float() - truth).norm() <= allowed


# -- frozen parts: field report A57 ---------------------------------------------------------------


@pytest.mark.parametrize("frozen", ["experts", "gate.weight", "down_proj"])
def test_frozen_parameters_get_no_gradient_and_change_no_other(frozen: str) -> None:
    model = tiny_model("mixtral").train()
    everything = run_step(model, "eager")
    names = [name for name, _ in model.named_parameters() if frozen in name]
    assert names
    for name in names:
        model.get_parameter(name).requires_grad_(False)
    step = run_step(model, "piper")
    assert all(step.grads[name] is None for name in names)
    expected = {n: None if n in names else g for n, g in everything.grads.items()}
    assert_steps_close(step, ModelStep(output=everything.output, grads=expected), 1e-5)


# -- models with sub-models -----------------------------------------------------------------------


def test_experts_implementation_of_one_sub_config() -> None:
    model = tiny_vision_language_model()
    ids = token_ids()
    model.set_experts_implementation("eager")
    with torch.no_grad():
        want = model(input_ids=ids).logits
        model.set_experts_implementation({"text_config": "piper"})
        assert model.get_experts_implementation()["text_config"] == "piper"
        assert {m.config._experts_implementation for m in experts_modules(model)} == {"piper"}
        torch.testing.assert_close(model(input_ids=ids).logits, want, rtol=1e-5, atol=1e-5)
        model.set_experts_implementation({"text_config": "eager"})
        assert torch.equal(model(input_ids=ids).logits, want)
