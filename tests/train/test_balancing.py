from collections.abc import Callable

import pytest
import torch

from piper_kernels.huggingface.balancing import (
    correction_biases,
    mean_balance_loss,
    update_correction_biases,
)
from piper_kernels.huggingface.expert_counts import ExpertCounter
from piper_kernels.train.model import build_model, forward_logits
from piper_kernels.train.settings import TrainSettings

Make = Callable[..., TrainSettings]
CPU = torch.device("cpu")


def test_mean_balance_loss_does_not_let_layers_cancel(tiny_settings: Make) -> None:
    model = build_model(tiny_settings(), 256, CPU)
    counter = ExpertCounter(model)
    with counter.counting():
        _, router_logits = forward_logits(
            model, torch.randint(0, 256, (2, 16)), wants_router_logits=True
        )
    assert router_logits is not None
    wanted = []
    for logits in router_logits:
        counts = logits.topk(2).indices.flatten().bincount(minlength=4)
        wanted.append(4 * (counts / len(logits) * logits.softmax(-1).mean(0)).sum())
    loss = mean_balance_loss(router_logits, counter)
    torch.testing.assert_close(loss, (wanted[0] + wanted[1]) / 2)
    # two layers that always choose the same pair, each another one: pooled, they would look even
    first, second = torch.tensor([9.0, 9.0, 0.0, 0.0]), torch.tensor([0.0, 0.0, 9.0, 9.0])
    counter.routed = {
        0: (torch.tensor([[0, 1]] * 8), torch.ones(8, 2)),
        1: (torch.tensor([[2, 3]] * 8), torch.ones(8, 2)),
    }
    unbalanced = mean_balance_loss([first.expand(8, 4), second.expand(8, 4)], counter)
    assert float(unbalanced) == pytest.approx(4.0, rel=1e-3)


@pytest.mark.parametrize("family", ["deepseek_v3", "minimax_m2", "ernie4_5_moe", "nemotron_h"])
def test_update_correction_biases_favours_idle_experts(tiny_settings: Make, family: str) -> None:
    model = build_model(tiny_settings(model=family, model_override={}), 256, CPU)
    counter = ExpertCounter(model)
    counter.counts.copy_(torch.arange(8).expand_as(counter.counts))
    found = correction_biases(model)
    assert [tuple(bias.shape) for bias in found] == [(8,)] * len(counter.layers)
    update_correction_biases(found, counter, 0.5)
    # the mean is 3.5
    wanted = torch.tensor([0.5] * 4 + [-0.5] * 4)
    tensors = [*model.named_buffers(), *model.named_parameters()]
    biases = [tensor for name, tensor in tensors if name.endswith("e_score_correction_bias")]
    assert len(biases) == len(counter.layers)
    for bias in biases:
        assert torch.equal(bias.flatten(), wanted)


def test_correction_biases_are_none_where_a_model_has_none(tiny_settings: Make) -> None:
    assert correction_biases(build_model(tiny_settings(), 256, CPU)) == []
