"""permute: copy each token's hidden state to its K rows, in expert-sorted order."""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from piper_kernels.config import Backend
from piper_kernels.errors import check_same_device, check_shape
from piper_kernels.functional.backend import choose_for, load
from piper_kernels.functional.routing_metadata import maps_of, permutation_of
from piper_kernels.functional.transforms import (
    last_derivative,
    register_loop_over_batch,
)
from piper_kernels.permutation import Permutation
from piper_kernels.reference.permute import permute as reference_permute


@torch.library.custom_op("piper::permute", mutates_args=())
def _permute(x: Tensor, maps: Sequence[Tensor], top_k: int, backend: str) -> Tensor:
    permutation = permutation_of(maps, maps[0].shape[0], top_k)
    return load(backend, "permute").permute_forward(x, permutation)


@_permute.register_fake
def _(x: Tensor, maps: Sequence[Tensor], top_k: int, backend: str) -> Tensor:
    return x.new_empty(x.shape[0] * top_k, x.shape[1])


@torch.library.custom_op("piper::permute_backward", mutates_args=())
def _permute_backward(
    grad_rows: Tensor, maps: Sequence[Tensor], top_k: int, backend: str
) -> Tensor:
    permutation = permutation_of(maps, maps[0].shape[0], top_k)
    return load(backend, "permute").permute_backward(grad_rows, permutation)


@_permute_backward.register_fake
def _(grad_rows: Tensor, maps: Sequence[Tensor], top_k: int, backend: str) -> Tensor:
    return grad_rows.new_empty(grad_rows.shape[0] // top_k, grad_rows.shape[1])


register_loop_over_batch(_permute)
register_loop_over_batch(_permute_backward)
_permute_gradient = last_derivative("permute", _permute_backward)


class PermuteFunction(torch.autograd.Function):
    """``(x, maps, top_k, backend) -> rows``; keeps the maps only."""

    generate_vmap_rule = True

    @staticmethod
    def forward(x: Tensor, maps: list[Tensor], top_k: int, backend: str) -> Tensor:
        """Run the op."""
        return _permute(x, maps, top_k, backend)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
        """Keep what the backward reads."""
        _, maps, ctx.top_k, ctx.backend = inputs
        ctx.save_for_backward(*maps)

    @staticmethod
    def backward(ctx: Any, grad_rows: Tensor) -> tuple[Any, ...]:
        """Sum each token's rows."""
        maps = list(ctx.saved_tensors)
        return _permute_gradient(grad_rows, maps, ctx.top_k, ctx.backend), None, None, None


def permute(x: Tensor, permutation: Permutation, *, backend: Backend = "auto") -> Tensor:
    """``rows[r] = x[row_to_token[r]]`` for valid rows, 0 for sentinel rows.

    Args:
        x: ``[T, H]``, any floating dtype and strides.
        permutation: built for the same T.
        backend: ``auto``, ``triton``, ``cpu`` or ``reference``.

    Returns:
        ``[R, H]`` in x's dtype.

    Raises:
        ShapeError: x is not ``[T, H]``.
        DeviceError: the permutation lies on another device.
        BackendError: the backend cannot run here.

    Example:
        >>> ids = torch.tensor([[1], [0]])
        >>> permutation = Permutation.from_expert_ids(ids, num_experts=2)
        >>> permute(torch.tensor([[5.0], [7.0]]), permutation)
        tensor([[7.],
                [5.]])
    """
    check_shape("permute", "x", x, ("T", "H"), (permutation.num_tokens, None))
    check_same_device("permute", {"x": x, "permutation": permutation.row_to_slot})
    choice = choose_for("permute", backend, x, x.dtype)
    if choice.backend == "reference":
        return reference_permute(x, permutation)
    return PermuteFunction.apply(x, list(maps_of(permutation)), permutation.top_k, choice.backend)
