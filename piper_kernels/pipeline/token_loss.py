"""Cross-entropy summed over tokens: whoever adds up microbatches and replicas divides once."""

import torch
from torch import Tensor
from torch.nn import functional

IGNORED = -100


def summed_cross_entropy(logits: Tensor, targets: Tensor) -> Tensor:
    """Sum of ``-log p(target)``, in at least fp32, over all targets that are not ``IGNORED``.

    Args:
        logits: ``[B, S, vocab]``, any floating dtype.
        targets: ``[B, S]`` int64.

    Returns:
        0-dim, nats; fp32 (fp64 for fp64 logits); 0 if every target is ignored.

    Example:
        >>> logits = torch.zeros(1, 2, 4)
        >>> summed_cross_entropy(logits, torch.tensor([[3, IGNORED]]))
        tensor(1.3863)
    """
    wide = logits if logits.dtype == torch.float64 else logits.float()
    return functional.cross_entropy(
        wide.flatten(0, 1), targets.flatten(), ignore_index=IGNORED, reduction="sum"
    )
