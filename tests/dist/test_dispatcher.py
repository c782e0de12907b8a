"""Expert parallelism on real processes: the oracle's outputs and gradients, on any exchange."""

from dataclasses import dataclass, replace
from typing import Any

import hypothesis
import hypothesis.strategies as st
import numpy as np
import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from piper_kernels import PiperMoE, RouterConfig
from piper_kernels.dist import checkpoint_contexts, messages
from piper_kernels.dist.dispatcher import Dispatcher, ExpertParallel
from piper_kernels.dist.placement_map import PlacementMap
from piper_kernels.dist.topology import Topology
from piper_kernels.dist.topology_presets import frontier
from piper_kernels.errors import ConfigError, RoutingError, TransferError
from piper_kernels.functional import experts
from piper_kernels.testing import RankError, run_ranks
from piper_kernels.testing.exchange import make_cluster

H, I = 4, 3
EXCHANGES = ["flat", "halo", "halo_dedup", "auto"]
CLUSTERS = {
    4: [((2, 2), (0, 0)), ((1, 3), (0, 1)), ((4,), (0,)), ((1, 1, 2), (0, 1, 1))],
    6: [((2, 2, 2), (0, 0, 1)), ((3, 3), (0, 0))],
}


@dataclass(frozen=True)
class Case:
    """A layer's routing on all ranks; every rank can work out every other's part."""

    topology: Topology
    placement: PlacementMap
    num_experts: int
    top_k: int
    num_tokens: tuple[int, ...]
    kind: str
    seed: int
    dtype: torch.dtype = torch.float64

    def weights(self) -> tuple[Tensor, Tensor]:
        torch.manual_seed(self.seed)
        gate_up = torch.randn(self.num_experts, 2 * I, H, dtype=self.dtype)
        return gate_up, torch.randn(self.num_experts, H, I, dtype=self.dtype)

    def inputs(self, rank: int) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """x, expert_ids, gates and the gradient of y."""
        generator = torch.Generator().manual_seed(1000 * self.seed + rank)
        count, choices = self.num_tokens[rank], self.num_experts
        scores = torch.rand(count, choices, generator=generator)
        if self.kind == "skewed":
            scores[:, 0] += 0.8
        if self.kind == "one_idle":
            scores[:, self.placement.slots[-1]] = -1.0
        ids = scores.topk(self.top_k, dim=1).indices if count else scores.new_empty(0, self.top_k)
        ids = ids.long()
        gates = torch.rand(count, self.top_k, generator=generator, dtype=torch.float64)
        if self.kind == "sentinels":
            is_dropped = torch.rand(count, self.top_k, generator=generator) < 0.4
            ids, gates = ids.masked_fill(is_dropped, choices), gates.masked_fill(is_dropped, 0)
        x, grad = (torch.randn(count, H, generator=generator).to(self.dtype) for _ in "xg")
        return x, ids, gates.to(torch.promote_types(self.dtype, torch.float32)), grad


def make_case(num_ranks: int, seed: int) -> Case:
    rng = np.random.default_rng(seed)
    clusters = CLUSTERS[num_ranks]
    sizes, groups = clusters[rng.integers(len(clusters))]
    # not a multiple of the ranks
    num_experts = num_ranks + int(rng.integers(0, 6))
    order = rng.permutation(num_experts).tolist()
    contiguous = PlacementMap.contiguous(num_experts, num_ranks)
    slots = tuple(tuple(order[e] for e in own) for own in contiguous.slots)
    is_moved = rng.random() < 0.5
    return Case(
        topology=make_cluster(sizes, groups, seed),
        placement=contiguous.replace(slots=slots) if is_moved else contiguous,
        num_experts=num_experts,
        top_k=int(rng.integers(1, min(num_experts, 4) + 1)),
        num_tokens=tuple(int(t) for t in rng.choice([0, 1, 7, 12], num_ranks)),
        kind=["uniform", "skewed", "one_idle", "sentinels"][rng.integers(4)],
        seed=seed,
    )


def run_layer(case: Case, exchange: Any) -> dict[str, Tensor]:
    """This rank's output and every gradient."""
    rank = dist.get_rank()
    ep = ExpertParallel(None, case.topology, exchange, case.placement)
    dispatcher = Dispatcher(ep, case.num_experts)
    local = list(dispatcher.local_experts)
    gate_up, down = (weight[local].requires_grad_() for weight in case.weights())
    x, ids, gates, grad = case.inputs(rank)
    x.requires_grad_()
    gates.requires_grad_()

    def run_experts(rows: Tensor, ids: Tensor, gates: Tensor) -> Tensor:
        return experts(rows, ids, gates, gate_up, down)

    y = dispatcher.run(run_experts, x, ids, gates)
    y.backward(grad)
    found = {"y": y.detach(), "x": x.grad, "gates": gates.grad}
    found |= {"gate_up": gate_up.grad, "down": down.grad}
    assert all(tensor is not None for tensor in found.values())
    return {name: tensor for name, tensor in found.items() if tensor is not None}


def expected(case: Case) -> dict[str, Tensor]:
    """The same from one process with all ranks' tokens."""
    parts = [case.inputs(rank) for rank in range(len(case.num_tokens))]
    x, ids, gates, grad = (torch.cat(tensors) for tensors in zip(*parts, strict=True))
    gate_up, down = (weight.requires_grad_() for weight in case.weights())
    x.requires_grad_()
    gates.requires_grad_()
    experts(x, ids, gates, gate_up, down, backend="reference").backward(grad)
    y = experts(x, ids, gates, gate_up, down, backend="reference").detach()
    rank = dist.get_rank()
    first = sum(case.num_tokens[:rank])
    mine = slice(first, first + case.num_tokens[rank])
    local = list(case.placement.slots[rank])
    assert x.grad is not None
    assert gates.grad is not None
    assert gate_up.grad is not None
    assert down.grad is not None
    return {
        "y": y[mine],
        "x": x.grad[mine],
        "gates": gates.grad[mine],
        "gate_up": gate_up.grad[local],
        "down": down.grad[local],
    }


def compare_cases(cases: list[Case]) -> list[str]:
    """What differs from the oracle, for each case and exchange."""
    wrong = []
    for case in cases:
        want = expected(case)
        for exchange in EXCHANGES:
            have = run_layer(case, exchange)
            for name, tensor in want.items():
                error = (have[name] - tensor).abs().max().item() if tensor.numel() else 0.0
                if have[name].shape != tensor.shape or not error < 1e-12:
                    wrong.append(f"{exchange} {name}: {error} in {case}")
    return wrong


@hypothesis.settings(max_examples=2, phases=[hypothesis.Phase.generate])
@hypothesis.given(seed=st.integers(0, 2**20))
@pytest.mark.parametrize("num_ranks", [4, pytest.param(6, marks=pytest.mark.slow)])
def test_dispatcher_equals_one_process(num_ranks: int, seed: int) -> None:
    # A59 (ranks without tokens, experts without tokens, 3 calls and more), A63 (E is no multiple of
    # the ranks), A69 (nodes of 2x2, 3x2, 2x3, ragged, one; several experts on one remote node)
    cases = [make_case(num_ranks, seed + index) for index in range(3)]
    assert run_ranks(compare_cases, num_ranks, cases) == [[]] * num_ranks


def compare_bits(case: Case) -> dict[str, bool]:
    flat, halo = run_layer(case, "flat"), run_layer(case, "halo")
    dedup = run_layer(case, "halo_dedup")
    found = {f"halo {name}": torch.equal(flat[name], halo[name]) for name in flat}
    again = run_layer(case, "halo_dedup")
    found |= {f"again {name}": torch.equal(dedup[name], again[name]) for name in flat}
    return found


def test_dispatcher_halo_is_flat_bit_for_bit() -> None:
    topology = make_cluster((2, 1), (0, 1), 5)
    placement = PlacementMap.contiguous(7, 3)
    case = Case(topology, placement, 7, 3, (9, 0, 13), "skewed", 5, torch.float32)
    for found in run_ranks(compare_bits, 3, case):
        assert all(found.values()), found


def narrow_errors(case: Case) -> list[tuple[float, float]]:
    """Relative error of y with bf16 rows, for dedup and for one process."""
    wide = replace(case, dtype=torch.float64)
    x, ids, gates, _ = case.inputs(dist.get_rank())
    gate_up, down = case.weights()
    exact = experts(x.double(), ids, gates.double(), gate_up.double(), down.double())
    alone = experts(x, ids, gates, gate_up, down).double()
    assert wide.dtype == torch.float64
    found = []
    for exchange in ("flat", "halo_dedup"):
        y = run_layer(case, exchange)["y"]
        assert y.dtype == torch.bfloat16
        ours, theirs = (y.double() - exact).norm(), (alone - exact).norm()
        found.append((ours.item(), theirs.item()))
    return found


def test_dispatcher_sums_in_fp32() -> None:
    topology = frontier(1).lay_out((2, 2))
    placement = PlacementMap.contiguous(16, 4)
    case = Case(topology, placement, 16, 4, (40,) * 4, "uniform", 7, torch.bfloat16)
    for errors in run_ranks(narrow_errors, 4, case):
        for ours, alone in errors:
            # a few more roundings to bf16 than in one process, each of the size of its own
            assert ours < 2.5 * alone


class CountingExperts(torch.nn.Module):
    """Keeps the ids and gates that reached this rank."""

    def forward(self, rows: Tensor, ids: Tensor, gates: Tensor) -> Tensor:
        self.seen = rows, ids, gates
        return rows * (gates * (ids < 2)).sum(1, keepdim=True)


def carry_tokens(topology: Topology) -> bool:
    """Identity experts on rows that say whose they are."""
    rank = dist.get_rank()
    num_tokens = [3, 0, 5, 2][rank]
    x = (1000.0 * rank + torch.arange(num_tokens))[:, None].repeat(1, 2)
    num_experts = 2 * dist.get_world_size()
    # both on one remote node
    far = (2 * rank + 4) % num_experts
    ids = torch.tensor([[far, far + 1]]).repeat(num_tokens, 1)
    gates = torch.full((num_tokens, 2), 0.25)
    wrong = torch.ones(1, 2), torch.tensor([[-1, 0]]), torch.ones(1, 2)
    dispatcher = Dispatcher(ExpertParallel(), num_experts)
    with pytest.raises(RoutingError, match="expert_ids must be >= 0, got -1"):
        dispatcher.run(CountingExperts(), *wrong)
    is_right = True
    for exchange in EXCHANGES:
        ep = ExpertParallel(None, topology, exchange)  # type: ignore[arg-type]
        module = CountingExperts()
        y = Dispatcher(ep, num_experts).run(module, x, ids, gates)
        is_right &= torch.equal(y, 0.5 * x)
        if exchange == "halo_dedup":
            # each token came once, with both of its experts
            sources = [(source + 2) % 4 for source in (rank,)]
            is_right &= len(module.seen[0]) == [3, 0, 5, 2][sources[0]]
    return is_right


def test_dispatcher_returns_every_token_to_its_owner() -> None:
    # A69
    assert run_ranks(carry_tokens, 4, frontier(1).lay_out((2, 2))) == [True] * 4


def make_moe(ep: ExpertParallel | None, num_experts: int = 6, **options: Any) -> PiperMoE:
    torch.manual_seed(0)
    return PiperMoE(H, I, num_experts, 2, ep=ep, dtype=torch.float64, **options)


def checkpointed(kind: str) -> tuple[int, bool]:
    """How often counts were exchanged for two steps, one recomputed; are gradients the same?"""
    moe = make_moe(ExpertParallel(None, frontier(1).lay_out((1, 1)), "halo_dedup"))
    x = torch.randn(5 + dist.get_rank(), H, dtype=torch.float64)
    routing = moe.route(x).detach()
    assert moe.dispatcher is not None
    calls = 0
    before = torch.distributed.batch_isend_irecv

    def count(ops: list[Any]) -> Any:
        nonlocal calls
        calls += ops[0].tag in (messages.TAGS["counts"], messages.COUNTS_BY_RAIL)
        return before(ops)

    torch.distributed.batch_isend_irecv = count
    (moe(x, routing=routing) ** 2).sum().backward()
    want = [p.grad.clone() for p in moe.experts.parameters() if p.grad is not None]
    moe.zero_grad()
    leaf = x.clone().requires_grad_()
    options: dict[str, Any] = {"use_reentrant": kind == "reentrant"}
    if kind == "contexts":
        options["context_fn"] = checkpoint_contexts
    given = None if kind in ("contexts", "plain") else routing
    y = torch.utils.checkpoint.checkpoint(lambda x: moe(x, routing=given), leaf, **options)
    (y**2).sum().backward()
    torch.distributed.batch_isend_irecv = before
    have = [p.grad for p in moe.experts.parameters() if p.grad is not None]
    return calls, all(torch.equal(a, b) for a, b in zip(want, have, strict=True))


def all_checkpointed() -> dict[str, tuple[int, bool]]:
    return {kind: checkpointed(kind) for kind in ("routing", "reentrant", "contexts", "plain")}


def test_dispatcher_keeps_the_plan_for_recomputation() -> None:
    # with routing= all three forwards share a plan, with contexts the recomputation has its
    # forward's; else it counts again, on every rank
    wanted = {"routing": 1, "reentrant": 1, "contexts": 2, "plain": 3}
    for found in run_ranks(all_checkpointed, 2):
        assert found == {kind: (num_counts, True) for kind, num_counts in wanted.items()}


def alone() -> bool:
    """One rank, with and without a process group: the layer without expert parallelism."""
    x = torch.randn(7, H, dtype=torch.float64)
    results = []
    for ep in (None, ExpertParallel()):
        moe = make_moe(ep)
        y, stats = moe(x, return_stats=True)
        (y.square().sum() + stats.balance_loss).backward()
        results.append([y, *(p.grad for p in moe.parameters())])
    return all(torch.equal(a, b) for a, b in zip(*results, strict=True))


def test_dispatcher_alone_is_the_plain_layer() -> None:
    # A61: bit for bit, and without a process group
    assert alone()
    assert run_ranks(alone, 1) == [True]


def count_load(topology: Topology) -> list[bool]:
    """Counts are those of the logical ids of real tokens, whatever the exchange."""
    rank = dist.get_rank()
    found = []
    for exchange in EXCHANGES:
        moe = make_moe(ExpertParallel(None, topology, exchange))  # type: ignore[arg-type]
        assert moe.experts.down_proj.shape[0] == 2
        torch.manual_seed(rank)
        x = torch.randn(0 if rank == 2 else 20, H, dtype=torch.float64)
        mask = torch.rand(len(x)) < 0.7
        _, stats = moe(x, mask=mask, return_stats=True)
        total = stats.expert_counts.clone()
        dist.all_reduce(total)
        num_real = mask.sum()
        dist.all_reduce(num_real)
        wanted = torch.bincount(moe.route(x).expert_ids[mask].reshape(-1), minlength=6)
        found += [torch.equal(stats.expert_counts, wanted), int(total.sum()) == 2 * int(num_real)]
    return found


def test_dispatcher_counts_logical_experts() -> None:
    # A85: an idle rank, a padding mask, each exchange
    topology = frontier(1).lay_out((2, 1))
    assert run_ranks(count_load, 3, topology) == [[True] * 8] * 3


def disagree(kind: str) -> tuple[str, str]:
    rank = dist.get_rank()
    slots = ((0, 1, 2), (3, 4, 5)) if rank or kind != "placement" else ((1, 0, 2), (3, 4, 5))
    ep = ExpertParallel(placement=PlacementMap(num_experts=6, slots=slots))
    width = H + 1 if kind == "width" and rank else H
    moe = PiperMoE(width, I, 6, 2, ep=ep)
    try:
        with torch.set_grad_enabled(kind != "mode" or rank == 0):
            moe(torch.randn(3 + rank, width))
    except TransferError as error:
        return "TransferError", str(error)
    return "none", ""


DISAGREEMENTS = {"placement": "placement", "width": "elements per row", "mode": "gradient mode"}


def all_disagreements() -> dict[str, tuple[str, str]]:
    return {kind: disagree(kind) for kind in DISAGREEMENTS}


def test_dispatcher_names_a_disagreement_on_every_rank() -> None:
    # A67: one rank with H + 1 columns raises on both; different T do not matter
    for rank, found in enumerate(run_ranks(all_disagreements, 2)):
        for kind, name in DISAGREEMENTS.items():
            error, message = found[kind]
            assert error == "TransferError"
            place = f"rank {rank} on node0, phase counts: PiperMoE: {name} must be"
            assert message.startswith(place), message


def unequal(num_tokens: tuple[int, ...]) -> bool:
    moe = make_moe(ExpertParallel(), capacity_factor=2.0)
    rank = dist.get_rank()
    moe.train(rank == 0)
    y = moe(torch.randn(num_tokens[rank], H, dtype=torch.float64))
    y.sum().backward()
    return y.shape[0] == num_tokens[rank]


def all_unequal() -> list[bool]:
    return [unequal(num_tokens) for num_tokens in ((3, 4), (0, 1000), (0, 0))]


def test_dispatcher_takes_unequal_token_counts() -> None:
    # A67: different T and capacity on two ranks, one of them in eval
    assert run_ranks(all_unequal, 2) == [[True] * 3] * 2


def too_many_ranks() -> str:
    try:
        PiperMoE(H, I, 2, 1, router=RouterConfig(is_normalized=False), ep=ExpertParallel())
    except ConfigError as error:
        return str(error)
    return ""


def test_dispatcher_refuses_more_ranks_than_experts() -> None:
    # A63: on all ranks, before anything is exchanged
    for message in run_ranks(too_many_ranks, 3):
        assert "num_ranks must be at most num_experts = 2, got 3" in message


def drop_tokens() -> tuple[Tensor, int]:
    """Capacity is each rank's own: five tokens on one expert, room for four."""
    moe = PiperMoE(
        H,
        I,
        4,
        1,
        router=RouterConfig(is_normalized=False),
        ep=ExpertParallel(),
        capacity_factor=3.2,
        dtype=torch.float64,
    )
    with torch.no_grad():
        moe.router.weight.zero_()
    y, stats = moe(torch.ones(5, H, dtype=torch.float64), return_stats=True)
    return y.detach(), int(stats.num_dropped)


def test_dispatcher_drops_beyond_capacity() -> None:
    # A66: all tokens choose expert 0; the last one is dropped and gets 0
    for y, num_dropped in run_ranks(drop_tokens, 2):
        assert num_dropped == 1
        assert bool((y[:4] != 0).all())
        assert bool((y[4] == 0).all())


def forget_group() -> None:
    dist.destroy_process_group()
    PiperMoE(H, I, 4, 2, ep=ExpertParallel())


def test_expert_parallel_wants_the_group_that_the_launcher_promises() -> None:
    with pytest.raises(RankError, match="for WORLD_SIZE = 2, got none"):
        run_ranks(forget_group, 2)
