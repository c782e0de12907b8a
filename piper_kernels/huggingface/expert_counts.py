"""Which experts the tokens went to, counted beside the forward pass without slowing it."""

import re
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from piper_kernels.errors import CheckpointError, instruction


def expert_modules(model: nn.Module) -> dict[int, tuple[str, Any]]:
    """The modules that hold expert weights, by the number of their layer in the model.

    They are the classes that transformers decorates with ``use_experts_implementation``.

    Returns:
        Layer number -> (module name, module), in ascending order.

    Raises:
        CheckpointError: if two of them share a layer number, since checkpoint keys would clash.

    Example:
        ``{0: ("model.layers.0.mlp.experts", ...), 1: ("model.layers.1.mlp.experts", ...)}``
    """
    found: dict[int, tuple[str, Any]] = {}
    for name, module in model.named_modules():
        if not hasattr(module, "_is_expert_parallel"):
            continue
        layer = int((re.findall(r"\.(\d+)\.", name) or ["0"])[-1])
        if layer in found:
            requirement = "have one module of experts per layer"
            value = f"{found[layer][0]} and {name}"
            raise CheckpointError(instruction("expert_modules", "model", requirement, value))
        found[layer] = (name, module)
    return dict(sorted(found.items()))


def experts_arguments(
    args: tuple[Any, ...], kwargs: dict[str, Any]
) -> tuple[Tensor, Tensor, Tensor]:
    """Hidden states ``[T, H]``, expert ids and gates ``[T, K]`` of a call of an experts module."""
    names = ("hidden_states", "top_k_index", "top_k_weights")
    given = dict(zip(names, args, strict=False)) | kwargs
    hidden_states, expert_ids, gates = (given[name] for name in names)
    return hidden_states, expert_ids, gates


def num_logical_experts(module: Any) -> int:
    """E of an experts module, wherever its experts are."""
    dispatcher = getattr(module, "dispatcher", None)
    return int(module.num_experts if dispatcher is None else dispatcher.placement.num_experts)


def local_expert_ids(module: Any) -> tuple[int, ...]:
    """Logical ids of the experts that a module's tensors hold, in their order."""
    dispatcher = getattr(module, "dispatcher", None)
    return tuple(range(module.num_experts)) if dispatcher is None else dispatcher.local_experts


class ExpertCounter:
    """Counts routed rows per layer and expert while ``counting()`` is open.

    Only forward passes inside ``counting()`` count, so evaluation, and the recomputation of
    checkpointed layers in backward, leave no trace. Counting makes no host synchronisation. Where
    ranks share experts, the rows of this rank's own tokens are counted, for all logical experts.

    Args:
        model: whose experts are watched.

    Attributes:
        layers: layer number of each row of ``counts``.
        counts: ``[num_layers, E]`` int64, rows since the last ``take()``.
        routed: per layer, ``(expert_ids [T, K], gates [T, K])`` of the last counted forward pass.

    Example:
        ``with counter.counting(): model(input_ids=tokens)``, then ``counter.take()``, for 256
        tokens, 2 layers, 2 experts and K = 1: ``[[130, 126], [127, 129]]``.
    """

    def __init__(self, model: nn.Module) -> None:
        modules = expert_modules(model)
        self.layers = list(modules)
        self._is_counting = False
        self._mask: Tensor | None = None
        num_experts = max(num_logical_experts(module) for _, module in modules.values())
        first = next(model.parameters())
        self.counts = torch.zeros(len(modules), num_experts, dtype=torch.int64).to(first.device)
        self.routed: dict[int, tuple[Tensor, Tensor]] = {}
        for row, (_, module) in enumerate(modules.values()):
            module.register_forward_pre_hook(self._hook(row), with_kwargs=True)

    @contextmanager
    def counting(self, mask: Tensor | None = None) -> Iterator[None]:
        """Count what is routed inside this block.

        Args:
            mask: ``[T]`` or ``[B, S]``, not 0 is a real token; padding is routed, not counted.
        """
        self._is_counting, self._mask = True, None if mask is None else mask.reshape(-1) != 0
        try:
            yield
        finally:
            self._is_counting, self._mask = False, None

    def take(self) -> list[list[int]]:
        """The counts since the last call, as ``[num_layers][E]``, and start from zero."""
        counts: list[list[int]] = self.counts.tolist()
        self.counts.zero_()
        self.routed.clear()
        return counts

    def _hook(self, row: int) -> Any:
        counts, layer = self.counts[row], self.layers[row]

        def count(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
            if self._is_counting:
                _, expert_ids, gates = experts_arguments(args, kwargs)
                slots = expert_ids.reshape(-1)
                rows = torch.ones_like(slots)
                if self._mask is not None:
                    rows = self._mask.to(slots.dtype).repeat_interleave(expert_ids.shape[-1])
                counts.scatter_add_(0, slots, rows)
                self.routed[layer] = (expert_ids, gates.detach())

        return count
