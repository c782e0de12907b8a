"""Sizes of layers: weights and FLOPs that can be counted by hand."""

import pytest

from piper_kernels.errors import ConfigError
from piper_kernels.pipeline.layer_work import AttentionWork, LayerWork, ModelWork

ATTENTION = AttentionWork(
    num_heads=4, qk_dim=8, v_dim=6, projections=((16, 32), (24, 16)), whole_projections=((16, 5),)
)
LAYER = LayerWork(
    hidden_size=16, attention=ATTENTION, dense_size=12, num_experts=8, top_k=2, expert_size=10
)


def test_layer_work_counts_weights() -> None:
    assert ATTENTION.num_parameters == 512 + 384 + 80
    assert LAYER.expert_parameters == 3 * 160
    assert LAYER.dense_parameters == 976 + 3 * 192 + 128
    assert LAYER.active_parameters == LAYER.dense_parameters + 960


def test_model_flops_do_not_count_experts_that_rest() -> None:
    # field report A88: compute is of active, memory of total weights
    one = ModelWork(name="m", digest="d", layers=(LAYER,) * 2, hidden_size=16, vocab_size=50)
    weights = 2 * LAYER.active_parameters + 800
    assert one.model_flops(3, 10) == 3 * (6 * weights + 3 * 2 * 10 * 4 * 14)
    assert one.num_experts == 8


@pytest.mark.parametrize(
    ("changes", "match"),
    [
        ({"top_k": 9}, r"top_k must be in 1 \.\. 8, the experts, got 9"),
        ({"top_k": 0}, "top_k must be in"),
        ({"num_matrices": 4}, "num_matrices must be 2 or 3, got 4"),
        ({"expert_size": 0}, "expert_size must be above 0 exactly with experts"),
        ({"dense_size": -1}, "dense_size must be >= 0, got -1"),
    ],
)
def test_layer_work_refuses_impossible_sizes(changes: dict[str, int], match: str) -> None:
    fields = {"num_experts": 8, "top_k": 2, "expert_size": 10}
    with pytest.raises(ConfigError, match=match):
        LayerWork(hidden_size=16, attention=ATTENTION, **{**fields, **changes})
