"""A loss that rides on a tensor."""

import torch

from piper_kernels.pipeline.aux_loss import add_loss


def test_add_loss_leaves_the_value_and_adds_the_gradient() -> None:
    x = torch.randn(3, 4, dtype=torch.float64, requires_grad=True)
    w = torch.randn(4, dtype=torch.float64, requires_grad=True)
    seed = torch.randn(3, dtype=torch.float64)

    def losses() -> tuple[torch.Tensor, torch.Tensor]:
        return x.sin() @ w, (x * w).square().sum()

    output, loss = losses()
    carried = add_loss(output, 0.5 * loss)
    assert torch.equal(carried, output)
    assert not carried._is_view()
    found = torch.autograd.grad(carried, (x, w), seed)
    output, loss = losses()
    want = torch.autograd.grad((output * seed).sum() + 0.5 * loss, (x, w))
    for ours, theirs in zip(found, want, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-12, atol=0)


def test_add_loss_of_another_dtype_than_the_output() -> None:
    x = torch.ones(2, dtype=torch.bfloat16, requires_grad=True)
    add_loss(x * 2, (x.float() * 3).sum()).backward(torch.ones(2, dtype=torch.bfloat16))
    assert x.grad is not None
    assert x.grad.tolist() == [5.0, 5.0]
