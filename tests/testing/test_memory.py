"""The memory helpers measure what they say."""

import pytest
import torch

from piper_kernels.testing.memory import peak_bytes, poison_new_memory, saved_for_backward


def test_saved_for_backward() -> None:
    x, weight = torch.randn(3, 4, requires_grad=True), torch.randn(4, 5, requires_grad=True)
    kept = saved_for_backward(lambda: torch.exp(x @ weight), [weight])
    assert sorted(tensor.shape for tensor in kept) == [(3, 4), (3, 5)]
    assert saved_for_backward(lambda: x + 1) == []


def test_peak_bytes() -> None:
    def run() -> torch.Tensor:
        first = torch.empty(1000, dtype=torch.float64)
        del first
        second = torch.empty(300, dtype=torch.float64)
        return torch.cat([second, torch.empty(200, dtype=torch.float64)])

    assert peak_bytes(run) == 8000
    assert peak_bytes(lambda: None) == 0


def test_poison_new_memory() -> None:
    with poison_new_memory():
        assert torch.empty(3).isnan().all()
        with pytest.raises(ZeroDivisionError), poison_new_memory():
            _ = 1 / 0
        assert torch.are_deterministic_algorithms_enabled()
    assert not torch.are_deterministic_algorithms_enabled()
