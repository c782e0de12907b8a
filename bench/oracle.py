"""What a case must give, in fp64, at its full number of tokens and for little work.

Two exact restrictions make that cheap. A token's output and input gradient depend on that token and
its K experts alone, so a few tokens are computed alone. The weight gradients of an intermediate
channel depend on that channel's weights alone, so every expert is computed over a few channels.
"""

import torch
from torch import Tensor

from bench.gate import Expected
from bench.moe_problem import Problem
from piper_kernels.config import WeightLayout
from piper_kernels.reference.experts import experts

NUM_TOKENS_CHECKED = 8
NUM_CHANNELS_CHECKED = 16


def spread(size: int, num: int) -> Tensor:
    """At most ``num`` different indices below ``size``, first and last among them."""
    return torch.linspace(0, max(size - 1, 0), min(size, num)).round().long().unique()


def preact_channels(channels: Tensor, intermediate_size: int, layout: WeightLayout) -> Tensor:
    """Where the given intermediate channels lie in the first projection: gate, then up.

    Example:
        >>> preact_channels(torch.tensor([1]), 4, WeightLayout())
        tensor([1, 5])
    """
    if not layout.is_gated:
        return channels
    if layout.is_interleaved:
        return torch.stack([2 * channels, 2 * channels + 1], dim=1).flatten()
    return torch.cat([channels, channels + intermediate_size])


def _weights(problem: Problem) -> dict[str, Tensor | None]:
    """The expert weights by the oracle's argument names, without autograd."""
    module = problem.experts
    biases = {"gate_up_bias": "gate_up_proj_bias", "down_bias": "down_proj_bias"}
    found: dict[str, Tensor | None] = {
        "gate_up_proj": module.gate_up_proj.detach(),
        "down_proj": module.down_proj.detach(),
    }
    for argument, attribute in biases.items():
        bias = getattr(module, attribute, None)
        found[argument] = None if bias is None else bias.detach()
    return found


def _pick(weights: dict[str, Tensor | None], index: Tensor) -> dict[str, Tensor | None]:
    """The weights of some experts, in fp64."""
    return {name: None if w is None else w[index].double() for name, w in weights.items()}


def expected_tokens(problem: Problem, *, has_gradients: bool) -> list[Expected]:
    """Output, input gradient and gate gradients of a few tokens of an experts problem."""
    weights = _weights(problem)
    tokens = spread(problem.x.shape[0], NUM_TOKENS_CHECKED)
    expected, grad_gates = [], []
    for token in tokens.tolist():
        ids, local_ids = problem.expert_ids[token].unique(return_inverse=True)
        x = problem.x.detach()[token : token + 1].double().requires_grad_()
        gates = problem.gates.detach()[token : token + 1].double().requires_grad_()
        y = experts(
            x,
            local_ids[None],
            gates,
            layout=problem.family.layout,
            activation=problem.family.activation,
            **_pick(weights, ids),  # type: ignore[arg-type]
        )
        expected.append(Expected(name="y", index=token, value=y.detach()[0]))
        if has_gradients:
            y.backward(problem.grad_y[token : token + 1].double())
            expected.append(Expected(name="grad_x", index=token, value=_grad(x)[0]))
            grad_gates.append(_grad(gates)[0])
    if grad_gates:
        expected.append(Expected(name="grad_gates", index=tokens, value=torch.stack(grad_gates)))
    return expected


def _grad(tensor: Tensor) -> Tensor:
    assert tensor.grad is not None
    return tensor.grad


def expected_weight_grads(problem: Problem) -> list[Expected]:
    """Weight and bias gradients of every expert over a few intermediate channels."""
    layout, weights = problem.family.layout, _weights(problem)
    down = weights["down_proj"]
    assert down is not None
    num_experts, inter = down.shape[0], down.shape[1 if layout.is_transposed else 2]
    channels = spread(inter, NUM_CHANNELS_CHECKED)
    preact = preact_channels(channels, inter, layout)
    parts = {
        "gate_up_proj": (slice(None), preact) if layout.is_transposed else (preact,),
        "down_proj": (channels,) if layout.is_transposed else (slice(None), channels),
        "gate_up_bias": (preact,),
        "down_bias": (slice(None),),
    }
    expected = []
    for expert in range(num_experts):
        leaves = {
            name: None if w is None else w[(expert, *parts[name])][None].double().requires_grad_()
            for name, w in weights.items()
        }
        is_empty = not (problem.expert_ids == expert).any()
        if not is_empty:
            _backward_of_expert(problem, expert, leaves)
        for name, leaf in leaves.items():
            if leaf is not None:
                # without rows the gradient is zero to the bit
                grad = torch.zeros_like(leaf) if is_empty else _grad(leaf)
                index = (expert, *parts[name])
                expected.append(Expected(name=f"grad_{name}", index=index, value=grad[0].detach()))
    return expected


def _backward_of_expert(problem: Problem, expert: int, leaves: dict[str, Tensor | None]) -> None:
    """Run the oracle over the rows of one expert and leave gradients in ``leaves``."""
    tokens, ks = (problem.expert_ids == expert).nonzero(as_tuple=True)
    y = experts(
        problem.x.detach()[tokens].double(),
        torch.zeros_like(tokens)[:, None],
        problem.gates.detach()[tokens, ks][:, None].double(),
        layout=problem.family.layout,
        activation=problem.family.activation,
        **leaves,  # type: ignore[arg-type]
    )
    y.backward(problem.grad_y[tokens].double())


def expected_outputs(problem: Problem, *, has_gradients: bool) -> list[Expected]:
    """Everything that a variant of this problem is checked against.

    A block's own part (router, shared experts) is common to all its variants. Its output is
    checked as that part, with the experts giving zero, plus the oracle's experts; its input
    gradient, which runs through the router too, is not checked.
    """
    expected = expected_tokens(problem, has_gradients=has_gradients and problem.op == "experts")
    if problem.op == "block":
        problem.switch(ZERO_EXPERTS)
        with torch.no_grad():
            common = problem.forward().double()
        expected = [
            Expected(name=part.name, index=part.index, value=part.value + common[part.index])
            for part in expected
        ]
    return expected + (expected_weight_grads(problem) if has_gradients else [])


# an experts implementation that contributes nothing, under the bench's own name
ZERO_EXPERTS = "bench_zero"


def zero_experts(
    module: torch.nn.Module, hidden_states: Tensor, top_k_index: Tensor, top_k_weights: Tensor
) -> Tensor:
    """An experts function that gives zeros."""
    return torch.zeros_like(hidden_states)
