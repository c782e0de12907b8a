"""One layer's weights, input and routing, made on the device, and the oracle's view of them."""

import torch
from torch import nn

from bench.gpu.device import Device
from bench.moe_problem import FAMILIES, Family, Problem
from bench.shapes import Shape
from piper_kernels.testing import make_routing

# every named shape of the sweep is run as a gated SwiGLU layer in Hugging Face's halves
PLAIN = Family(module="", experts_class="", block_class="")


class Weights(nn.Module):
    """Both projections of all experts."""

    def __init__(self, shape: Shape, dtype: torch.dtype, device: torch.device) -> None:
        super().__init__()
        up = torch.empty(shape.E, 2 * shape.I, shape.H, dtype=dtype, device=device)
        down = torch.empty(shape.E, shape.H, shape.I, dtype=dtype, device=device)
        # unit input gives unit scale
        up.uniform_(-((3.0 / shape.H) ** 0.5), (3.0 / shape.H) ** 0.5)
        down.uniform_(-((3.0 / shape.I) ** 0.5), (3.0 / shape.I) ** 0.5)
        self.gate_up_proj, self.down_proj = nn.Parameter(up), nn.Parameter(down)


def make_problem(
    shape: Shape, num_tokens: int, device: Device, *, dtype: torch.dtype = torch.bfloat16
) -> Problem:
    """Uniform routing, fp32 gates; x and gates want gradients, like the weights.

    Args:
        shape: H, I, E, K.
        num_tokens: T.
        device: where everything lies.
        dtype: of all but the gates.
    """
    torch.manual_seed(0)
    where = device.torch_device
    ids, gates = make_routing("uniform", num_tokens, shape.E, shape.K)
    return Problem(
        op="experts",
        family=PLAIN,
        module=Weights(shape, dtype, where),
        x=torch.randn(num_tokens, shape.H, device=where).to(dtype).requires_grad_(),
        expert_ids=ids.to(where),
        gates=gates.to(where).requires_grad_(),
        grad_y=torch.randn(num_tokens, shape.H, device=where).to(dtype),
    )


def gemm_flops(shape: Shape, num_tokens: int, *, has_backward: bool) -> int:
    """FLOPs of the layer's matrix products: three matrices forward, twice as many backward.

    Example:
        >>> shape = Shape(name="x", H=2, I=3, E=4, K=1, family="", source="")
        >>> gemm_flops(shape, 5, has_backward=False)
        180
    """
    return 2 * num_tokens * shape.K * 3 * shape.H * shape.I * (3 if has_backward else 1)


def weight_bytes(shape: Shape, element_bytes: int = 2) -> int:
    """Bytes of all experts' weights."""
    return shape.num_parameters * element_bytes


def is_known_to_transformers(shape: Shape) -> bool:
    """Whether the bench knows the shape's class in transformers."""
    return shape.family in FAMILIES
