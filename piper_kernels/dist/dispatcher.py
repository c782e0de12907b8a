"""Dispatcher: a layer's tokens to the experts, wherever these are, and their outputs back.

A call exchanges counts, takes the exchange that the counts suggest, and keeps the plan: the
backward pass uses it, a recomputation under ``checkpoint_contexts``, and a call with the same
``expert_ids`` (``PiperMoE``'s ``routing=``). Users see logical expert ids only.

Letters: T tokens of this rank, K experts per token, E logical experts, L experts of this rank,
P ranks, N nodes, S rows on this rank after dispatch.
"""

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor
from torch.utils.weak import WeakIdKeyDictionary

from piper_kernels.autocast import is_autocast_active
from piper_kernels.dist.algorithm_choice import AlgorithmChoice
from piper_kernels.dist.dedup import DedupRoute, collect_rows, spread_rows
from piper_kernels.dist.exchange_counts import ExchangeCounts
from piper_kernels.dist.exchange_group import ExchangeGroup
from piper_kernels.dist.expert_parallel import ExpertParallel
from piper_kernels.dist.halo import Route, move_rows, plan_route
from piper_kernels.dist.header import Header, Table, exchange_headers
from piper_kernels.dist.recompute import current_tape
from piper_kernels.dist.topology_presets import one_box
from piper_kernels.errors import RoutingError, instruction
from piper_kernels.functional.permute import permute
from piper_kernels.functional.unpermute import unpermute
from piper_kernels.permutation import Permutation

# (rows [S, H], local expert ids [S, k], gates [S, k]) -> [S, H]; id L marks what is elsewhere
RunExperts = Callable[[Tensor, Tensor, Tensor], Tensor]


@dataclass(frozen=True, slots=True, eq=False)
class _Tables:
    """The placement on a device; the last entry of each is for sentinels."""

    candidates: Tensor
    num_candidates: Tensor
    physical_to_rank: Tensor
    physical_to_node: Tensor


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class DispatchPlan:
    """What one call decided.

    Attributes:
        key: what the plan is good for: version of the ids, dtypes, width.
        physical_ids: ``[T, K]`` int64, S_all for a sentinel.
        route: the exchange.
        needs_grad: on some rank rows need a gradient, so all exchange it.
    """

    key: tuple[object, ...]
    physical_ids: Tensor
    route: Route | DedupRoute
    needs_grad: bool


class Dispatcher:
    """Brings tokens to the experts of a group and their outputs back.

    Args:
        ep: group, topology, exchange and placement.
        num_experts: E.

    Attributes:
        exchange: the group; ``None`` if this process is alone.
        placement: where the experts are.
        local_experts: logical ids of this rank's experts, in slot order.
        choice: what decides between algorithms; ``None`` if nothing does.

    Raises:
        ConfigError: more ranks than experts, or a placement that does not fit.
    """

    def __init__(self, ep: ExpertParallel, num_experts: int) -> None:
        self.exchange = ep.join()
        num_ranks = 1 if self.exchange is None else self.exchange.num_ranks
        self.placement = ep.place(num_experts, num_ranks)
        self.algorithm = ep.exchange
        rank = 0 if self.exchange is None else self.exchange.rank
        topology = one_box(1) if self.exchange is None else self.exchange.topology
        self.local_experts = self.placement.slots[rank]
        self._first_physical = int(self.placement.maps.physical_offsets[rank])
        self._choices = self.placement.choices(topology, rank)
        self.choice = AlgorithmChoice(topology) if self.exchange is not None else None
        self._tables: dict[torch.device, _Tables] = {}
        self._kept: WeakIdKeyDictionary = WeakIdKeyDictionary()

    def __deepcopy__(self, _: object) -> "Dispatcher":
        """A copied layer talks to the same ranks."""
        return self

    @property
    def num_local_experts(self) -> int:
        """L."""
        return len(self.local_experts)

    def run(self, experts: RunExperts, x: Tensor, expert_ids: Tensor, gates: Tensor) -> Tensor:
        """The gate-weighted sum of each token's experts, wherever they are.

        Every rank of the group calls it; T may differ and be 0.

        Args:
            experts: this rank's.
            x: ``[T, H]`` floating.
            expert_ids: ``[T, K]`` integer logical ids; ``>= E`` contributes nothing.
            gates: ``[T, K]`` floating.

        Returns:
            ``[T, H]``.

        Raises:
            DeviceError: the group's backend cannot send from x's device.
            RoutingError: an id is negative (found on the CPU only).
            TransferError: ranks disagree, a peer died or hangs. It names ranks, nodes and phase.
        """
        if self.exchange is None:
            has_order = self.local_experts == tuple(range(self.placement.num_experts))
            ids = expert_ids if has_order else self._locate(expert_ids)
            return experts(x, ids, gates)
        self.exchange.check_device("PiperMoE", "x", x)
        plan = self._plan(self.exchange, x, expert_ids, gates)
        if plan.needs_grad and torch.is_grad_enabled() and not x.requires_grad:
            # the backward of the exchange runs on all ranks or on none
            x = x.detach().requires_grad_()
        if isinstance(plan.route, DedupRoute):
            return self._run_dedup(plan, plan.route, experts, x, gates)
        return self._run_rows(plan, plan.route, experts, x, gates)

    def plan_of(self, expert_ids: Tensor) -> DispatchPlan | None:
        """The plan kept for these ids; ``None`` if no call had them."""
        return self._kept.get(expert_ids)

    def _run_rows(
        self, plan: DispatchPlan, route: Route, experts: RunExperts, x: Tensor, gates: Tensor
    ) -> Tensor:
        """A row for each (token, k); gates are applied where the token is."""
        permutation = Permutation.from_expert_ids(plan.physical_ids, self.placement.num_slots)
        # sorted by physical id, rows are sorted by rank; sentinels stay at the end and here
        ids = plan.physical_ids.reshape(-1, 1)[permutation.row_to_slot.long()]
        rows, ids = (t[: route.num_sent] for t in (permute(x, permutation), ids.to(torch.int32)))
        rows, ids = move_rows(route, rows, ids)
        y = experts(rows, self._local_ids(ids), gates.new_ones(len(rows), 1))
        (y,) = move_rows(route.reverse(), y)
        unused = y.new_zeros(permutation.num_rows - len(y), y.shape[1])
        return unpermute(torch.cat([y, unused]), gates, permutation)

    def _run_dedup(
        self, plan: DispatchPlan, route: DedupRoute, experts: RunExperts, x: Tensor, gates: Tensor
    ) -> Tensor:
        """A row for each (token, rank); gates travel with it and are applied there."""
        ids = plan.physical_ids.to(torch.int32)
        rows, gates, ids = spread_rows(route, self._ranks_of, x, gates, ids)
        local_ids = self._local_ids(ids)
        gates = torch.where(local_ids < self.num_local_experts, gates, 0.0)
        (y,) = collect_rows(route, experts(rows, local_ids, gates))
        return y

    def _plan(
        self, exchange: ExchangeGroup, x: Tensor, expert_ids: Tensor, gates: Tensor
    ) -> DispatchPlan:
        """The plan kept for these ids, or a new one that all ranks agree on."""
        out = torch.get_autocast_dtype(x.device.type) if is_autocast_active(x.device) else x.dtype
        names = [str(dtype).removeprefix("torch.") for dtype in (x.dtype, out)]
        key = (expert_ids._version, gates.dtype, x.shape[1], *names)
        tape = current_tape.get()
        replayed = None if tape is None else tape.replay(expert_ids)
        if isinstance(replayed, DispatchPlan):
            return replayed
        plan = self.plan_of(expert_ids)
        if plan is None or plan.key != key:
            plan = self._agree(exchange, key, x, expert_ids, gates)
            self._kept[expert_ids] = plan
        if tape is not None:
            tape.record(expert_ids, plan)
        return plan

    def _agree(
        self,
        exchange: ExchangeGroup,
        key: tuple[object, ...],
        x: Tensor,
        expert_ids: Tensor,
        gates: Tensor,
    ) -> DispatchPlan:
        """Exchange counts, compare, and plan."""
        physical_ids = self._locate(expert_ids)
        is_on_rank, is_on_node, counts = self._count(exchange, physical_ids)
        header = Header(
            function="PiperMoE",
            dtype="/".join(map(str, key[-2:])),
            row_elements=x.shape[1],
            top_k=expert_ids.shape[1],
            algorithm=self.algorithm,
            placement=self.placement.digest(),
            is_recording=torch.is_grad_enabled(),
            needs_grad=x.requires_grad or gates.requires_grad,
            counts=counts,
        )
        table = exchange_headers(exchange, header, exchange.device_for(x))
        return DispatchPlan(
            key=key,
            physical_ids=physical_ids,
            route=self._route(exchange, table, is_on_rank, is_on_node, x, gates),
            needs_grad=table.needs_grad,
        )

    def _route(
        self,
        exchange: ExchangeGroup,
        table: Table,
        is_on_rank: Tensor,
        is_on_node: Tensor,
        x: Tensor,
        gates: Tensor,
    ) -> Route | DedupRoute:
        rows, rank_rows, node_rows = table.counts
        num_nodes = exchange.topology.num_nodes
        counts = ExchangeCounts(rows=rows, rank_rows=rank_rows, node_rows=node_rows[:, :num_nodes])
        counts.check("PiperMoE", exchange.topology)
        algorithm = self.algorithm
        if algorithm == "auto":
            assert self.choice is not None, "ranks that exchange can choose"
            row_bytes = x.shape[1] * x.element_size()
            extra_bytes = gates.shape[1] * (gates.element_size() + 4)
            algorithm = self.choice.choose(counts, row_bytes + extra_bytes, row_bytes)
        if algorithm == "halo_dedup":
            return DedupRoute(exchange, counts, is_on_rank, is_on_node)
        return plan_route(exchange, counts, algorithm)

    def _count(
        self, exchange: ExchangeGroup, physical_ids: Tensor
    ) -> tuple[Tensor, Tensor, tuple[np.ndarray, np.ndarray, np.ndarray]]:
        """Which tokens go to which ranks and nodes, and how many rows that makes."""
        tables = self._tables_on(physical_ids.device)
        num_ranks, num_nodes = exchange.num_ranks, exchange.topology.num_nodes
        ranks = tables.physical_to_rank[physical_ids]
        is_on_rank = _mark(ranks, num_ranks)
        is_on_node = _mark(tables.physical_to_node[physical_ids], num_nodes)
        rows = torch.bincount(ranks.reshape(-1), minlength=num_ranks + 1)[:num_ranks]
        node_rows = rows.new_zeros(num_ranks)
        node_rows[:num_nodes] = is_on_node.sum(0)
        # the one host synchronisation of the call
        counts = torch.stack([rows, is_on_rank.sum(0), node_rows]).cpu().numpy()
        return is_on_rank, is_on_node, (counts[0], counts[1], counts[2])

    def _locate(self, expert_ids: Tensor) -> Tensor:
        """Physical ids of logical ones; the choice between copies is the placement's."""
        tables = self._tables_on(expert_ids.device)
        ids = expert_ids.long().clamp(max=self.placement.num_experts)
        if ids.device.type == "cpu" and ids.numel() and int(ids.min()) < 0:
            remedy = f"Mark slots that nobody computes with {self.placement.num_experts}."
            given = int(ids.min())
            raise RoutingError(instruction("PiperMoE", "expert_ids", "be >= 0", given, remedy))
        tokens = torch.arange(len(ids), device=ids.device)[:, None]
        return tables.candidates[ids, tokens % tables.num_candidates[ids]]

    def _local_ids(self, physical_ids: Tensor) -> Tensor:
        """Positions in this rank's stack; L for what is elsewhere."""
        local = physical_ids.long() - self._first_physical
        is_here = (local >= 0) & (local < self.num_local_experts)
        return torch.where(is_here, local, self.num_local_experts)

    def _ranks_of(self, physical_ids: Tensor) -> Tensor:
        """``[n, P]`` bool: on which ranks a row's experts are."""
        tables = self._tables_on(physical_ids.device)
        return _mark(tables.physical_to_rank[physical_ids.long()], self.placement.num_ranks)

    def _tables_on(self, device: torch.device) -> _Tables:
        if device not in self._tables:
            self._tables[device] = _build_tables(self, device)
        return self._tables[device]


def _build_tables(dispatcher: Dispatcher, device: torch.device) -> _Tables:
    placement, exchange = dispatcher.placement, dispatcher.exchange
    topology = one_box(1) if exchange is None else exchange.topology
    ranks = placement.maps.physical_to_rank
    nodes = topology.maps.rank_to_node[ranks]
    arrays = (
        dispatcher._choices.candidates,
        dispatcher._choices.num_candidates,
        np.append(ranks, placement.num_ranks),
        np.append(nodes, topology.num_nodes),
    )
    return _Tables(*(torch.from_numpy(array).to(device) for array in arrays))


def _mark(targets: Tensor, num_targets: int) -> Tensor:
    """``[n, num_targets]`` bool from ``[n, k]`` indices; ``num_targets`` itself marks nothing."""
    marks = targets.new_zeros(len(targets), num_targets + 1, dtype=torch.bool)
    return marks.scatter_(1, targets, True)[:, :num_targets]


__all__ = ["DispatchPlan", "Dispatcher", "ExpertParallel", "RunExperts"]
