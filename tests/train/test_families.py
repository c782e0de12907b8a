from collections.abc import Callable

import pytest

from piper_kernels.huggingface.expert_counts import expert_modules
from piper_kernels.train.families import FAMILIES
from piper_kernels.train.loop import Trainer


@pytest.mark.parametrize("family", sorted(FAMILIES))
def test_every_family_trains_with_piper_experts(
    make_trainer: Callable[..., Trainer], family: str
) -> None:
    trainer = make_trainer(model=family, model_override={}, batch_size=2)
    first, *_, last = [trainer.train_step() for _ in range(4)]
    assert last.loss < first.loss
    # every layer with experts routed top_k = 2 rows per token
    assert len(first.expert_counts) == len(expert_modules(trainer.model)) >= 2
    assert [sum(row) for row in first.expert_counts] == [2 * 2 * 16] * len(first.expert_counts)
    # these balance by a bias, without a loss
    has_bias = family in {"deepseek_v3", "ernie4_5_moe", "glm4_moe", "minimax_m2", "nemotron_h"}
    assert (first.balance_loss is None) == has_bias
    assert bool(trainer.correction_biases) == has_bias
    assert all(bool(bias.any()) for bias in trainer.correction_biases)


def test_families_share_one_size() -> None:
    for entries in FAMILIES.values():
        assert (entries["hidden_size"], entries["num_hidden_layers"]) == (128, 4)
