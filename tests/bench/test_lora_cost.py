import argparse

import pytest
import torch

from bench import lora_cost

pytestmark = pytest.mark.filterwarnings("ignore:.is_gradient_checkpointing. is dep:FutureWarning")
SMALL = ["--tokens", "16", "--hidden", "16", "--intermediate", "24", "--experts", "4"]


def test_main_prints_both_variants(capsys: pytest.CaptureFixture[str]) -> None:
    lora_cost.main([*SMALL, "--rank", "2", "--rounds", "3"])
    frozen, adapted = capsys.readouterr().out.splitlines()[-2:]
    assert frozen.startswith("frozen experts")
    assert adapted.startswith("with LoRA")
    # weights and their gradient, once each
    assert float(adapted.split()[-3]) > float(frozen.split()[-3]) + 1.5


def test_check_refuses_a_wrong_adapter() -> None:
    sizes = argparse.Namespace(hidden=16, intermediate=24, experts=4)
    layer = lora_cost.Layer(sizes)
    adapted = lora_cost.adapt(layer, 2)
    inputs = (torch.randn(5, 16), torch.randint(0, 4, (5, 2)), torch.rand(5, 2))
    lora_cost.check(layer, adapted, inputs)
    other = lora_cost.Layer(sizes)
    with pytest.raises(AssertionError, match="not close"):
        lora_cost.check(other, adapted, inputs)
