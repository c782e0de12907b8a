"""The balance loss of all ranks' tokens."""

import torch
import torch.distributed as dist

from piper_kernels import RouterConfig, balance_loss, route
from piper_kernels.dist import global_balance_loss
from piper_kernels.testing import run_ranks

NUM_TOKENS = (7, 0, 4)


def compare_losses() -> list[float]:
    """Differences of loss and gradient to the joined batch."""
    rank, found = dist.get_rank(), []
    torch.manual_seed(0)
    joined = torch.randn(sum(NUM_TOKENS), 5, dtype=torch.float64)
    mask = torch.rand(len(joined)) < 0.7
    mine = slice(sum(NUM_TOKENS[:rank]), sum(NUM_TOKENS[: rank + 1]))
    for masks in ((None, None), (mask, mask[mine])):
        whole, own = joined.clone().requires_grad_(), joined[mine].clone().requires_grad_()
        want = balance_loss(
            route(whole, 2, RouterConfig(), mask=masks[0]), normalization="per_token"
        )
        want.backward()
        routing = route(own, 2, RouterConfig(), mask=masks[1])
        have = global_balance_loss(routing, normalization="per_token") / dist.get_world_size()
        have.backward()
        total = have.detach().clone()
        dist.all_reduce(total)
        assert own.grad is not None
        assert whole.grad is not None
        difference = (own.grad - whole.grad[mine]).abs()
        found += [abs(total.item() - want.item()), difference.sum().item()]
    return found


def test_global_balance_loss_is_that_of_the_joined_batch() -> None:
    for found in run_ranks(compare_losses, 3):
        assert max(found) < 1e-14
