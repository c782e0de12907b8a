"""The LoRA bench checks its adapter, then prints time and peak of both variants."""

import re

import pytest
import torch

from bench.lora_cost import Layer, adapt, check, main, make_parser

SIZES = {"tokens": 6, "hidden": 16, "intermediate": 8, "experts": 4, "rank": 2, "rounds": 2}
TINY = [word for name, size in SIZES.items() for word in (f"--{name}", str(size))]


def test_main_prints_both_variants(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(TINY) == 0
    lines = capsys.readouterr().out.splitlines()
    # three matrices of 16 x 8 for each of 4 experts, fp32
    assert any("expert weights 0.0 MiB" in line for line in lines)
    form = r"(frozen experts|with LoRA) +[\d.]+ ms \(p20 [\d.]+, p80 [\d.]+\) +peak +[\d.]+ MiB = "
    found = [match.group(1) for line in lines if (match := re.match(form, line))]
    assert found == ["frozen experts", "with LoRA"]
    ratios = [float(line.split(" = ")[1].split()[0]) for line in lines if " = " in line]
    # PEFT makes the adapted weight of all experts at each call; a frozen layer makes none
    assert ratios[1] > ratios[0] + 1.0


def test_check_refuses_a_wrong_adapter() -> None:
    torch.manual_seed(0)
    arguments = make_parser().parse_args(TINY)
    layer = Layer(arguments)
    adapted = adapt(layer, arguments.rank)
    gates, expert_ids = torch.rand(6, 4).softmax(-1).topk(2)
    inputs = (torch.randn(6, 16), expert_ids, gates)
    check(layer, adapted, inputs)
    with pytest.raises(AssertionError, match="not close"):
        check(Layer(arguments), adapted, inputs)
