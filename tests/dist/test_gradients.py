"""Norms and reductions of gradients over ranks, meshes and experts, each parameter once."""

import math
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Replicate, Shard, distribute_tensor

from piper_kernels import PiperMoE
from piper_kernels.dist import ExpertParallel, clip_grad_norm_, reduce_gradients
from piper_kernels.dist.gradients import Share, list_shares
from piper_kernels.dist.placement_map import PlacementMap
from piper_kernels.errors import ConfigError, TrainingError
from piper_kernels.testing import run_ranks


def parameter(grad: list[float] | None) -> nn.Parameter:
    made = nn.Parameter(torch.zeros(1 if grad is None else len(grad)))
    made.grad = None if grad is None else torch.tensor(grad)
    return made


def norm_of(dense: list[float] | None, experts: list[float] | None, p: float) -> list[float]:
    """The norm, and the experts' gradient after clipping to half of it."""
    assert dist.group.WORLD is not None
    own = parameter(experts)
    shares = [Share((own,), (dist.group.WORLD,)), Share((parameter(dense),))]
    norm = clip_grad_norm_(shares, 1e9, p).item()
    clip_grad_norm_(shares, norm / 2, p)
    after = [] if own.grad is None else own.grad.tolist()
    return [norm, *after]


def norms() -> list[list[float]]:
    rank = dist.get_rank()
    pair = [[2.0, 4.0], [6.0, 8.0]][rank]
    return [
        norm_of(None, pair, 2.0),
        norm_of([3.0] * 4, [[4.0] * 2, [4.0] * 2][rank], 2.0),
        norm_of([-9.0], pair, math.inf),
        norm_of(None, pair if rank else None, 2.0),
        norm_of(None, pair, 1.0),
    ]


def test_clip_grad_norm_counts_every_part_once() -> None:
    # A62: experts on two ranks, dense parameters beside them, a rank whose gradient is None
    wanted = [120**0.5, (4 * 9 + 4 * 16) ** 0.5, 9.0, 10.0, 20.0]
    found = run_ranks(norms, 2)
    for rank in range(2):
        assert [case[0] for case in found[rank]] == pytest.approx(wanted)
    # one factor on all ranks
    assert found[0][0][1:] == pytest.approx([1.0, 2.0])
    assert found[1][0][1:] == pytest.approx([3.0, 4.0])
    assert found[0][3][1:] == []
    assert found[1][3][1:] == pytest.approx([3.0, 4.0])


class Meshed(nn.Module):
    """Parameters on two meshes, sharded, copied and plain; a rank's part may be empty."""

    def __init__(self) -> None:
        super().__init__()
        one, two = init_device_mesh("cpu", (4,)), init_device_mesh("cpu", (2, 2))
        whole = [Replicate(), Replicate()]
        # mesh, placements of the parameter and of its gradient, which autograd may leave otherwise
        places: list[tuple[Any, Any, Any]] = [
            (one, [Shard(0)], [Shard(0)]),
            (one, [Shard(0)], [Replicate()]),
            (two, [Replicate(), Shard(0)], [Replicate(), Shard(0)]),
            (two, [Shard(0), Shard(1)], [Shard(0), Shard(1)]),
            (two, whole, whole),
            (two, whole, [Shard(0), Replicate()]),
        ]
        self.plain = nn.Parameter(torch.zeros(2))
        self.plain.grad = torch.tensor([1.0, -2.0])
        self.whole = [self.plain.grad.clone()]
        for index, (mesh, placements, grad_placements) in enumerate(places):
            grad = torch.arange(6.0).reshape(3, 2) + index
            self.whole.append(grad)
            made = nn.Parameter(distribute_tensor(torch.zeros(3, 2), mesh, placements))
            made.grad = distribute_tensor(grad.clone(), mesh, grad_placements)
            self.register_parameter(f"p{index}", made)


def meshed_norms() -> list[bool]:
    model = Meshed()
    whole = torch.cat([grad.reshape(-1) for grad in model.whole])
    norm = clip_grad_norm_(model, 1.0)
    after = [p.grad.full_tensor() for name, p in model.named_parameters() if name != "plain"]
    found = [math.isclose(norm.item(), whole.norm().item(), rel_tol=1e-6)]
    for have, grad in zip(after, model.whole[1:], strict=True):
        found.append(torch.allclose(have, grad / norm.float(), rtol=1e-5))
    largest = clip_grad_norm_(Meshed(), 1.0, math.inf)
    return [*found, largest.item() == whole.abs().max().item()]


def test_clip_grad_norm_over_mixed_meshes() -> None:
    # torch's own raises "must have the same mesh" here
    assert run_ranks(meshed_norms, 4) == [[True] * 8] * 4


def test_clip_grad_norm_refuses_what_is_not_finite() -> None:
    bad = [Share((parameter([math.nan]),))]
    with pytest.raises(TrainingError, match="must be finite, got nan"):
        clip_grad_norm_(bad, 1.0, error_if_nonfinite=True)
    with pytest.raises(ConfigError, match="max_norm must be above 0"):
        clip_grad_norm_(bad, 0.0)


def make_moe(ep: ExpertParallel | None) -> PiperMoE:
    torch.manual_seed(3)
    return PiperMoE(4, 3, 4, 2, ep=ep, dtype=torch.float64)


def take_experts(moe: PiperMoE, whole: PiperMoE, local: list[int]) -> None:
    with torch.no_grad():
        for own, all_of_them in zip(
            moe.experts.parameters(), whole.experts.parameters(), strict=True
        ):
            own.copy_(all_of_them[local])
        moe.router.load_state_dict(whole.router.state_dict())


def one_step(slots: tuple[tuple[int, ...], ...] | None, ep_size: int) -> float:
    """Largest difference to one process after a step of SGD, relative norm error included."""
    rank, world = dist.get_rank(), dist.get_world_size()
    torch.manual_seed(1)
    batch = torch.randn(world, 6, 4, dtype=torch.float64)
    whole = make_moe(None)
    whole(batch.reshape(-1, 4)).square().mean().backward()
    # all ranks make all groups, in the same order
    groups = [dist.new_group(list(range(a, a + ep_size))) for a in range(0, world, ep_size)]
    twins = [dist.new_group(list(range(a, world, ep_size))) for a in range(ep_size)]
    placement = None if slots is None else PlacementMap(num_experts=4, slots=slots)
    moe = make_moe(ExpertParallel(groups[rank // ep_size], placement=placement))
    assert moe.dispatcher is not None
    local = list(moe.dispatcher.local_experts)
    take_experts(moe, whole, local)
    moe(batch[rank]).square().mean().backward()
    replicas = twins[rank % ep_size] if ep_size < world else None
    reduce_gradients(moe, replicas=replicas)
    worst = 0.0
    for (name, have), want in zip(moe.named_parameters(), whole.parameters(), strict=True):
        assert have.grad is not None
        assert want.grad is not None
        wanted = want.grad[local] if name.startswith("experts") else want.grad
        worst = max(worst, (have.grad - wanted).abs().max().item())
    norm = nn.utils.clip_grad_norm_(whole.parameters(), 1e-3)
    return max(worst, abs(clip_grad_norm_(list_shares(moe), 1e-3).item() - norm.item()))


def all_steps() -> list[float]:
    copied = ((0, 1), (2, 0), (3, 1), (0,))
    return [one_step(None, 1), one_step(None, 2), one_step(None, 4), one_step(copied, 4)]


def test_reduce_gradients_equal_one_process() -> None:
    # A60: no factor of the group's size, for any size; A61: expert-parallel over all ranks. With
    # the last placement experts 0 and 1 have copies, which count once and stay equal
    for worst in run_ranks(all_steps, 4):
        assert max(worst) < 1e-14


def copies_agree() -> list[Tensor]:
    slots = ((0, 1), (0, 2), (3, 0))
    placement = PlacementMap(num_experts=4, slots=slots)
    torch.manual_seed(0)
    moe = PiperMoE(4, 3, 4, 2, ep=ExpertParallel(placement=placement))
    torch.manual_seed(dist.get_rank())
    moe(torch.randn(9, 4)).square().sum().backward()
    reduce_gradients(moe)
    return [p.grad[slots[dist.get_rank()].index(0)] for p in moe.experts.parameters()]


def test_reduce_gradients_keeps_copies_equal() -> None:
    first, *others = run_ranks(copies_agree, 3)
    for other in others:
        assert all(torch.equal(a, b) for a, b in zip(first, other, strict=True))
