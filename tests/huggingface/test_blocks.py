import copy
import pickle
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor, nn
from transformers.activations import ACT2FN

from piper_kernels.errors import ConfigError
from piper_kernels.huggingface import (
    FAMILIES,
    replace_moe_blocks,
    restore_moe_blocks,
)
from piper_kernels.huggingface.block import HuggingFaceMoE
from piper_kernels.huggingface.families import find_family
from piper_kernels.moe import PiperMoE
from piper_kernels.testing.model_steps import assert_steps_close, run_step, token_ids
from piper_kernels.testing.tiny_models import experts_modules, first_output, tiny_model

FAMILY_NAMES = sorted(key.split(".")[2] for key in FAMILIES)
REQUIRED = {"mixtral", "qwen2_moe", "qwen3_moe", "olmoe", "deepseek_v3", "gpt_oss"}
by_family = pytest.mark.parametrize("family", FAMILY_NAMES)


def blocks_of(model: nn.Module) -> list[Any]:
    return [module for module in model.modules() if find_family(module) is not None]


def layers_of(model: nn.Module) -> list[Any]:
    return [module for module in model.modules() if isinstance(module, PiperMoE)]


def logits(model: Any, **inputs: Any) -> Tensor:
    with torch.no_grad():
        return first_output(model(**(inputs or {"input_ids": token_ids()})))


def test_the_table_covers_what_was_promised() -> None:
    assert set(FAMILY_NAMES) >= REQUIRED


@by_family
def test_replace_moe_blocks_changes_nothing_but_the_blocks(family: str) -> None:
    model = tiny_model(family)
    eager, piper = run_step(model, "eager"), run_step(model, "piper")
    model.set_experts_implementation("eager")
    parameters = dict(model.named_parameters())
    state = list(model.state_dict())
    originals = dict(model.named_modules())
    names = replace_moe_blocks(model)
    assert len(names) == len(experts_modules(model)) == len(layers_of(model)) > 0
    assert all(isinstance(model.get_submodule(name), PiperMoE) for name in names)
    # parameters are the same objects under the same names in the same order
    assert [(n, id(p)) for n, p in model.named_parameters()] == [
        (n, id(p)) for n, p in parameters.items()
    ]
    assert list(model.state_dict()) == state
    step = run_step(model, "eager")
    assert_steps_close(step, eager, 1e-5)
    # not only close: the very numbers of experts_implementation="piper"
    assert torch.equal(step.output, piper.output)
    assert restore_moe_blocks(model) == names
    assert [(n, id(m)) for n, m in model.named_modules()] == [
        (n, id(m)) for n, m in originals.items()
    ]
    assert torch.equal(logits(model), eager.output)
    assert list(model.state_dict()) == state


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float64])
@pytest.mark.parametrize("family", ["mixtral", "qwen2_moe", "deepseek_v3", "gpt_oss"])
def test_replace_moe_blocks_keeps_the_router_of_any_dtype(family: str, dtype: torch.dtype) -> None:
    # a bf16 model goes on choosing as it was trained to
    model = tiny_model(family, experts="piper", dtype=dtype)
    before = logits(model)
    replace_moe_blocks(model)
    assert before.dtype == dtype
    assert torch.equal(logits(model), before)


@pytest.mark.parametrize("is_fused", [False, True])
@pytest.mark.parametrize("family", sorted(REQUIRED))
def test_replaced_model_is_saved_with_the_keys_of_transformers(
    family: str, is_fused: bool, tmp_path: Path
) -> None:
    model = tiny_model(family)
    model.save_pretrained(tmp_path / "theirs", save_original_format=not is_fused)
    replace_moe_blocks(model)
    model.save_pretrained(tmp_path / "ours", save_original_format=not is_fused)
    theirs = load_file(tmp_path / "theirs" / "model.safetensors")
    ours = load_file(tmp_path / "ours" / "model.safetensors")
    assert list(ours) == list(theirs)
    assert all(torch.equal(ours[key], tensor) for key, tensor in theirs.items())
    reloaded = type(model).from_pretrained(tmp_path / "ours").eval()
    torch.testing.assert_close(logits(reloaded), logits(model), rtol=1e-5, atol=1e-5)
    replace_moe_blocks(reloaded)
    # not bit for bit: files are mapped into memory, where weights are aligned otherwise
    torch.testing.assert_close(logits(reloaded), logits(model), rtol=1e-6, atol=1e-6)


def test_replaced_model_loads_a_state_dict_of_transformers() -> None:
    theirs = tiny_model("qwen2_moe")
    ours = tiny_model("qwen2_moe")
    with torch.no_grad():
        for parameter in ours.parameters():
            parameter.mul_(1.5)
    replace_moe_blocks(ours)
    assert not torch.equal(logits(ours), logits(theirs))
    ours.load_state_dict(theirs.state_dict(), strict=True)
    torch.testing.assert_close(logits(ours), logits(theirs), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("family", sorted(REQUIRED))
def test_an_optimizer_made_before_still_trains_every_parameter(family: str) -> None:
    model = tiny_model(family).train()
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    expected = copy.deepcopy(model)
    replace_moe_blocks(model)
    ids = token_ids(3, 9)
    model(input_ids=ids, labels=ids).loss.backward()
    optimizer.step()
    theirs = torch.optim.SGD(expected.parameters(), lr=1.0)
    expected.set_experts_implementation("piper")
    expected(input_ids=ids, labels=ids).loss.backward()
    before = copy.deepcopy(expected.state_dict())
    theirs.step()
    restore_moe_blocks(model)
    for name, parameter in expected.named_parameters():
        ours = model.get_parameter(name)
        torch.testing.assert_close(ours, parameter, rtol=1e-6, atol=1e-6, msg=name)
        assert not torch.equal(parameter, before[name]), name


@pytest.mark.parametrize("family", ["mixtral", "deepseek_v3", "gpt_oss"])
def test_replaced_model_can_be_copied_and_pickled(family: str) -> None:
    model = tiny_model(family)
    eager = logits(model)
    replace_moe_blocks(model)
    before = logits(model)
    for other in (copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
        assert torch.equal(logits(other), before)
        # the copy is independent, and whole: its own blocks come back
        with torch.no_grad():
            layers_of(other)[0].experts.down_proj.zero_()
        assert not torch.equal(logits(other), before)
        assert torch.equal(logits(model), before)
        with torch.no_grad():
            other.load_state_dict(model.state_dict())
        restore_moe_blocks(other)
        assert not layers_of(other)
        assert torch.equal(logits(other), eager)


def test_replace_moe_blocks_twice_does_nothing_more() -> None:
    model = tiny_model("mixtral")
    assert replace_moe_blocks(model) == ["model.layers.0.mlp", "model.layers.1.mlp"]
    assert replace_moe_blocks(model) == []
    assert restore_moe_blocks(model) == ["model.layers.0.mlp", "model.layers.1.mlp"]
    assert restore_moe_blocks(model) == []


def test_replace_moe_blocks_at_two_places_of_one_block() -> None:
    block = blocks_of(tiny_model("mixtral"))[0]
    twice = nn.ModuleList([block, block])
    assert replace_moe_blocks(twice) == ["0", "1"]
    assert twice[0] is twice[1]
    assert restore_moe_blocks(twice) == ["0", "1"]
    assert twice[0] is twice[1] is block


@pytest.mark.parametrize(
    ("family", "block"),
    [
        ("phimoe", "PhimoeSparseMoeBlock"),
        ("granitemoe", "GraniteMoeMoE"),
        ("nemotron_h", "NemotronHMoE"),
        ("deepseek_v4", "DeepseekV4SparseMoeBlock"),
    ],
)
def test_replace_moe_blocks_names_an_unsupported_block(family: str, block: str) -> None:
    model = tiny_model(family)
    before = list(model.modules())
    with pytest.raises(ConfigError, match=f"got {block} at '") as caught:
        replace_moe_blocks(model)
    assert "MixtralSparseMoeBlock" in str(caught.value)
    assert 'experts_implementation="piper" instead' in str(caught.value)
    assert list(model.modules()) == before


def test_replace_moe_blocks_leaves_a_mixed_model_unchanged() -> None:
    both = nn.ModuleDict({"a": tiny_model("mixtral"), "b": tiny_model("phimoe")})
    with pytest.raises(ConfigError, match=r"PhimoeSparseMoeBlock at 'b\.model\.layers\.0"):
        replace_moe_blocks(both)
    assert not layers_of(both)


def test_replace_moe_blocks_refuses_what_has_no_block() -> None:
    with pytest.raises(ConfigError, match=r"contain one of .*got no such block in Linear"):
        replace_moe_blocks(nn.Linear(2, 2))
    block = blocks_of(tiny_model("mixtral"))[0]
    with pytest.raises(ConfigError, match="be more than an MoE block"):
        replace_moe_blocks(block)


def test_replace_moe_blocks_refuses_an_activation_without_a_name() -> None:
    model = tiny_model("mixtral", hidden_act="mish")
    with pytest.raises(ConfigError, match=r"got MishActivation\. Select experts_implementation"):
        replace_moe_blocks(model)
    assert not layers_of(model)
    # but the experts function runs it
    assert_steps_close(run_step(model, "piper"), run_step(model, "eager"), 1e-5)
    assert ACT2FN["mish"] is not None


# -- what a replaced block can do -----------------------------------------------------------------


@by_family
def test_replaced_block_returns_stats(family: str) -> None:
    model = tiny_model(family)
    block = blocks_of(model)[0]
    x = torch.randn(2, 5, 32)
    with torch.no_grad():
        want = block(x)
    replace_moe_blocks(model)
    moe = layers_of(model)[0]
    y, stats = moe(x, return_stats=True)
    plain = moe(x)
    if family == "gpt_oss":
        # the block's own form: y and the gates
        plain, scores = plain
        want, wanted_scores = want
        torch.testing.assert_close(scores, wanted_scores)
    assert torch.equal(plain, y)
    torch.testing.assert_close(y, want, rtol=1e-5, atol=1e-5)
    assert stats.routing.expert_ids.shape == (10, 2)
    assert int(stats.expert_counts.sum()) == 20
    assert stats.balance_loss.detach().item() > 0
    # raw logits, as the router computes them
    torch.testing.assert_close(stats.routing.logits, moe.router.module(x.reshape(10, 32))[0])
    # replaying the choices gives the same numbers
    again, _ = moe(x, routing=stats.routing, return_stats=True)
    assert torch.equal(again, y)


@pytest.mark.parametrize("family", ["mixtral", "qwen2_moe", "gpt_oss"])
def test_replaced_block_honours_a_mask(family: str) -> None:
    model = tiny_model(family)
    replace_moe_blocks(model)
    moe = layers_of(model)[0]
    x = torch.randn(2, 5, 32)
    mask = torch.tensor([[1, 1, 1, 1, 1], [0, 0, 0, 1, 1]])
    dirty = torch.where(mask[..., None] != 0, x, torch.full_like(x, 1e4)).requires_grad_()
    y, stats = moe(dirty, mask=mask, return_stats=True)
    clean, expected = moe(x.reshape(10, 32)[mask.reshape(-1) != 0], return_stats=True)
    torch.testing.assert_close(y[mask != 0], clean)
    assert torch.equal(stats.expert_counts, expected.expert_counts)
    torch.testing.assert_close(stats.balance_loss, expected.balance_loss)
    (grad,) = torch.autograd.grad(stats.balance_loss + stats.z_loss, dirty)
    assert not grad[mask == 0].any()


@pytest.mark.parametrize("family", ["mixtral", "deepseek_v3", "gpt_oss"])
def test_padding_that_is_nan_reaches_no_parameter(family: str) -> None:
    model = tiny_model(family)
    replace_moe_blocks(model)
    moe = layers_of(model)[0]
    mask = torch.tensor([1, 1, 0, 1, 0])
    x = torch.randn(5, 32)
    x[mask == 0] = torch.nan
    y, stats = moe(x, mask=mask, return_stats=True)
    (y[mask != 0].sum() + stats.balance_loss + stats.z_loss).backward()
    for parameter in (*moe.router.parameters(), *moe.experts.parameters()):
        assert parameter.grad is not None
        assert parameter.grad.isfinite().all()


def test_replaced_block_keeps_its_hooks() -> None:
    model = tiny_model("mixtral")
    calls: list[str] = []
    handle = model.model.layers[0].mlp.register_forward_hook(lambda *_: calls.append("before"))
    replace_moe_blocks(model)
    late = model.model.layers[0].mlp.register_forward_hook(lambda *_: calls.append("after"))
    logits(model)
    assert calls == ["before", "after"]
    restore_moe_blocks(model)
    handle.remove()
    logits(model)
    assert calls == ["before", "after", "after"]
    late.remove()
    logits(model)
    assert len(calls) == 3


def test_replaced_experts_run_piper_whatever_is_selected() -> None:
    model = tiny_model("mixtral")
    eager = logits(model)
    replace_moe_blocks(model)
    replaced = logits(model)
    assert model.get_experts_implementation() == {"": "eager"}
    model.set_experts_implementation("grouped_mm")
    assert torch.equal(logits(model), replaced)
    model.set_experts_implementation("eager")
    restore_moe_blocks(model)
    assert torch.equal(logits(model), eager)


def test_replaced_block_follows_train_and_dtype() -> None:
    model = tiny_model("qwen2_moe").train()
    replace_moe_blocks(model)
    assert layers_of(model)[0].training
    model.eval().double()
    assert layers_of(model)[0].experts.down_proj.dtype == torch.float64
    restore_moe_blocks(model)
    assert not any(block.training for block in blocks_of(model))
    assert all(p.dtype == torch.float64 for p in model.parameters())


def test_replaced_block_applies_jitter_to_the_router_only() -> None:
    # field report A36; transformers' Mixtral hands the noisy input to the experts too, in place
    model = tiny_model("mixtral", router_jitter_noise=0.1).train()
    block = blocks_of(model)[0]
    with torch.no_grad():
        block.gate.weight.zero_()
        block.gate.weight[:, 0] = torch.arange(8.0, 0.0, -1.0) * 50
    replace_moe_blocks(model)
    moe = layers_of(model)[0]
    # expert 0, then 1, whatever the noise
    x = torch.rand(4, 32) + 1.0
    before = x.clone()
    _, stats = moe(x, return_stats=True)
    assert torch.equal(x, before)
    assert torch.equal(stats.routing.expert_ids, torch.tensor([[0, 1]]).expand(4, 2))
    noisy, _ = moe(x, routing=stats.routing, return_stats=True)
    moe.eval()
    quiet, _ = moe(x, routing=stats.routing, return_stats=True)
    assert torch.equal(noisy, quiet)
    assert moe.config.router.jitter == 0.1
    assert torch.equal(moe.route(x).logits, moe.route(x).logits)
    moe.train()
    assert not torch.equal(moe.route(x).logits, moe.route(x).logits)


@pytest.mark.parametrize("family", ["mixtral", "gpt_oss"])
def test_replaced_block_explains_itself(family: str) -> None:
    model = tiny_model(family)
    replace_moe_blocks(model)
    moe = layers_of(model)[0]
    explanation = moe.explain(1000)
    assert (explanation.backend, explanation.path) == ("cpu", "fused")
    assert explanation.saved_bytes > 1000 * 32 * 4
    assert moe.explain(torch.zeros(2, 500, 32)) == explanation


def test_reset_parameters_is_refused() -> None:
    model = tiny_model("mixtral")
    replace_moe_blocks(model)
    with pytest.raises(NotImplementedError, match=r"model\.init_weights\(\)"):
        layers_of(model)[0].reset_parameters()


@pytest.mark.parametrize("use_reentrant", [False, True])
def test_replaced_model_with_gradient_checkpointing(use_reentrant: bool) -> None:
    model = tiny_model("gpt_oss").train()
    replace_moe_blocks(model)
    plain = run_step(model, "piper")
    model.activation_checkpointing_enable({"use_reentrant": use_reentrant})
    model.enable_input_require_grads()
    assert_steps_close(run_step(model, "piper"), plain, 1e-6)


def test_replaced_model_generates() -> None:
    model = tiny_model("qwen2_moe")
    options = {"max_new_tokens": 5, "do_sample": False, "pad_token_id": 0}
    want = model.generate(token_ids(), **options)
    replace_moe_blocks(model)
    assert torch.equal(model.generate(token_ids(), **options), want)


@pytest.mark.filterwarnings(
    "ignore:The .grad attribute of a Tensor:UserWarning",
    "ignore:.*Function'> should not be instantiated:DeprecationWarning",
)
@pytest.mark.parametrize("family", ["qwen2_moe", pytest.param("gpt_oss", marks=pytest.mark.slow)])
def test_replaced_block_compiles_to_one_graph(family: str) -> None:
    model = tiny_model(family)
    replace_moe_blocks(model)
    moe = layers_of(model)[0]
    x = torch.randn(2, 5, 32)
    want = moe(x, return_stats=True)[0]
    have = torch.compile(moe, backend="eager", fullgraph=True)(x)
    torch.testing.assert_close(have[0] if family == "gpt_oss" else have, want)


# -- the selection bias: field report A55 ---------------------------------------------------------


def test_correction_bias_survives_export(tmp_path: Path) -> None:
    model = tiny_model("deepseek_v3").train()
    replace_moe_blocks(model)
    (moe,) = layers_of(model)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    x = torch.randn(30, 32)
    seen: list[Any] = []
    moe.register_forward_hook(lambda module, args, output: seen.append(args[0].detach()))
    for step in range(5):
        ids = token_ids(2, 7, seed=step)
        optimizer.zero_grad()
        model(input_ids=ids, labels=ids).loss.backward()
        optimizer.step()
        _, stats = moe(seen[-1], return_stats=True)
        moe.router.update_correction_bias(stats.expert_counts, speed=0.05)
    bias = moe.router.correction_bias.clone()
    assert bias.any()
    expert_ids = moe.route(x).expert_ids
    model.save_pretrained(tmp_path)
    theirs = type(model).from_pretrained(tmp_path)
    gate = blocks_of(theirs)[0].gate
    assert torch.equal(gate.e_score_correction_bias, bias)
    assert torch.equal(gate(x)[2], expert_ids)
    replace_moe_blocks(theirs)
    assert torch.equal(layers_of(theirs)[0].route(x).expert_ids, expert_ids)
    # the bias matters to the choice, and a fresh model takes the state strictly
    fresh = tiny_model("deepseek_v3")
    assert not torch.equal(blocks_of(fresh)[0].gate(x)[2], expert_ids)
    fresh.load_state_dict(model.state_dict(), strict=True)
    assert torch.equal(blocks_of(fresh)[0].gate(x)[2], expert_ids)


def test_update_correction_bias_without_one_is_an_error() -> None:
    model = tiny_model("mixtral")
    replace_moe_blocks(model)
    moe = layers_of(model)[0]
    assert moe.router.correction_bias is None
    with pytest.raises(ConfigError, match="correction_bias must exist"):
        moe.router.update_correction_bias(torch.ones(8, dtype=torch.int64))


def test_block_router_shows_the_parameters_of_the_block() -> None:
    model = tiny_model("gpt_oss")
    gate = blocks_of(model)[0].router
    replace_moe_blocks(model)
    moe = layers_of(model)[0]
    assert isinstance(moe, HuggingFaceMoE)
    assert moe.router.weight is gate.weight
    assert moe.router.bias is gate.bias
    assert [id(p) for p in moe.router.parameters()] == [id(p) for p in gate.parameters()]


@pytest.mark.parametrize("family", ["qwen2_moe", "deepseek_v3", "gpt_oss"])
@pytest.mark.parametrize("is_replaced_first", [False, True])
def test_replaced_model_offloaded_by_accelerate(family: str, is_replaced_first: bool) -> None:
    """Offloaded weights lie on meta until their own module is called."""
    accelerate = pytest.importorskip("accelerate")
    model = tiny_model(family).eval()
    model.set_experts_implementation("piper")
    wanted = logits(model)
    if is_replaced_first:
        replace_moe_blocks(model)
    accelerate.cpu_offload(model, execution_device=torch.device("cpu"))
    if not is_replaced_first:
        replace_moe_blocks(model)
    assert all(layer.router.weight.is_meta for layer in layers_of(model))
    assert torch.equal(logits(model), wanted)
    restore_moe_blocks(model)
    assert torch.equal(logits(model), wanted)
