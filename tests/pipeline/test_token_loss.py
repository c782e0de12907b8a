"""The sum is that of torch's mean, and ignored targets count nothing."""

import torch
from torch.nn import functional

from piper_kernels.pipeline.token_loss import IGNORED, summed_cross_entropy


def test_sum_over_what_is_not_ignored() -> None:
    logits = torch.randn(2, 5, 7, dtype=torch.float64)
    targets = torch.randint(0, 7, (2, 5))
    targets[0, :3] = IGNORED
    want = 7 * functional.cross_entropy(logits.reshape(10, 7), targets.reshape(10))
    found = summed_cross_entropy(logits, targets)
    assert found.dtype == torch.float64
    torch.testing.assert_close(found, want)
    assert summed_cross_entropy(logits, torch.full((2, 5), IGNORED)) == 0


def test_bf16_logits_are_summed_in_fp32() -> None:
    logits = torch.randn(1, 4, 9).bfloat16()
    targets = torch.randint(0, 9, (1, 4))
    assert torch.equal(
        summed_cross_entropy(logits, targets), summed_cross_entropy(logits.float(), targets)
    )
