import inspect
import subprocess
import sys
import types
from pathlib import Path

import pytest
from transformers import modeling_utils
from transformers.integrations import moe, use_experts_implementation

from piper_kernels.huggingface import (
    EXPERTS_IMPLEMENTATION,
    register_experts_function,
)
from piper_kernels.huggingface.experts_function import experts_function
from piper_kernels.testing.tiny_models import tiny_model

ROOT = Path(__file__).resolve().parents[2]


def run_python(code: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, cwd=ROOT, timeout=120
    )


def test_import_registers_the_experts_function() -> None:
    assert EXPERTS_IMPLEMENTATION == "piper"
    default = inspect.signature(use_experts_implementation).parameters["experts_interface"].default
    for registry in (moe.ALL_EXPERTS_FUNCTIONS, modeling_utils.ALL_EXPERTS_FUNCTIONS, default):
        assert registry.get_interface("piper", None) is experts_function


def test_register_experts_function_can_be_repeated() -> None:
    before = set(moe.ALL_EXPERTS_FUNCTIONS.keys())
    register_experts_function()
    register_experts_function()
    assert set(moe.ALL_EXPERTS_FUNCTIONS.keys()) == before
    assert {"piper", "grouped_mm", "batched_mm"} <= before


def test_register_experts_function_reaches_a_second_copy_of_the_registry(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    # what a lazy import leaves behind: another module object executed from the same file, whose
    # decorator is held by a model's module
    class SecondInterface(moe.ExpertsInterface):
        _global_mapping = dict.fromkeys(("grouped_mm",), None)

    second = SecondInterface()

    def decorator(experts_class: type, *, experts_interface: SecondInterface = second) -> type:
        return experts_class

    modeling = types.ModuleType("transformers.models.copied.modeling_copied")
    modeling.use_experts_implementation = decorator
    monkeypatch.setitem(sys.modules, modeling.__name__, modeling)
    assert "piper" not in second
    register_experts_function()
    assert second.get_interface("piper", None) is experts_function


@pytest.mark.slow
def test_register_experts_function_reaches_a_reloaded_integration() -> None:
    # in a process of its own: executing the file again defines torch operators anew
    code = """
import importlib, sys, torch
from transformers import MixtralConfig, MixtralForCausalLM  # holds the first copy
first = sys.modules.pop("transformers.integrations.moe")
second = importlib.import_module("transformers.integrations.moe")
assert first is not second
import piper_kernels.huggingface
from piper_kernels.huggingface.experts_function import experts_function
assert first.ALL_EXPERTS_FUNCTIONS["piper"] is experts_function
assert second.ALL_EXPERTS_FUNCTIONS["piper"] is experts_function
config = MixtralConfig(vocab_size=8, hidden_size=8, intermediate_size=8, num_hidden_layers=1,
                       num_attention_heads=1, num_key_value_heads=1, num_local_experts=2)
model = MixtralForCausalLM._from_config(config, experts_implementation="piper")
print(model(torch.tensor([[1, 2]])).logits.shape)
"""
    done = run_python(code)
    assert done.returncode == 0, done.stderr
    assert "torch.Size([1, 2, 8])" in done.stdout


def test_piper_is_selected_and_reported() -> None:
    model = tiny_model("mixtral")
    assert model.get_experts_implementation() == {"": "eager"}
    model.set_experts_implementation("piper")
    assert model.get_experts_implementation() == {"": "piper"}
    with pytest.raises(ValueError, match="not supported"):
        model.set_experts_implementation("pipper")
