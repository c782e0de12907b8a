"""Gradients under expert parallelism: their reduction over ranks, and their norm.

``torch.nn.utils.clip_grad_norm_`` (2.13) refuses parameters on different meshes, and knows nothing
of experts that other ranks hold. Here every parameter counts once, wherever it is.

Letters: P ranks of the group, L experts of this rank.
"""

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from piper_kernels.dist.collectives import GroupLike, resolve_group
from piper_kernels.dist.dispatcher import Dispatcher
from piper_kernels.errors import ConfigError, TrainingError, instruction, require


@dataclass(frozen=True, slots=True, eq=False)
class Share:
    """Parameters whose parts are spread over the same ranks.

    Attributes:
        parameters: of this rank.
        groups: each part of a parameter is on one rank of each of these groups; none for
            parameters that every rank holds whole.
        counted: which of dim 0 this rank answers for; ``None``: all.
    """

    parameters: tuple[nn.Parameter, ...]
    groups: tuple[dist.ProcessGroup, ...] = ()
    counted: tuple[int, ...] | None = None


def expert_layers(model: nn.Module) -> Iterator[tuple[nn.Module, Dispatcher]]:
    """The experts modules in a model that are shared among ranks, and how."""
    for module in model.modules():
        dispatcher = getattr(module, "dispatcher", None)
        if isinstance(dispatcher, Dispatcher) and dispatcher.exchange is not None:
            yield module.experts, dispatcher  # type: ignore[misc]


def list_shares(model: nn.Module) -> list[Share]:
    """All parameters of a model, by where their parts are; in the same order on every rank."""
    shares: list[Share] = []
    taken: set[int] = set()
    for experts, dispatcher in expert_layers(model):
        own = tuple(p for p in experts.parameters() if not isinstance(p, DTensor))
        taken |= {id(parameter) for parameter in own}
        assert dispatcher.exchange is not None, "expert_layers yields no others"
        shares.append(Share(own, (dispatcher.exchange.group,), _first_copies(dispatcher)))
    by_mesh: dict[tuple[int, ...], list[nn.Parameter]] = {}
    for parameter in model.parameters():
        if id(parameter) not in taken:
            by_mesh.setdefault(_spread_of(parameter), []).append(parameter)
    for parameters in by_mesh.values():
        shares.append(Share(tuple(parameters), _groups_of(parameters[0])))
    return shares


def clip_grad_norm_(
    model: nn.Module | Sequence[Share],
    max_norm: float,
    norm_type: float = 2.0,
    *,
    error_if_nonfinite: bool = False,
) -> Tensor:
    """Scale all gradients so that their norm over the whole model is at most ``max_norm``.

    Parameters may be plain tensors that every rank holds, DTensors on any meshes, and the experts
    of :class:`PiperMoE` layers under expert parallelism; copies of one expert count once. All ranks
    call it, and all scale by the same factor.

    Args:
        model: after the gradients have been reduced; or its :func:`list_shares`, which need not be
            found anew at each step.
        max_norm: above 0.
        norm_type: p of the p-norm; ``math.inf`` for the largest absolute value.
        error_if_nonfinite: raise if the norm is not finite.

    Returns:
        The norm before, 0-dim fp64, the same on every rank.

    Raises:
        ConfigError: a norm type or limit that cannot work, or a parameter that is a partial sum.
        TrainingError: the norm is not finite, and that was asked for.

    Example:
        >>> layer = nn.Linear(1, 2, bias=False)
        >>> layer.weight.grad = torch.tensor([[3.0], [4.0]])
        >>> clip_grad_norm_(layer, 1.0), layer.weight.grad.norm()
        (tensor(5., dtype=torch.float64), tensor(1.0000))
    """
    name = "clip_grad_norm_"
    require(max_norm > 0, name, "max_norm", "be above 0", max_norm)
    require(norm_type > 0, name, "norm_type", "be above 0", norm_type)
    shares = list_shares(model) if isinstance(model, nn.Module) else model
    _place_as_parameters(shares)
    total = _total_norm(shares, norm_type)
    if error_if_nonfinite and not math.isfinite(total):
        sentence = f"{name}: the norm of all gradients must be finite, got {total.item()}."
        raise TrainingError(f"{sentence} Lower the learning rate, or skip the step.")
    factor = (max_norm / (total + 1e-6)).clamp(max=1.0)
    for share in shares:
        for parameter in share.parameters:
            if parameter.grad is not None:
                grad = _local(parameter.grad)
                grad.mul_(factor.to(grad.device, grad.dtype))
    return total


def reduce_gradients(
    model: nn.Module,
    group: GroupLike = None,
    *,
    replicas: GroupLike = None,
) -> None:
    """Make the gradients those of the mean of all ranks' losses.

    What every rank holds is averaged. An expert has already got the gradients of all ranks' tokens
    through the exchange; its sum is divided by the same number, so expert parallelism changes no
    gradient. Copies of an expert add up, in the order of the placement, and stay equal.

    For plain tensors; FSDP reduces its own (set its divide factor for experts to P).

    Args:
        model: after the backward pass.
        group: all ranks that have different tokens.
        replicas: ranks that hold the same experts with other tokens, if the expert-parallel group
            is smaller than ``group``; ``None``: there are none.

    Raises:
        ConfigError: a group that is none.
    """
    whole = resolve_group("reduce_gradients", group)
    num_ranks = whole.size()
    taken: set[int] = set()
    for experts, dispatcher in expert_layers(model):
        own = list(experts.parameters())
        taken |= {id(parameter) for parameter in own}
        _sum_copies(own, dispatcher)
        if replicas is not None:
            _all_reduce(own, resolve_group("reduce_gradients", replicas))
        _divide(own, num_ranks)
    dense = [parameter for parameter in model.parameters() if id(parameter) not in taken]
    _all_reduce(dense, whole)
    _divide(dense, num_ranks)


def _place_as_parameters(shares: Sequence[Share]) -> None:
    """Lay each gradient out as its parameter is.

    Autograd may leave another layout: under tensor parallelism the gradient of a sharded embedding
    is whole on every rank (transformers 5.25).
    """
    for share in shares:
        for parameter in share.parameters:
            grad = parameter.grad
            if not isinstance(parameter, DTensor) or not isinstance(grad, DTensor):
                continue
            if grad.placements != parameter.placements:
                parameter.grad = grad.redistribute(placements=parameter.placements)


def _total_norm(shares: Sequence[Share], norm_type: float) -> Tensor:
    """The norm over all ranks; every rank takes part in every sum, with or without gradients."""
    is_max = math.isinf(norm_type)
    device = next((_local(p).device for share in shares for p in share.parameters), None)
    total = torch.zeros((), dtype=torch.float64, device=device)
    for share in shares:
        part = torch.zeros_like(total)
        for parameter in share.parameters:
            if parameter.grad is None:
                continue
            grad = _local(parameter.grad)
            if share.counted is not None:
                grad = grad[list(share.counted)]
            wide = torch.float64 if grad.dtype == torch.float64 else torch.float32
            if grad.numel():
                size = torch.linalg.vector_norm(grad, norm_type, dtype=wide).double()
                part = torch.maximum(part, size) if is_max else part + size**norm_type
        for group in share.groups:
            dist.all_reduce(part, dist.ReduceOp.MAX if is_max else dist.ReduceOp.SUM, group)
        total = torch.maximum(total, part) if is_max else total + part
    return total if is_max else total ** (1 / norm_type)


def _local(tensor: Tensor) -> Tensor:
    """This rank's part; shares memory with it."""
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def _spread_of(parameter: Tensor) -> tuple[int, ...]:
    """A key for where the parts are: the mesh, and its dims that shard."""
    if not isinstance(parameter, DTensor):
        return ()
    return (id(parameter.device_mesh), *_sharded_dims(parameter))


def _sharded_dims(parameter: DTensor) -> list[int]:
    for index, placement in enumerate(parameter.placements):
        if placement.is_partial():
            requirement, remedy = "be reduced", "Call redistribute on the parameter first."
            found = f"a partial sum on mesh dim {index}"
            raise ConfigError(
                instruction("clip_grad_norm_", "parameters", requirement, found, remedy)
            )
    return [i for i, placement in enumerate(parameter.placements) if not placement.is_replicate()]


def _groups_of(parameter: Tensor) -> tuple[dist.ProcessGroup, ...]:
    if not isinstance(parameter, DTensor):
        return ()
    return tuple(parameter.device_mesh.get_group(dim) for dim in _sharded_dims(parameter))


def _first_copies(dispatcher: Dispatcher) -> tuple[int, ...] | None:
    """Slots of this rank that hold an expert's first copy; ``None``: there are no copies."""
    if not dispatcher.placement.has_replicas:
        return None
    assert dispatcher.exchange is not None, "one process has no copies"
    rank = dispatcher.exchange.rank
    homes = [dispatcher.placement.copies_of(expert)[0] for expert in dispatcher.local_experts]
    return tuple(slot for slot, home in enumerate(homes) if home == (rank, slot))


def _sum_copies(parameters: Sequence[nn.Parameter], dispatcher: Dispatcher) -> None:
    """Give every copy of an expert the sum over its copies, taken in copy order."""
    exchange, placement = dispatcher.exchange, dispatcher.placement
    if exchange is None or not placement.has_replicas:
        return
    num_copies = placement.maps.num_copies
    copied = [expert for expert in range(placement.num_experts) if num_copies[expert] > 1]
    fill_missing(parameters, exchange.group)
    for parameter in parameters:
        if parameter.grad is None:
            continue
        shape = (len(copied), int(num_copies.max()), *parameter.shape[1:])
        every = parameter.grad.new_zeros(shape)
        mine = []
        for row, expert in enumerate(copied):
            for nth, (rank, slot) in enumerate(placement.copies_of(expert)):
                if rank == exchange.rank:
                    every[row, nth] = parameter.grad[slot]
                    mine.append((row, slot))
        # each place is filled by one rank: adding zeros changes no bit
        dist.all_reduce(every, group=exchange.group)
        totals = every[:, 0].clone()
        for nth in range(1, every.shape[1]):
            totals += every[:, nth]
        for row, slot in mine:
            parameter.grad[slot] = totals[row]


def fill_missing(parameters: Sequence[nn.Parameter], group: dist.ProcessGroup) -> None:
    """Zeros for a gradient that another rank has and this one has not: it takes part in the sum."""
    if not parameters:
        return
    device = parameters[0].device
    has_grad = torch.tensor([p.grad is not None for p in parameters], dtype=torch.int32)
    has_grad = has_grad.to(device)
    dist.all_reduce(has_grad, dist.ReduceOp.MAX, group)
    for parameter, is_there in zip(parameters, has_grad.tolist(), strict=True):
        if is_there and parameter.grad is None:
            parameter.grad = torch.zeros_like(parameter)


def _all_reduce(parameters: Sequence[nn.Parameter], group: dist.ProcessGroup) -> None:
    """Sum the gradients over the group, those of one dtype at once."""
    fill_missing(parameters, group)
    grads = [parameter.grad for parameter in parameters if parameter.grad is not None]
    for dtype in dict.fromkeys(grad.dtype for grad in grads):
        alike = [grad for grad in grads if grad.dtype == dtype]
        packed = torch.cat([grad.reshape(-1) for grad in alike])
        dist.all_reduce(packed, group=group)
        sizes = [grad.numel() for grad in alike]
        for grad, part in zip(alike, packed.split(sizes), strict=True):
            grad.copy_(part.view_as(grad))


def _divide(parameters: Sequence[nn.Parameter], number: int) -> None:
    for parameter in parameters:
        if parameter.grad is not None:
            parameter.grad /= number
