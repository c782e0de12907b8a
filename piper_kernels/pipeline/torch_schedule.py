"""A pipeline for one shape: torch's stages and schedule around modules that exist.

What torch 2.13 needs told, each measured: meta tensors for what stages hand over, or the first step
runs every stage once more on uninitialised memory, with all its exchanges; another object for
another shape, since receive buffers are made once; no scaling of gradients, since the loss is
divided by the tokens of the whole step already.
"""

from collections.abc import Callable, Mapping
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.pipelining import (
    PipelineStage,
    Schedule1F1B,
    ScheduleDualPipeV,
    ScheduleGPipe,
    ScheduleInterleaved1F1B,
    ScheduleZBVZeroBubble,
)
from torch.distributed.pipelining.schedules import _PipelineSchedule

from piper_kernels.pipeline.schedule import ScheduleName

LossFunction = Callable[[Tensor, Tensor], Tensor]

_CLASSES: dict[ScheduleName, Any] = {
    "gpipe": ScheduleGPipe,
    "1f1b": Schedule1F1B,
    "interleaved_1f1b": ScheduleInterleaved1F1B,
    "zbv": ScheduleZBVZeroBubble,
    "dualpipev": ScheduleDualPipeV,
}
_ONE_STAGE_A_RANK = ("gpipe", "1f1b")


def build_torch_schedule(
    name: ScheduleName,
    modules: Mapping[int, nn.Module],
    num_stages: int,
    num_microbatches: int,
    *,
    tokens: Tensor,
    hidden: Tensor,
    logits: Tensor,
    loss: LossFunction,
    group: dist.ProcessGroup,
    device: torch.device,
) -> _PipelineSchedule:
    """The schedule object of torch for microbatches of one shape.

    Args:
        name: of the schedule.
        modules: this rank's stages by their index; each takes one tensor and returns one.
        num_stages: of the pipeline.
        num_microbatches: M.
        tokens: ``[b, S]`` int64 on meta: what the first stage takes.
        hidden: ``[b, S, H]`` on meta: what stages hand to the next.
        logits: ``[b, S, vocab]`` on meta: what the last stage gives.
        loss: of the last stage's output and a microbatch's targets.
        group: the pipeline's ranks.
        device: of this rank.
    """
    received = hidden.detach().requires_grad_()
    stages = [
        PipelineStage(
            module,
            index,
            num_stages,
            device,
            input_args=(tokens if index == 0 else received,),
            output_args=((logits if index == num_stages - 1 else hidden).requires_grad_(),),
            group=group,
        )
        for index, module in sorted(modules.items())
    ]
    given: Any = stages[0] if name in _ONE_STAGE_A_RANK else stages
    schedule: _PipelineSchedule = _CLASSES[name](
        given, num_microbatches, loss_fn=loss, scale_grads=False
    )
    return schedule
