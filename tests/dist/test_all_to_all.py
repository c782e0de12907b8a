"""all_to_all_single and all_to_all_rows on real processes: equal to torch's, and to the data."""

import logging
import re
from dataclasses import dataclass
from typing import Any

import hypothesis
import hypothesis.strategies as st
import numpy as np
import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh

import piper_kernels.dist as pdist
from piper_kernels.dist.exchange_group import ExchangeGroup
from piper_kernels.dist.topology import Topology
from piper_kernels.dist.topology_presets import frontier
from piper_kernels.errors import ConfigError, DtypeError, ShapeError, TransferError
from piper_kernels.testing import RankError, run_ranks
from piper_kernels.testing.exchange import COUNTS_KINDS, make_cluster, make_counts

DTYPES = [torch.float32, torch.bfloat16, torch.float16, torch.float64, torch.int64]
# ranks per node, and the switch group of each node
CLUSTERS = {
    4: [((2, 2), (0, 0)), ((1, 3), (0, 1)), ((4,), (0,)), ((1, 1, 2), (0, 1, 1))],
    7: [((3, 2, 2), (0, 1, 0))],
}


@dataclass(frozen=True)
class Case:
    topology: Topology
    counts: np.ndarray
    dtype: torch.dtype
    algorithm: str
    trailing: tuple[int, ...]


def make_case(num_ranks: int, seed: int) -> Case:
    rng = np.random.default_rng(seed)
    clusters = CLUSTERS[num_ranks]
    sizes, groups = clusters[rng.integers(len(clusters))]
    kind = COUNTS_KINDS[rng.integers(len(COUNTS_KINDS))]
    trailing = [(3,), (), (2, 2), (5,)][rng.integers(4)]
    algorithm = ["halo", "auto", "flat", "halo"][rng.integers(4)]
    return Case(
        topology=make_cluster(sizes, groups, seed),
        counts=make_counts(kind, num_ranks, seed),
        dtype=DTYPES[rng.integers(len(DTYPES))],
        algorithm=algorithm,
        trailing=trailing,
    )


def rows_from(case: Case, source: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(source)
    shape = (int(case.counts[source].sum()), *case.trailing)
    return torch.randint(-99, 99, shape, generator=generator).to(case.dtype)


def run_case(case: Case) -> bool:
    """Equal to torch's flat exchange, bit for bit, into an output that held something else."""
    rank = dist.get_rank()
    rows = rows_from(case, rank)
    out_splits, in_splits = case.counts[:, rank].tolist(), case.counts[rank].tolist()
    want = torch.full((sum(out_splits), *case.trailing), 77).to(case.dtype)
    have = want.clone()
    dist.all_to_all_single(want, rows, out_splits, in_splits)
    options: dict[str, Any] = {"topology": case.topology, "algorithm": case.algorithm}
    pdist.all_to_all_single(have, rows, out_splits, in_splits, **options)
    if not torch.equal(have, want):
        return False
    if not case.dtype.is_floating_point:
        return True
    return has_right_gradient(case, rows, out_splits, in_splits, options)


def has_right_gradient(
    case: Case, rows: torch.Tensor, outs: list[int], ins: list[int], options: dict[str, Any]
) -> bool:
    """A row's gradient is the one that its copy got, wherever that was."""
    rows.requires_grad_()
    moved = pdist.all_to_all_rows(rows, outs, ins, **options)
    # the gradient depends on the row alone, so the source can work it out
    moved.backward(moved.detach() * 2 + 1)
    assert rows.grad is not None
    return torch.equal(rows.grad, rows.detach() * 2 + 1)


def run_cases(cases: list[Case]) -> list[bool]:
    return [run_case(case) for case in cases]


@hypothesis.settings(max_examples=2, phases=[hypothesis.Phase.generate])
@hypothesis.given(seed=st.integers(0, 2**20))
@pytest.mark.parametrize("num_ranks", [4, 7])
def test_all_to_all_single_equals_torch(num_ranks: int, seed: int) -> None:
    # A68: bf16 and splits with zeros; 7 ranks on 3 nodes: a rail is missing
    cases = [make_case(num_ranks, seed + index) for index in range(5)]
    for found in run_ranks(run_cases, num_ranks, cases):
        assert found == [True] * len(cases)


def sub_groups() -> list[bool]:
    """Groups whose ranks are not the job's; the topology is the job's, the group's, or a mesh."""
    rank = dist.get_rank()
    job = frontier(1).lay_out((2, 2))
    groups = [dist.new_group([1, 2, 3]), dist.new_group([3, 0])]
    found = []
    for group, members in zip(groups, ([1, 2, 3], [0, 3]), strict=True):
        if rank in members:
            exchange = ExchangeGroup(group, job)
            assert exchange.topology.num_ranks == len(members)
            assert exchange.global_ranks == tuple(members)
            mine = torch.tensor([100 * rank + other for other in members])
            have = torch.empty_like(mine)
            pdist.all_to_all_single(have, mine, group=exchange, algorithm="halo")
            found.append(have.tolist() == [100 * other + rank for other in members])
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "ep"))
    mine = torch.tensor([rank, rank])
    have = torch.empty_like(mine)
    pdist.all_to_all_single(have, mine, group=mesh["ep"])
    found.append(have.tolist() == [rank // 2 * 2, rank // 2 * 2 + 1])
    try:
        pdist.all_to_all_single(have, mine, group=mesh)
    except ConfigError as error:
        found.append('mesh["ep"]' in str(error))
    return found


def test_all_to_all_single_in_sub_groups() -> None:
    # A68: a group of some ranks
    assert all(all(found) for found in run_ranks(sub_groups, 4))


def say_what_falls_back() -> tuple[list[str], list[bool]]:
    """The notes that were logged, and whether exchanges of one ExchangeGroup are right, twice."""
    rank, notes = dist.get_rank(), []
    handler = logging.Handler()
    handler.emit = lambda record: notes.append(record.getMessage())  # type: ignore[method-assign]
    logging.getLogger("piper_kernels.dist").addHandler(handler)
    exchange = ExchangeGroup(None, frontier(1).lay_out((3, 2, 1)))
    found = []
    for step in range(3):
        # from the second time on counts travel along the rails
        mine = torch.tensor([[10 * rank + other + step] for other in range(6)])
        have = torch.empty_like(mine)
        pdist.all_to_all_single(have, mine, group=exchange, algorithm="halo")
        found.append(have.flatten().tolist() == [10 * other + rank + step for other in range(6)])
    return notes, found


def test_exchange_group_says_what_falls_back() -> None:
    # 6 ranks on 3 nodes, two rails of which end early
    (first, *others) = run_ranks(say_what_falls_back, 6)
    assert [found for _, found in (first, *others)] == [[True] * 3] * 6
    assert any("end before node2 (1 ranks)" in note for note in first[0])
    assert all(notes == [] for notes, _ in others)


def gradcheck_rows() -> bool:
    """Twice differentiable: the backward is itself a move."""
    rank = dist.get_rank()
    counts = np.array([[1, 2, 0], [0, 0, 3], [1, 1, 1]])
    topology = make_cluster((2, 1), (0, 0), 3)
    rows = torch.randn(int(counts[rank].sum()), 2, dtype=torch.float64, requires_grad=True)
    exchange = ExchangeGroup(None, topology)
    splits = counts[:, rank].tolist(), counts[rank].tolist()
    moved = pdist.all_to_all_rows(rows, *splits, exchange, algorithm="halo")
    (grad,) = torch.autograd.grad((moved**3).sum(), rows, create_graph=True)
    (second,) = torch.autograd.grad(grad.sum(), rows)
    expanded = pdist.all_to_all_rows(rows, *splits, exchange, algorithm="halo").sum()
    # the gradient of a sum has stride 0
    (ones,) = torch.autograd.grad(expanded, rows)
    is_right = torch.equal(ones, torch.ones_like(rows))
    is_right &= torch.allclose(grad, 3 * rows.detach() ** 2)
    return is_right and torch.allclose(second, 6 * rows.detach())


def test_all_to_all_rows_is_twice_differentiable() -> None:
    assert run_ranks(gradcheck_rows, 3) == [True] * 3


def make_mistake(kind: str) -> tuple[str, str]:
    """Rank 1 makes it. What do both see?"""
    rank = dist.get_rank()
    is_wrong = rank == 1
    rows, output, splits = torch.ones(4, 2), torch.full((4, 2), 5.0), [2, 2]
    topology: Topology | None = None
    options: dict[str, Any] = {}
    if kind == "splits" and is_wrong:
        splits = [1, 3]
    elif kind == "dtype" and is_wrong:
        rows, output = rows.double(), output.double()
    elif kind == "width" and is_wrong:
        rows, output = torch.ones(4, 3), torch.ones(4, 3)
    elif kind == "algorithm" and is_wrong:
        options["algorithm"] = "halo"
    elif kind == "topology" and is_wrong:
        topology = frontier(1).lay_out((1, 1))
    elif kind == "sum" and is_wrong:
        splits = [2, 1]
    elif kind == "name" and is_wrong:
        options["algorithm"] = "halos"
    elif kind == "dtypes" and is_wrong:
        output = output.int()
    try:
        pdist.all_to_all_single(output, rows, splits, [2, 2], topology=topology, **options)
    except (ConfigError, DtypeError, ShapeError, TransferError) as error:
        untouched = bool((output[:, :2] == (1 if output.shape[1] == 3 else 5)).all())
        assert untouched, "the output was written"
        return type(error).__name__, str(error)
    return "none", ""


MISTAKES = {
    "splits": (("TransferError",) * 2, r"rank 0 on .* sends 2 rows to rank 1 .* expects 1 "),
    "dtype": (("TransferError",) * 2, r"dtype must be the same .*has float32 .*has float64"),
    "width": (("TransferError",) * 2, r"elements per row must .* has 2 and .* has 3\."),
    "algorithm": (("TransferError",) * 2, r"algorithm must .* has auto and .* has halo"),
    "topology": (("TransferError",) * 2, r"topology must be the same on every rank.* rank 1 on"),
    "sum": (("TransferError", "ConfigError"), r"the arguments of rank 1 on .* are wrong"),
    "dtypes": (("TransferError", "DtypeError"), r"the arguments of rank 1 on .* are wrong"),
    "name": (("TransferError", "ConfigError"), r"the arguments of rank 1 on .* are wrong"),
}


def make_mistakes() -> dict[str, tuple[str, str]]:
    return {kind: make_mistake(kind) for kind in MISTAKES}


def test_all_to_all_single_names_a_mistake_on_every_rank() -> None:
    found = run_ranks(make_mistakes, 2)
    for kind, (types, sentence) in MISTAKES.items():
        assert tuple(rank[kind][0] for rank in found) == types, kind
        for rank, (name, message) in enumerate(each[kind] for each in found):
            if name == "TransferError":
                assert message.startswith(f"rank {rank} on ")
                assert re.search(f"phase counts: all_to_all_single: .*{sentence}", message), message


def without_group() -> None:
    dist.destroy_process_group()
    pdist.all_to_all_single(torch.ones(1), torch.ones(1))


def test_all_to_all_single_needs_a_process_group() -> None:
    with pytest.raises(RankError, match="init_process_group"):
        run_ranks(without_group, 1)


def wrong_topology() -> str:
    try:
        pdist.all_to_all_single(torch.ones(2), torch.ones(2), topology=frontier(1))
    except ConfigError as error:
        return str(error)
    return ""


def test_exchange_group_refuses_a_foreign_topology() -> None:
    for message in run_ranks(wrong_topology, 2):
        assert "have the 2 ranks of the group" in message
        assert "got 8 ranks" in message


def test_all_to_all_single_refuses_meta_tensors() -> None:
    # A68: an unsupported device ends in an error that names it
    sentence = "DeviceError: all_to_all_single: input must be on cpu, .* backend gloo .* got meta"
    with pytest.raises(RankError, match=sentence):
        run_ranks(exchange_meta, 2)


def exchange_meta() -> None:
    rows = torch.ones(2, 1, device="meta")
    pdist.all_to_all_single(rows, rows.clone())
