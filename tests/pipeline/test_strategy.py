"""Strategies count like the plans they become."""

import pytest

from piper_kernels.errors import ConfigError
from piper_kernels.pipeline.plan import Exchange
from piper_kernels.pipeline.strategy import Strategy

STRATEGY = Strategy(
    pp=4, dp=2, ep=8, tp=2, num_microbatches=8, seq_len=4096, layers_per_stage=(2, 3, 3, 2)
)


def test_strategy_becomes_a_plan() -> None:
    plan = STRATEGY.to_plan("0" * 32, Exchange(algorithm="halo"))
    assert plan.world_size == STRATEGY.world_size == 128
    assert plan.tokens_per_step == STRATEGY.tokens_per_step == 8 * 16 * 4096
    assert plan.mesh.stage_width == STRATEGY.stage_width
    assert plan.layers_per_stage == (2, 3, 3, 2)
    assert STRATEGY.name == "pp 4, dp 2, ep 8, tp 2, 1f1b, 8 x 1, none"


def test_strategy_actions_have_its_stages() -> None:
    three = Strategy(
        pp=2, schedule="interleaved_1f1b", num_microbatches=2, seq_len=1, layers_per_stage=(1,) * 6
    )
    assert three.actions.num_stages == 6


def test_strategy_that_contradicts_itself_is_no_plan() -> None:
    few = Strategy(pp=4, num_microbatches=2, seq_len=1, layers_per_stage=(1, 1, 1, 1))
    with pytest.raises(ConfigError, match="2 < 4"):
        few.to_plan("0" * 32, Exchange())
