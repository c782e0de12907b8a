"""Inputs of one experts call, and the comparison of all its results with the oracle's."""

from collections.abc import Callable
from dataclasses import dataclass, fields
from functools import partial
from typing import Any

import torch
from torch import Tensor

from piper_kernels.config import SWIGLU, Activation, WeightLayout
from piper_kernels.contracts import ExpertsWeights
from piper_kernels.permutation import Permutation
from piper_kernels.reference.experts import experts as reference_experts
from piper_kernels.testing.closeness import assert_close_to_baseline, unit_of_error
from piper_kernels.testing.routing import RoutingKind, make_routing

# of the hidden dim, in which the baseline is summed
NUM_ORDERS = 4

DIFFERENTIABLE = ("x", "gates", "gate_up_proj", "down_proj", "gate_up_bias", "down_bias")


@dataclass(frozen=True, kw_only=True, slots=True, eq=False, repr=False)
class ExpertsInputs:
    """Everything that one forward and backward of ``experts`` reads."""

    x: Tensor
    expert_ids: Tensor
    gates: Tensor
    gate_up_proj: Tensor
    down_proj: Tensor
    gate_up_bias: Tensor | None
    down_bias: Tensor | None
    grad_y: Tensor
    layout: WeightLayout
    activation: Activation

    @property
    def permutation(self) -> Permutation:
        """Of these tokens to their experts, as a backend's raw functions take it."""
        return Permutation.from_expert_ids(self.expert_ids, len(self.gate_up_proj))

    @property
    def weights(self) -> ExpertsWeights:
        """Weights and biases, as a backend's raw functions take them."""
        return ExpertsWeights(
            gate_up_proj=self.gate_up_proj,
            down_proj=self.down_proj,
            gate_up_bias=self.gate_up_bias,
            down_bias=self.down_bias,
            layout=self.layout,
            activation=self.activation,
        )

    def to(self, dtype: torch.dtype) -> "ExpertsInputs":
        """The same values in another dtype (gates at least fp32), contiguous."""
        wide = torch.promote_types(dtype, torch.float32)
        return self.map(lambda name, t: t.to(wide if name == "gates" else dtype).contiguous())

    def map(self, change: Callable[[str, Tensor], Tensor]) -> "ExpertsInputs":
        """The same call with every floating tensor changed by ``change(name, tensor)``."""
        values: dict[str, Any] = {field.name: getattr(self, field.name) for field in fields(self)}
        for name, value in values.items():
            if isinstance(value, Tensor) and value.is_floating_point():
                values[name] = change(name, value)
        return ExpertsInputs(**values)

    def __repr__(self) -> str:
        """Sizes and strides instead of numbers."""
        parts = []
        for field in fields(self):
            value = getattr(self, field.name)
            if isinstance(value, Tensor):
                value = f"{list(value.shape)} {str(value.dtype)[6:]} strides {value.stride()}"
            parts.append(f"{field.name}: {value}")
        return f"ExpertsInputs({'; '.join(parts)}; ids {self.expert_ids.tolist()})"

    def _repr_pretty_(self, printer: Any, cycle: bool) -> None:
        """What hypothesis prints."""
        printer.text(repr(self))


def make_experts_inputs(
    num_tokens: int,
    hidden_size: int,
    intermediate_size: int,
    num_experts: int,
    top_k: int,
    *,
    routing: RoutingKind = "uniform",
    dtype: torch.dtype = torch.float32,
    layout: WeightLayout | None = None,
    activation: Activation = SWIGLU,
    has_gate_up_bias: bool = False,
    has_down_bias: bool = False,
    seed: int = 0,
) -> ExpertsInputs:
    """Random inputs, scaled so that y and all gradients are of order 1.

    Args:
        num_tokens: T.
        hidden_size: H.
        intermediate_size: I.
        num_experts: E.
        top_k: K.
        routing: see :func:`make_routing`.
        dtype: of all but the gates, which are fp32 (fp64 for fp64).
        layout: default: halves.
        activation: default: SwiGLU.
        has_gate_up_bias: with a first bias.
        has_down_bias: with a second bias.
        seed: equal seeds give equal inputs.

    Returns:
        The inputs, on the CPU.
    """
    layout = layout or WeightLayout()
    generator = torch.Generator().manual_seed(seed)
    expert_ids, gates = make_routing(
        routing,
        num_tokens,
        num_experts,
        top_k,
        dtype=torch.promote_types(dtype, torch.float32),
        seed=seed,
    )

    def normal(*shape: int, scale: float = 1.0) -> Tensor:
        values = torch.randn(*shape, generator=generator, dtype=torch.float64)
        return (values * scale).to(dtype)

    gate_up, down = layout.weight_shapes(num_experts, hidden_size, intermediate_size)
    width = layout.preact_size(intermediate_size)
    return ExpertsInputs(
        x=normal(num_tokens, hidden_size),
        expert_ids=expert_ids,
        gates=gates,
        gate_up_proj=normal(*gate_up, scale=hidden_size**-0.5),
        down_proj=normal(*down, scale=intermediate_size**-0.5),
        gate_up_bias=normal(num_experts, width) if has_gate_up_bias else None,
        down_bias=normal(num_experts, hidden_size) if has_down_bias else None,
        grad_y=normal(num_tokens, hidden_size),
        layout=layout,
        activation=activation,
    )


def run_experts(
    experts: Callable[..., Tensor], inputs: ExpertsInputs, **options: Any
) -> dict[str, Tensor]:
    """``y`` and the gradient of every differentiable input that is there.

    Args:
        experts: with the signature of ``functional.experts``.
        inputs: what to call it with; the tensors are taken as they are, strides included.
        **options: passed on, e.g. ``save="x"``.

    Returns:
        ``{"y": ..., "x": grad of x, "gates": ...}``.
    """
    present = [name for name in DIFFERENTIABLE if getattr(inputs, name) is not None]
    leaves = {name: getattr(inputs, name).detach().requires_grad_() for name in present}
    y = experts(
        leaves["x"],
        inputs.expert_ids,
        leaves["gates"],
        leaves["gate_up_proj"],
        leaves["down_proj"],
        layout=inputs.layout,
        activation=inputs.activation,
        gate_up_bias=leaves.get("gate_up_bias"),
        down_bias=leaves.get("down_bias"),
        **options,
    )
    grads = torch.autograd.grad(y, list(leaves.values()), inputs.grad_y)
    return {"y": y.detach(), **dict(zip(present, grads, strict=True))}


def assert_experts_match_oracle(
    actual: dict[str, Tensor], inputs: ExpertsInputs, *, slack: float = 4.0
) -> None:
    """Hold y and every gradient to the oracle: as exact as plain torch in the same dtype.

    In fp32 an element's error is the luck of one order of sums: in another order plain torch itself
    exceeds its first error by up to 13 ulp somewhere (T 11, H 320, I 130). So there the worst error
    of several orders is allowed everywhere; in 16 bits the last rounding outweighs them all.

    Args:
        actual: what :func:`run_experts` returned for ``inputs``.
        inputs: the inputs.
        slack: see :func:`assert_close_to_baseline`.

    Raises:
        AssertionError: naming the gradient and the worst element.
    """
    truth = run_experts(reference_experts, inputs.to(torch.float64))
    first, *others = _baselines(inputs.to(inputs.x.dtype))
    assert actual.keys() == truth.keys(), f"{sorted(actual)}, want {sorted(truth)}"
    # inputs are of order 1, so a sum of n products of them is of order sqrt(n)
    most_rows = int(inputs.expert_ids.flatten().bincount().max()) if inputs.x.numel() else 1
    inner_size = inputs.down_proj.numel() // inputs.x.shape[1] // len(inputs.down_proj)
    num_terms = {"y": inner_size, "x": inner_size, "gates": inputs.x.shape[1]}
    for name, value in actual.items():
        assert value.dtype == first[name].dtype, f"{name}: {value.dtype}"
        # the gates' gradient is fp32, but a product of rounded factors
        dtype, term_size = inputs.x.dtype, num_terms.get(name, most_rows) ** 0.5
        worst = 0.0
        if others and value.numel():
            unit = unit_of_error(truth[name], dtype, term_size)
            errors = [(one[name].double() - truth[name]).abs() / unit for one in (first, *others)]
            worst = max(float(error.max()) for error in errors)
        assert_close_to_baseline(
            name,
            value,
            first[name],
            truth[name],
            slack=slack + worst,
            term_size=term_size,
            compute_dtype=dtype,
        )


def _baselines(inputs: ExpertsInputs) -> list[dict[str, Tensor]]:
    """The oracle's results in the inputs' dtype; in fp32, for several orders of the hidden dim."""
    found = [run_experts(reference_experts, inputs)]
    if inputs.x.dtype != torch.float32:
        return found
    gate_up, down = (1, 2) if inputs.layout.is_transposed else (2, 1)
    always = dict.fromkeys(("x", "grad_y", "y", "down_bias"), 1)
    dims = {**always, "gate_up_proj": gate_up, "down_proj": down}
    generator = torch.Generator().manual_seed(0)
    while len(found) < NUM_ORDERS:
        order = torch.randperm(inputs.x.shape[1], generator=generator)
        results = run_experts(reference_experts, inputs.map(partial(_reorder, dims, order)))
        back = partial(_reorder, dims, order.argsort())
        found.append({name: back(name, result) for name, result in results.items()})
    return found


def _reorder(dims: dict[str, int], order: Tensor, name: str, tensor: Tensor) -> Tensor:
    return tensor.index_select(dims[name], order) if name in dims else tensor
