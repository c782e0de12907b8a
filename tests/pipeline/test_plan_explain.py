"""Every term that the model knows has a formula."""

import pytest

from piper_kernels.pipeline.exchange_time import ExchangePrices
from piper_kernels.pipeline.model_config import load_model
from piper_kernels.pipeline.plan import split_layers
from piper_kernels.pipeline.plan_explain import explain, formula_of
from piper_kernels.pipeline.platform_presets import load_platform
from piper_kernels.pipeline.rank_memory import RankMemory
from piper_kernels.pipeline.step_time import StepModel
from piper_kernels.pipeline.strategy import Strategy


@pytest.mark.parametrize("name", ["deepseek-v3", "gpt-oss-20b", "mixtral-8x7b"])
@pytest.mark.parametrize("checkpointing", ["none", "selective", "full"])
def test_explain_knows_all_terms(name: str, checkpointing) -> None:
    model = load_model(name)
    prices = ExchangePrices(load_platform("frontier"))
    strategy = Strategy(
        pp=4,
        ep=8,
        tp=2,
        num_microbatches=4,
        seq_len=4096,
        checkpointing=checkpointing,
        layers_per_stage=split_layers(model.num_layers, 4),
        experts_save="x",
    )
    steps = StepModel(model, prices)
    text = explain(steps, RankMemory(model, prices), strategy)
    assert text.count("one moe layer") == sum(1 for k in steps.layers.kinds if k.kind == "moe")
    assert f"{steps.predict(strategy).step_s:.4f}" in text
    assert "experts gate_up again" in text
    assert max(map(len, text.splitlines())) <= 100


def test_formula_of_recomputed_terms() -> None:
    assert formula_of("attention again") == "again: " + formula_of("attention")
