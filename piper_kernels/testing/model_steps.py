"""One forward and backward of a transformers model, and the comparison of two of them."""

from copy import deepcopy
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from piper_kernels.testing.tiny_models import first_output


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class ModelStep:
    """What one forward and backward gave.

    Attributes:
        output: logits or last hidden state.
        grads: gradient by parameter name; ``None`` where there is none.
    """

    output: Tensor
    grads: dict[str, Tensor | None]


def token_ids(num_sequences: int = 2, length: int = 7, *, seed: int = 1) -> Tensor:
    """Random ids that every tiny model knows, special ones left out."""
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(3, 60, (num_sequences, length), generator=generator)


def run_step(model: Any, experts: str, **inputs: Any) -> ModelStep:
    """Select ``experts``, then run one forward and the backward of a random weighted sum.

    Args:
        model: a transformers model; its gradients are replaced and then cleared.
        experts: the experts implementation.
        inputs: of the model's forward; default: ``input_ids=token_ids()``.
    """
    model.set_experts_implementation(experts)
    model.zero_grad(set_to_none=True)
    # dropout, jitter and the like draw the same numbers for every implementation
    torch.manual_seed(0)
    output = first_output(model(**(inputs or {"input_ids": token_ids()})))
    generator = torch.Generator().manual_seed(2)
    (output * torch.randn(output.shape, generator=generator).to(output.dtype)).sum().backward()
    grads = {name: parameter.grad for name, parameter in model.named_parameters()}
    model.zero_grad(set_to_none=True)
    return ModelStep(output=output.detach(), grads=grads)


def run_double_step(model: Any, experts: str, **inputs: Any) -> ModelStep:
    """:func:`run_step` of a copy of the model in fp64."""
    return run_step(deepcopy(model).double(), experts, **inputs)


def assert_steps_close(
    actual: ModelStep, expected: ModelStep, tolerance: float, *, truth: ModelStep | None = None
) -> None:
    """Require equal outputs and equal gradients of every parameter, within ``tolerance``.

    The unit of an error is the largest entry of what is compared; of a gradient, plus a thousandth
    of the model's largest gradient: some gradients are 0 but for rounding.

    Args:
        actual: the step under test.
        expected: a plain computation in the same dtype.
        tolerance: in that unit.
        truth: the same in fp64. If given, ``actual`` may be further from it by ``tolerance`` than
            ``expected`` is: two roundings of an ill-conditioned gradient differ by both errors.

    Raises:
        AssertionError: naming the output or the parameter.
    """
    pairs: dict[str, tuple[Tensor | None, Tensor | None]] = {
        "output": (actual.output, expected.output)
    }
    pairs |= {name: (grad, expected.grads[name]) for name, grad in actual.grads.items()}
    present = [grad.abs().max() for grad in expected.grads.values() if grad is not None]
    floor = 1e-3 * float(max(present))
    for name, (ours, theirs) in pairs.items():
        if ours is None or theirs is None:
            assert ours is theirs, f"{name}: a gradient is missing on one side"
            continue
        unit = float(theirs.abs().max()) + (0.0 if name == "output" else floor)
        exact = theirs
        if truth is not None:
            found = truth.output if name == "output" else truth.grads[name]
            assert found is not None, f"{name}: the truth has no gradient"
            exact = found
        error = float((ours - exact).abs().max()) / unit
        allowed = tolerance + float((theirs - exact).abs().max()) / unit
        assert error <= allowed, f"{name}: relative error {error:.3g}, allowed {allowed:.3g}"
