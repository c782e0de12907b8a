"""What every differentiable op here shares: a vmap rule, and clear refusals.

An op is a pair of ``torch.library.custom_op`` (so that torch.compile sees one node each, with
shapes and without looking inside) under a ``torch.autograd.Function`` with ``setup_context``:
torch.func refuses the Functions that ``custom_op.register_autograd`` makes (torch 2.13).
"""

from collections.abc import Callable
from typing import Any, NoReturn

import torch
from torch import Tensor

from piper_kernels.errors import BackendError


def register_loop_over_batch(op: Any) -> None:
    """Give a custom op a vmap rule: run it once per sample and stack the results.

    Right for every op, and as fast as the loop a caller would write; there is no batched kernel.
    """

    def pick(argument: Any, dim: Any, sample: int) -> Any:
        if isinstance(dim, list | tuple):
            return [pick(a, d, sample) for a, d in zip(argument, dim, strict=True)]
        return argument if dim is None else argument.select(dim, sample)

    def rule(info: Any, in_dims: tuple[Any, ...], *arguments: Any) -> tuple[Any, Any]:
        samples = [
            op(*(pick(a, d, i) for a, d in zip(arguments, in_dims, strict=True)))
            for i in range(info.batch_size)
        ]
        if isinstance(samples[0], Tensor):
            return torch.stack(samples), 0
        outputs = tuple(torch.stack(column) for column in zip(*samples, strict=True))
        return outputs, (0,) * len(outputs)

    op.register_vmap(rule)


def refuse_second_derivative(function: str) -> NoReturn:
    """Raise ``BackendError``: the backward of a backward was asked for."""
    raise BackendError(
        f"{function}: a second derivative was asked for, but backends 'cpu' and 'triton' have "
        "first derivatives only. Use backend='reference', or drop create_graph=True."
    )


def last_derivative(function: str, backward_op: Any) -> Callable[..., Any]:
    """Wrap a backward op so that differentiating it again is refused instead of being zero."""

    class LastDerivative(torch.autograd.Function):
        generate_vmap_rule = True

        @staticmethod
        def forward(*arguments: Any) -> Any:
            return backward_op(*arguments)

        @staticmethod
        def setup_context(ctx: Any, inputs: Any, output: Any) -> None:
            pass

        @staticmethod
        def backward(ctx: Any, *grads: Any) -> Any:
            refuse_second_derivative(function)

    def run(*arguments: Any) -> Any:
        # torch.compile refuses second derivatives by itself, and cannot trace this class
        if torch.compiler.is_compiling():
            return backward_op(*arguments)
        return LastDerivative.apply(*arguments)

    return run
