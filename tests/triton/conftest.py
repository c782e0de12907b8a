"""Poisoned memory for every kernel test: fresh tensors hold NaN (floats) or the largest int."""

from collections.abc import Iterator

import pytest
import torch


@pytest.fixture(autouse=True)
def _poison_fresh_tensors() -> Iterator[None]:
    torch.use_deterministic_algorithms(True)
    assert torch.utils.deterministic.fill_uninitialized_memory
    yield
    torch.use_deterministic_algorithms(False)
