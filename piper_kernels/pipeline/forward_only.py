"""Microbatches through the stages, forwards only: for evaluation.

torch 2.13 runs the backward actions of schedules with several stages a rank even in ``eval()``.
"""

from collections.abc import Callable, Mapping, Sequence

import torch
import torch.distributed as dist
from torch import Tensor, nn

# microbatch number, logits
TakeLogits = Callable[[int, Tensor], None]


@torch.no_grad()
def forward_only(
    modules: Mapping[int, nn.Module],
    owners: Sequence[int],
    microbatches: Sequence[tuple[Tensor, Tensor | None]],
    *,
    hidden: Tensor,
    group: dist.ProcessGroup,
    take: TakeLogits,
) -> None:
    """Run every microbatch through all stages; every rank of the pipeline calls it.

    Args:
        modules: this rank's stages by their index.
        owners: ``[num_stages]`` the pipeline rank of each stage.
        microbatches: token ids ``[b, S]`` and mask ``[b, S]`` of each.
        hidden: ``[b, S, H]``: shape, dtype and device of what stages hand over.
        group: the pipeline's ranks.
        take: told of each microbatch's logits, on the last stage's rank.
    """
    rank, last = group.rank(), len(owners) - 1
    for number, (tokens, mask) in enumerate(microbatches):
        output = tokens
        for index, module in sorted(modules.items()):
            if index > 0 and owners[index - 1] != rank:
                output = torch.empty_like(hidden)
                dist.recv(output, group=group, group_src=owners[index - 1])
            output = module(output, mask)
            if index < last and owners[index + 1] != rank:
                dist.send(output.contiguous(), group=group, group_dst=owners[index + 1])
        if last in modules:
            take(number, output)
