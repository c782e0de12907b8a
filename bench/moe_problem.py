"""One timed problem: a Hugging Face experts module or block with its weights, input and routing.

The module belongs to the shape's own family and is built from its own class, so every variant runs
what a user of that model runs; only ``config._experts_implementation`` differs between them.
"""

import importlib
import math
from dataclasses import dataclass, field
from typing import Any, Literal

import torch
from torch import Tensor, nn

from bench.shapes import Shape
from piper_kernels.config import GPT_OSS_SWIGLU, SWIGLU, Activation, WeightLayout
from piper_kernels.errors import ConfigError, did_you_mean, instruction
from piper_kernels.testing import RoutingKind, make_routing

Op = Literal["experts", "block"]
DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16}
BLOCK_ROUTING = "router"


@dataclass(frozen=True, kw_only=True, slots=True)
class Family:
    """Where Hugging Face keeps a family's classes and what it calls the sizes.

    Attributes:
        module: folder under ``transformers.models``.
        experts_class: the class behind the experts registry.
        block_class: router, experts and shared experts.
        intermediate_key: the configuration's name for I.
        experts_key: its name for E.
        has_wide_gates: the router hands out fp32 gates, not gates in the model's dtype.
        layout: how the weights lie.
        activation: what happens between the projections.
    """

    module: str
    experts_class: str
    block_class: str
    intermediate_key: str = "moe_intermediate_size"
    experts_key: str = "num_experts"
    has_wide_gates: bool = False
    layout: WeightLayout = field(default_factory=WeightLayout)
    activation: Activation = SWIGLU


# read in transformers 5.24, modeling_<module>.py
FAMILIES = {
    "mixtral": Family(
        module="mixtral",
        experts_class="MixtralExperts",
        block_class="MixtralSparseMoeBlock",
        intermediate_key="intermediate_size",
        experts_key="num_local_experts",
        has_wide_gates=True,
    ),
    "olmoe": Family(
        module="olmoe",
        experts_class="OlmoeExperts",
        block_class="OlmoeSparseMoeBlock",
        intermediate_key="intermediate_size",
    ),
    "qwen2_moe": Family(
        module="qwen2_moe",
        experts_class="Qwen2MoeExperts",
        block_class="Qwen2MoeSparseMoeBlock",
    ),
    "qwen3_moe": Family(
        module="qwen3_moe",
        experts_class="Qwen3MoeExperts",
        block_class="Qwen3MoeSparseMoeBlock",
    ),
    "deepseek_v2": Family(
        module="deepseek_v2",
        experts_class="DeepseekV2Experts",
        block_class="DeepseekV2Moe",
        experts_key="n_routed_experts",
        has_wide_gates=True,
    ),
    "deepseek_v3": Family(
        module="deepseek_v3",
        experts_class="DeepseekV3Experts",
        block_class="DeepseekV3MoE",
        experts_key="n_routed_experts",
        has_wide_gates=True,
    ),
    "granitemoe": Family(
        module="granitemoe",
        experts_class="GraniteMoeExperts",
        block_class="GraniteMoeMoE",
        intermediate_key="intermediate_size",
        experts_key="num_local_experts",
    ),
    "gpt_oss": Family(
        module="gpt_oss",
        experts_class="GptOssExperts",
        block_class="GptOssMLP",
        intermediate_key="intermediate_size",
        experts_key="num_local_experts",
        layout=WeightLayout(is_transposed=True, is_interleaved=True),
        activation=GPT_OSS_SWIGLU,
    ),
}


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class Problem:
    """What all variants of a case share.

    Attributes:
        op: ``experts`` is called with the routing below, ``block`` finds its own.
        family: the classes and the layout.
        module: the experts module or the whole block; owns the weights.
        x: ``[T, H]``, wants a gradient.
        expert_ids: ``[T, K]`` int64.
        gates: ``[T, K]`` in the dtype that the family's router hands out; wants a gradient.
        grad_y: ``[T, H]``.
    """

    op: Op
    family: Family
    module: Any
    x: Tensor
    expert_ids: Tensor
    gates: Tensor
    grad_y: Tensor

    @property
    def experts(self) -> Any:
        """The module that holds the expert weights."""
        return self.module if self.op == "experts" else self.module.experts

    def switch(self, implementation: str) -> None:
        """Select an experts implementation and drop all gradients. Not part of what is timed."""
        self.experts.config._experts_implementation = implementation
        for tensor in (self.x, self.gates, *self.module.parameters()):
            tensor.grad = None

    def forward(self) -> Tensor:
        """Run the module once with the implementation that is switched on; ``[T, H]``."""
        if self.op == "experts":
            return self.module(self.x, self.expert_ids, self.gates)
        y = self.module(self.x[None])
        return (y[0] if isinstance(y, tuple) else y)[0]

    def forward_backward(self) -> Tensor:
        """Run forward and backward; gradients are left in ``.grad``."""
        y = self.forward()
        y.backward(self.grad_y)
        return y


def _family(shape: Shape) -> Family:
    if shape.family not in FAMILIES:
        remedy = did_you_mean(shape.family, FAMILIES)
        raise ConfigError(
            instruction("build_problem", "shape.family", "be known", repr(shape.family), remedy)
        )
    return FAMILIES[shape.family]


def model_config(shape: Shape, family: Family) -> Any:
    """A configuration of the family that holds nothing of the model but these sizes."""
    from transformers import CONFIG_MAPPING

    sizes = {
        "hidden_size": shape.H,
        family.intermediate_key: shape.I,
        family.experts_key: shape.E,
        "num_experts_per_tok": shape.K,
        "hidden_act": "silu",
    }
    if shape.family == "qwen2_moe":
        sizes["shared_expert_intermediate_size"] = shape.shared_I
    elif shape.shared_I:
        sizes["n_shared_experts"] = shape.shared_I // shape.I
    return CONFIG_MAPPING[shape.family](**sizes)


def _fill(module: nn.Module, layout: WeightLayout) -> None:
    """Uniform weights that keep a unit input at unit scale; buffers (correction biases) zero."""
    with torch.no_grad():
        for parameter in module.parameters():
            is_stacked_transposed = parameter.dim() == 3 and layout.is_transposed
            fan_in = parameter.shape[-2 if is_stacked_transposed else -1]
            bound = math.sqrt(3.0 / fan_in)
            parameter.uniform_(-bound, bound)
        for buffer in module.buffers():
            buffer.zero_()


def build_problem(
    op: Op, shape: Shape, num_tokens: int, dtype: str, routing: str, *, seed: int = 0
) -> Problem:
    """Build module, input and routing of one case on the CPU.

    Args:
        op: ``experts`` or ``block``.
        shape: H, I, E, K and the family.
        num_tokens: T.
        dtype: a key of ``DTYPES``.
        routing: a kind of ``piper_kernels.testing.make_routing``; a block routes by itself.
        seed: equal seeds give equal problems.
    """
    torch.manual_seed(seed)
    family = _family(shape)
    modeling = importlib.import_module(
        f"transformers.models.{family.module}.modeling_{family.module}"
    )
    name = family.experts_class if op == "experts" else family.block_class
    with torch.device("meta"):
        module = getattr(modeling, name)(model_config(shape, family))
    module = module.to(DTYPES[dtype]).to_empty(device="cpu")
    _fill(module, family.layout)
    x = torch.randn(num_tokens, shape.H).to(DTYPES[dtype])
    grad_y = torch.randn(num_tokens, shape.H).to(DTYPES[dtype])
    if op == "experts":
        kind: RoutingKind = routing  # type: ignore[assignment]
        expert_ids, gates = make_routing(kind, num_tokens, shape.E, shape.K, seed=seed)
        gates = gates if family.has_wide_gates else gates.to(DTYPES[dtype])
    else:
        router = module.router if hasattr(module, "router") else module.gate
        with torch.no_grad():
            _, gates, expert_ids = router(x)
    return Problem(
        op=op,
        family=family,
        module=module,
        x=x.requires_grad_(),
        expert_ids=expert_ids,
        gates=gates.detach().requires_grad_(),
        grad_y=grad_y,
    )
