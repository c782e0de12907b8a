"""unpermute: the gate-weighted sum of each token's K rows, back in token order."""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from piper_kernels.config import Backend
from piper_kernels.errors import check_same_device, check_shape
from piper_kernels.functional.backend import choose_for, load
from piper_kernels.functional.dtypes import gate_dtype
from piper_kernels.functional.routing_metadata import maps_of, permutation_of
from piper_kernels.functional.transforms import (
    last_derivative,
    register_loop_over_batch,
)
from piper_kernels.permutation import Permutation
from piper_kernels.reference.unpermute import unpermute as reference_unpermute


@torch.library.custom_op("piper::unpermute", mutates_args=())
def _unpermute(rows: Tensor, gates: Tensor, maps: Sequence[Tensor], backend: str) -> Tensor:
    permutation = permutation_of(maps, maps[0].shape[0], gates.shape[1])
    return load(backend, "unpermute").unpermute_forward(rows, gates, permutation)


@_unpermute.register_fake
def _(rows: Tensor, gates: Tensor, maps: Sequence[Tensor], backend: str) -> Tensor:
    return rows.new_empty(gates.shape[0], rows.shape[1])


@torch.library.custom_op("piper::unpermute_backward", mutates_args=())
def _unpermute_backward(
    grad_y: Tensor, rows: Tensor, gates: Tensor, maps: Sequence[Tensor], backend: str
) -> tuple[Tensor, Tensor]:
    permutation = permutation_of(maps, maps[0].shape[0], gates.shape[1])
    return load(backend, "unpermute").unpermute_backward(grad_y, rows, gates, permutation)


@_unpermute_backward.register_fake
def _(
    grad_y: Tensor, rows: Tensor, gates: Tensor, maps: Sequence[Tensor], backend: str
) -> tuple[Tensor, Tensor]:
    return rows.new_empty(rows.shape), gates.new_empty(gates.shape)


register_loop_over_batch(_unpermute)
register_loop_over_batch(_unpermute_backward)
_unpermute_gradient = last_derivative("unpermute", _unpermute_backward)


class UnpermuteFunction(torch.autograd.Function):
    """``(rows, gates, maps, backend) -> y``; keeps rows, gates and the maps."""

    generate_vmap_rule = True

    @staticmethod
    def forward(rows: Tensor, gates: Tensor, maps: list[Tensor], backend: str) -> Tensor:
        """Run the op."""
        return _unpermute(rows, gates, maps, backend)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
        """Keep what the backward reads."""
        rows, gates, maps, ctx.backend = inputs
        ctx.save_for_backward(rows, gates, *maps)

    @staticmethod
    def backward(ctx: Any, grad_y: Tensor) -> tuple[Any, ...]:
        """Spread each token's gradient over its rows."""
        rows, gates, *maps = ctx.saved_tensors
        grads = _unpermute_gradient(grad_y, rows, gates, maps, ctx.backend)
        return *grads, None, None


def unpermute(
    rows: Tensor, gates: Tensor, permutation: Permutation, *, backend: Backend = "auto"
) -> Tensor:
    """``y[t] = sum_k gates[t, k] * rows[slot_to_row[t*K + k]]`` over valid rows, in ascending k.

    The sum is taken in at least fp32 and rounded once.

    Args:
        rows: ``[R, H]``, any floating dtype and strides. Sentinel rows may hold anything.
        gates: ``[T, K]``; cast to fp32 (fp64 with fp64 rows).
        permutation: built for the same T and K.
        backend: ``auto``, ``triton``, ``cpu`` or ``reference``.

    Returns:
        ``[T, H]`` in the dtype of ``rows``.

    Raises:
        ShapeError: rows are not ``[R, H]`` or gates not ``[T, K]``.
        DeviceError: the tensors lie on different devices.
        BackendError: the backend cannot run here.

    Example:
        >>> ids = torch.tensor([[1, 0]])
        >>> permutation = Permutation.from_expert_ids(ids, num_experts=2)
        >>> unpermute(torch.tensor([[2.0], [4.0]]), torch.tensor([[0.25, 0.75]]), permutation)
        tensor([[2.5000]])
    """
    num_tokens, top_k = permutation.num_tokens, permutation.top_k
    check_shape("unpermute", "rows", rows, ("R", "H"), (permutation.num_rows, None))
    check_shape("unpermute", "gates", gates, ("T", "K"), (num_tokens, top_k))
    check_same_device(
        "unpermute", {"rows": rows, "gates": gates, "permutation": permutation.row_to_slot}
    )
    gates = gates.to(gate_dtype(rows.dtype))
    choice = choose_for("unpermute", backend, rows, rows.dtype)
    if choice.backend == "reference":
        return reference_unpermute(rows, gates, permutation)
    return UnpermuteFunction.apply(rows, gates, list(maps_of(permutation)), choice.backend)
