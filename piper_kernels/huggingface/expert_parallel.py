"""``ep_implementation="piper"``: our exchange behind transformers' expert parallelism.

transformers (5.24) shards the experts, slices batches over tensor parallelism and hands over global
expert ids; how tokens reach the experts is this implementation's part. It goes with any
``experts_implementation``.

Letters: T tokens of the batch, H hidden_size, K experts per token, L experts of this rank.
"""

import importlib
import logging
from typing import Any, Protocol

import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh

from piper_kernels.dist.dispatcher import Dispatcher, ExpertParallel
from piper_kernels.dist.expert_parallel import Exchange
from piper_kernels.dist.topology import Topology
from piper_kernels.dist.tp_slices import gather_slices, take_slice

EP_IMPLEMENTATION = "piper"

logger = logging.getLogger(__name__)


class _ExpertsForward(Protocol):
    def __call__(self, rows: Tensor, ids: Tensor, gates: Tensor, /) -> Tensor: ...


def register_expert_parallel(
    topology: Topology | None = None,
    exchange: Exchange = "auto",
    *,
    timeout_s: float | None = None,
    name: str = EP_IMPLEMENTATION,
) -> bool:
    """Make an exchange selectable as ``DistributedConfig(ep_size=..., ep_implementation="piper")``.

    ``import piper_kernels.huggingface`` calls it without arguments. Call it with a topology before
    models are loaded; models that exist keep what they have.

    Args:
        topology: of all ranks of the job; ``None``: nothing is known about nodes, exchanges are
            flat.
        exchange: ``auto``, ``flat``, ``halo`` or ``halo_dedup``.
        timeout_s: for one message, in seconds; ``None``: the process group's own.
        name: under which it is selected.

    Returns:
        Whether this transformers has such a registry.

    Raises:
        ConfigError: an unknown exchange.

    Source: transformers 5.24, ``distributed/expert_parallel.py``.
    """
    options = {"topology": topology, "exchange": exchange, "timeout_s": timeout_s}
    # words errors now rather than in the first forward
    ExpertParallel(**options)  # type: ignore[arg-type]
    try:
        theirs = importlib.import_module("transformers.distributed.expert_parallel")
        registry = theirs.EPImplementationInterface
    except (ImportError, AttributeError):
        logger.debug("this transformers has no registry for expert parallelism")
        return False
    registry.register(name, _implementation(theirs.EPImplementation, options))
    return True


def _implementation(base: type, options: dict[str, Any]) -> type:
    """An implementation with these settings, as a class for the registry."""

    class PiperEP(base):  # type: ignore[misc]
        """Brings each rank's tokens to the experts through a Dispatcher."""

        def __init__(self, experts: Any, ep_mesh: DeviceMesh, tp_mesh: DeviceMesh) -> None:
            super().__init__(experts, ep_mesh, tp_mesh)
            ep = ExpertParallel(ep_mesh.get_group(), **options)
            self.dispatcher = Dispatcher(ep, experts.num_experts * ep_mesh.size())
            self.tp_group = tp_mesh.get_group() if tp_mesh.size() > 1 else None

        def __call__(self, hidden: Tensor, expert_ids: Tensor, gates: Tensor) -> Tensor:
            return run_sliced(
                self.dispatcher, self.experts_forward, self.tp_group, hidden, expert_ids, gates
            )

    return PiperEP


def run_sliced(
    dispatcher: Dispatcher,
    experts_forward: _ExpertsForward,
    tp_group: dist.ProcessGroup | None,
    hidden: Tensor,
    expert_ids: Tensor,
    gates: Tensor,
) -> Tensor:
    """The experts' output for the batch that this rank holds.

    Args:
        dispatcher: of the expert-parallel group.
        experts_forward: this rank's experts, on local ids.
        tp_group: ranks that hold the same batch: each sends its own slice, so no token is computed
            twice; ``None``: there are no others.
        hidden: ``[T, H]``.
        expert_ids: ``[T, K]`` global ids.
        gates: ``[T, K]``.

    Returns:
        ``[T, H]``, on every rank of ``tp_group``.
    """

    def run_experts(rows: Tensor, ids: Tensor, gates: Tensor) -> Tensor:
        if len(rows) == 0:
            # experts of others may not take zero rows, and their parameters' gradients, which FSDP
            # reduces, must exist on every rank: one row of zeros, whose output is cut off
            row = rows.sum(0, keepdim=True)
            return experts_forward(row, ids.new_zeros(1, 1), gates.new_ones(1, 1))[:0]
        return experts_forward(rows, ids, gates)

    if tp_group is None:
        return dispatcher.run(run_experts, hidden, expert_ids, gates)
    num_tokens = len(hidden)
    hidden, expert_ids, gates = (take_slice(t, tp_group) for t in (hidden, expert_ids, gates))
    y = dispatcher.run(run_experts, hidden, expert_ids, gates)
    return gather_slices(y, num_tokens, tp_group)
