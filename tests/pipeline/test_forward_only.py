"""Stages hand on in order, whoever has them."""

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

from piper_kernels.pipeline.forward_only import forward_only
from piper_kernels.testing import run_ranks


class AddIndex(nn.Module):
    """Appends its number, as a digit."""

    def __init__(self, index: int) -> None:
        super().__init__()
        self.index = index

    def forward(self, inputs: Tensor, mask: Tensor | None = None) -> Tensor:
        offset = 0 if mask is None else 0.5
        return 10.0 * inputs + self.index + offset


def trace(owners: tuple[int, ...]) -> dict[int, float]:
    rank = dist.get_rank()
    modules: dict[int, nn.Module] = {i: AddIndex(i) for i, o in enumerate(owners) if o == rank}
    tokens = torch.full((1, 1), 9.0)
    found: dict[int, float] = {}
    assert dist.group.WORLD is not None
    forward_only(
        modules,
        owners,
        [(tokens, None), (tokens + 1, torch.ones(1, 1))],
        hidden=tokens,
        group=dist.group.WORLD,
        take=lambda number, logits: found.update({number: float(logits)}),
    )
    return found


@pytest.mark.parametrize(
    ("owners", "last"), [((0, 1), 1), ((0, 1, 0, 1), 1), ((0, 1, 1, 0), 0)], ids=str
)
def test_stages_run_in_order(owners: tuple[int, ...], last: int) -> None:
    found = run_ranks(trace, 2, owners)
    plain, masked = 9.0, 10.0
    for index in range(len(owners)):
        plain, masked = 10 * plain + index, 10 * masked + index + 0.5
    assert found[last] == {0: plain, 1: masked}
    assert found[1 - last] == {}
