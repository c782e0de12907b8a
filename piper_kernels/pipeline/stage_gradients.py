"""Gradients of this rank's stages: summed over who holds the same parameters, clipped over all.

An expert lives on the dp ranks of its group, everything else on all dp * ep ranks of its stage, a
tied embedding on two stages. Losses are divided by the tokens of the whole step before backward, so
gradients are sums here and nothing is divided again.
"""

from collections.abc import Sequence

import torch.distributed as dist
from torch import Tensor, nn

from piper_kernels.dist.gradients import Share, clip_grad_norm_, fill_missing
from piper_kernels.dist.mesh import ParallelMesh
from piper_kernels.dist.traffic_classes import DeferredReduction, TrafficClasses
from piper_kernels.huggingface.expert_counts import expert_modules, num_logical_experts
from piper_kernels.pipeline.stage import Stage


class StageGradients:
    """Reduces and clips. Every rank of the mesh builds one, and calls it at the same places.

    Args:
        stages: of this rank.
        mesh: all ranks.
        classes: through which reductions go.

    Attributes:
        experts: parameters that other ranks of the expert group do not hold.
        dense: all others, each once.
    """

    def __init__(self, stages: Sequence[Stage], mesh: ParallelMesh, classes: TrafficClasses):
        self._mesh, self._classes = mesh, classes
        everything = nn.ModuleList(stages)
        experts = {id(p): p for stage in stages for p in _local_experts(stage)}
        trained = [p for p in everything.parameters() if p.requires_grad]
        self.experts = [p for p in trained if id(p) in experts]
        self.dense = [p for p in trained if id(p) not in experts]
        self._tied = _tied_elsewhere(stages)
        self._tied_group = _tied_group(mesh, has_tied=self._tied is not None)
        # counted on the first stage; the last one's copy is only scaled
        is_copy = self._tied is not None and not any(s.place.is_first for s in stages)
        copies = tuple(p for p in self.dense if is_copy and p is self._tied)
        counted = tuple(p for p in self.dense if not any(p is copy for copy in copies))
        self._shares = [
            Share(counted, (mesh.pp_group,)),
            Share(tuple(self.experts), (mesh.ep_group, mesh.pp_group)),
            Share(copies, (), ()),
        ]

    def reduce(self) -> None:
        """Give every holder of a parameter the sum over all ranks' tokens."""
        started = [
            *self._reduce(self.dense, self._mesh.replica_group, "dense gradients"),
            *self._reduce(self.experts, self._mesh.dp_group, "expert gradients"),
        ]
        for reduction in started:
            reduction.wait()
        if self._tied is not None:
            assert self._tied.grad is not None, "embedding and head are in every step"
            # two ranks add two numbers: equal to the bit on both
            dist.all_reduce(self._tied.grad, group=self._tied_group)

    def clip(self, max_norm: float) -> float:
        """Scale all gradients to a norm of ``max_norm`` at most; the norm before, equal on all."""
        return float(clip_grad_norm_(self._shares, max_norm))

    def _reduce(
        self, parameters: Sequence[nn.Parameter], group: dist.ProcessGroup, name: str
    ) -> list[DeferredReduction]:
        if group.size() == 1 or not parameters:
            return []
        fill_missing(parameters, group)
        for parameter in parameters:
            if parameter.grad is not None and not parameter.grad.is_contiguous():
                parameter.grad = parameter.grad.contiguous()
        grads = [p.grad for p in parameters if p.grad is not None]
        by_dtype: dict[object, list[Tensor]] = {}
        for grad in grads:
            by_dtype.setdefault(grad.dtype, []).append(grad)
        return [self._classes.reduce_later(g, group, name=name) for g in by_dtype.values()]


def _local_experts(stage: Stage) -> list[nn.Parameter]:
    """Parameters whose dim 0 goes over experts; what all experts share is dense."""
    found = []
    for _, module in expert_modules(stage.model).values():
        is_shared_out = module.num_experts != num_logical_experts(module)
        for parameter in module.parameters(recurse=False):
            if is_shared_out and parameter.ndim > 0 and len(parameter) == module.num_experts:
                found.append(parameter)
    return found


def _tied_elsewhere(stages: Sequence[Stage]) -> nn.Parameter | None:
    """The embedding or head whose other copy is on another rank."""
    tied = [stage.tied_weight for stage in stages if stage.tied_weight is not None]
    return tied[0] if len(tied) == 1 else None


def _tied_group(mesh: ParallelMesh, *, has_tied: bool) -> dist.ProcessGroup | None:
    """First and last stage of this rank's pipeline; made on all ranks or on none."""
    flags: list[bool] = [False] * mesh.layout.size
    dist.all_gather_object(flags, has_tied)
    if not any(flags):
        return None
    mine = None
    for pipeline in mesh.layout.groups("pp"):
        holders = [rank for rank in pipeline if flags[rank]]
        group = dist.new_group(holders)
        if mesh.rank in holders:
            mine = group
    return mine
