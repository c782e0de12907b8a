"""Inputs for one layer's experts, and what the oracle makes of them."""

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from piper_kernels.config import SWIGLU, Activation, WeightLayout
from piper_kernels.contracts import ExpertsNeeds, ExpertsWeights
from piper_kernels.permutation import Permutation
from piper_kernels.reference.experts import experts
from piper_kernels.testing.routing import RoutingKind, make_routing

NEEDS_ALL = ExpertsNeeds(
    x=True, gates=True, gate_up_proj=True, down_proj=True, gate_up_bias=True, down_bias=True
)


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class ExpertsCase:
    """One layer's inputs, weights and incoming gradient, scaled so that outputs are O(1)."""

    x: Tensor
    grad_y: Tensor
    expert_ids: Tensor
    gates: Tensor
    weights: ExpertsWeights

    @property
    def permutation(self) -> Permutation:
        """Of the case's tokens to its experts."""
        return Permutation.from_expert_ids(self.expert_ids, self.weights.num_experts)


def make_experts_case(
    sizes: tuple[int, int, int, int, int],
    *,
    kind: RoutingKind = "skewed",
    dtype: torch.dtype = torch.float32,
    layout: WeightLayout | None = None,
    activation: Activation = SWIGLU,
    has_bias: bool = False,
) -> ExpertsCase:
    """Random inputs for experts of the given sizes.

    Args:
        sizes: ``(T, H, I, E, K)``.
        kind: of the routing.
        dtype: of x and weights; gates stay at least fp32.
        layout: default: Hugging Face's halves.
        activation: what happens in between.
        has_bias: give both projections a bias.
    """
    num_tokens, hidden, intermediate, num_experts, top_k = sizes
    layout = layout or WeightLayout()
    wide = torch.promote_types(dtype, torch.float32)
    expert_ids, gates = make_routing(kind, num_tokens, num_experts, top_k, dtype=wide)
    shapes = layout.weight_shapes(num_experts, hidden, intermediate)
    gate_up_proj, down_proj = (torch.randn(shape) for shape in shapes)
    width = layout.preact_size(intermediate)
    return ExpertsCase(
        x=torch.randn(num_tokens, hidden).to(dtype),
        grad_y=torch.randn(num_tokens, hidden).to(dtype),
        expert_ids=expert_ids,
        gates=gates,
        weights=ExpertsWeights(
            gate_up_proj=(gate_up_proj / hidden**0.5).to(dtype),
            down_proj=(down_proj / intermediate**0.5).to(dtype),
            gate_up_bias=torch.randn(num_experts, width).to(dtype) if has_bias else None,
            down_bias=torch.randn(num_experts, hidden).to(dtype) if has_bias else None,
            layout=layout,
            activation=activation,
        ),
    )


def oracle(case: ExpertsCase, dtype: torch.dtype | None = None) -> dict[str, Tensor]:
    """The oracle's output and all gradients, named as in ``ExpertsGrads`` plus ``y``.

    Args:
        case: the inputs.
        dtype: compute in this dtype; ``None``: the case's own.
    """
    weights = case.weights

    def leaf(tensor: Tensor | None, wanted: torch.dtype | None) -> Tensor | None:
        if tensor is None:
            return None
        return tensor.detach().to(wanted or tensor.dtype, copy=True).requires_grad_()

    gates_dtype = dtype and torch.promote_types(dtype, torch.float32)
    leaves: dict[str, Any] = {
        "x": leaf(case.x, dtype),
        "gates": leaf(case.gates, gates_dtype),
        "gate_up_proj": leaf(weights.gate_up_proj, dtype),
        "down_proj": leaf(weights.down_proj, dtype),
        "gate_up_bias": leaf(weights.gate_up_bias, dtype),
        "down_bias": leaf(weights.down_bias, dtype),
    }
    y = experts(
        expert_ids=case.expert_ids, layout=weights.layout, activation=weights.activation, **leaves
    )
    y.backward(case.grad_y.to(y.dtype))
    grads = {name: tensor.grad for name, tensor in leaves.items() if tensor is not None}
    return {"y": y.detach(), **grads}


def map_tensors(case: ExpertsCase, change: Callable[[Tensor], Tensor]) -> ExpertsCase:
    """The case with ``change`` applied to x, grad_y, the weights and the biases."""
    weights = case.weights
    changed: dict[str, Any] = {
        name: None if (tensor := getattr(weights, name)) is None else change(tensor)
        for name in ("gate_up_proj", "down_proj", "gate_up_bias", "down_bias")
    }
    return replace(
        case, x=change(case.x), grad_y=change(case.grad_y), weights=replace(weights, **changed)
    )
