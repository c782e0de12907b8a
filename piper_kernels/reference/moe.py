"""moe: a whole layer, once it is known where each token goes."""

from collections.abc import Mapping

import torch
import torch.nn.functional as F
from torch import Tensor

from piper_kernels.config import MoEConfig, WeightLayout
from piper_kernels.reference.activation import activation
from piper_kernels.reference.experts import experts
from piper_kernels.routing import Routing


def moe(x: Tensor, routing: Routing, parameters: Mapping[str, Tensor], config: MoEConfig) -> Tensor:
    """``y = experts(x) (+ shared experts(x))``, with ids and gates from ``routing``.

    Args:
        x: ``[T, H]``.
        routing: ids and gates as they are used, capacity included.
        parameters: named as in ``PiperMoE.state_dict()``, in x's dtype; those of the router are not
            looked at.
        config: of the layer.

    Returns:
        ``[T, H]`` in x's dtype.
    """
    y = experts(
        x,
        routing.expert_ids,
        routing.gates,
        parameters["experts.gate_up_proj"],
        parameters["experts.down_proj"],
        layout=config.layout,
        activation=config.activation,
        gate_up_bias=parameters.get("experts.gate_up_proj_bias"),
        down_bias=parameters.get("experts.down_proj_bias"),
    )
    return y if config.shared_experts is None else y + shared_experts(x, parameters, config)


def shared_experts(x: Tensor, parameters: Mapping[str, Tensor], config: MoEConfig) -> Tensor:
    """``down(act(gate(x), up(x)))``, times ``sigmoid`` of one number per token if so configured.

    Args:
        x: ``[T, H]``.
        parameters: named as in ``PiperMoE.state_dict()``, in x's dtype.
        config: of the layer.

    Returns:
        ``[T, H]`` in x's dtype.
    """
    assert config.shared_experts is not None, "the config has no shared experts"
    name = "shared_experts.{}.weight".format
    is_gated = config.layout.is_gated
    projections = ["gate_proj", "up_proj"] if is_gated else ["up_proj"]
    preact = torch.cat([F.linear(x, parameters[name(p)]) for p in projections], dim=-1)
    act = activation(preact, config.activation, WeightLayout(is_gated=is_gated))
    y = F.linear(act, parameters[name("down_proj")])
    if config.shared_experts.is_gated_by_token:
        y = torch.sigmoid(F.linear(x, parameters[name("gate")])) * y
    return y
