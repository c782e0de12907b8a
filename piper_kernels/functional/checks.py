"""What experts() demands of its arguments. Only shapes, dtypes and devices: no host sync."""

from collections.abc import Callable

import torch
from torch import Tensor

from piper_kernels.autocast import is_autocast_active
from piper_kernels.config import Activation, Save, WeightLayout, check_choice, require_type
from piper_kernels.errors import (
    ShapeError,
    check_dtype,
    check_same_device,
    check_shape,
    require,
)
from piper_kernels.functional.dtypes import check_one_dtype
from piper_kernels.permutation import ID_DTYPES

ActivationLike = Activation | Callable[[Tensor], Tensor]
FLOATS = (torch.float32, torch.bfloat16, torch.float16, torch.float64)


def check_experts(
    function: str,
    x: Tensor,
    expert_ids: Tensor,
    gates: Tensor,
    gate_up_proj: Tensor,
    down_proj: Tensor,
    gate_up_bias: Tensor | None,
    down_bias: Tensor | None,
    layout: WeightLayout,
) -> None:
    """Raise unless the tensors of ``experts`` go together.

    Raises:
        ShapeError: a shape does not fit x, E, K or the layout.
        DtypeError: a dtype is not supported.
        DeviceError: two tensors lie on different devices.
    """
    remedy = "Flatten it with x.reshape(-1, x.shape[-1])."
    check_shape(function, "x", x, ("T", "H"), (None, None), remedy)
    check_dtype(function, "x", x, FLOATS)
    _check_routing(function, x, expert_ids, gates)
    _check_weights(function, x, gate_up_proj, down_proj, layout)
    num_experts, hidden_size = gate_up_proj.shape[0], x.shape[1]
    if gate_up_bias is not None:
        names = ("E", "2I" if layout.is_gated else "I")
        sizes = (num_experts, gate_up_proj.shape[2 if layout.is_transposed else 1])
        check_shape(function, "gate_up_bias", gate_up_bias, names, sizes)
    if down_bias is not None:
        sizes = (num_experts, hidden_size)
        check_shape(function, "down_bias", down_bias, ("E", "H"), sizes)
    tensors = {
        "gate_up_proj": gate_up_proj,
        "down_proj": down_proj,
        "gate_up_bias": gate_up_bias,
        "down_bias": down_bias,
    }
    check_dtype(function, "gate_up_proj", gate_up_proj, FLOATS)
    check_same_device(function, {"x": x, "expert_ids": expert_ids, "gates": gates, **tensors})
    # autocast casts them all
    if not is_autocast_active(x.device):
        check_one_dtype(function, tensors)


def check_options(
    function: str, layout: WeightLayout, activation: ActivationLike, save: Save
) -> None:
    """Raise ``ConfigError`` unless the options of ``experts`` go together."""
    require_type(function, "layout", layout, WeightLayout)
    if not callable(activation):
        require_type(function, "activation", activation, Activation)
        activation.check_layout(function, layout)
    check_choice(function, "save", save, Save)


def _check_routing(function: str, x: Tensor, expert_ids: Tensor, gates: Tensor) -> None:
    num_tokens = x.shape[0]
    check_shape(
        function,
        "expert_ids",
        expert_ids,
        ("T", "K"),
        (num_tokens, None),
        "T is the number of rows of x.",
    )
    remedy = "Convert it with expert_ids.long()."
    check_dtype(function, "expert_ids", expert_ids, ID_DTYPES, remedy)
    top_k = expert_ids.shape[1]
    require(top_k >= 1, function, "top_k", "be at least 1", top_k, error=ShapeError)
    check_shape(
        function,
        "gates",
        gates,
        ("T", "K"),
        (num_tokens, top_k),
        "It needs one gate for each of expert_ids.",
    )
    check_dtype(function, "gates", gates, FLOATS)


def _check_weights(
    function: str, x: Tensor, gate_up_proj: Tensor, down_proj: Tensor, layout: WeightLayout
) -> None:
    check_shape(function, "gate_up_proj", gate_up_proj, ("E", "out", "in"), (None, None, None))
    check_shape(function, "down_proj", down_proj, ("E", "out", "in"), (None, None, None))
    num_experts, hidden_size = gate_up_proj.shape[0], x.shape[1]
    intermediate_size = down_proj.shape[1 if layout.is_transposed else 2]
    sizes = {
        "num_experts": num_experts,
        "hidden_size": hidden_size,
        "intermediate_size": intermediate_size,
    }
    for name, size in sizes.items():
        require(size >= 1, function, name, "be at least 1", size, error=ShapeError)
    shapes = layout.weight_shapes(num_experts, hidden_size, intermediate_size)
    width = "2I" if layout.is_gated else "I"
    if layout.is_transposed:
        names = ("E", "H", width), ("E", "I", "H")
    else:
        names = ("E", width, "H"), ("E", "H", "I")
    remedy = _layout_remedy(x, gate_up_proj, down_proj, layout)
    check_shape(function, "down_proj", down_proj, names[1], shapes[1], remedy)
    check_shape(function, "gate_up_proj", gate_up_proj, names[0], shapes[0], remedy)


def _layout_remedy(x: Tensor, gate_up_proj: Tensor, down_proj: Tensor, layout: WeightLayout) -> str:
    """Name the layout that would fit, or what the shapes were derived from."""
    given = (tuple(gate_up_proj.shape), tuple(down_proj.shape))
    for is_transposed in (False, True):
        for is_gated in (True, False):
            other = WeightLayout(is_transposed=is_transposed, is_gated=is_gated)
            size = down_proj.shape[1 if is_transposed else 2]
            if other.weight_shapes(gate_up_proj.shape[0], x.shape[1], size) == given:
                return f"These shapes fit layout=WeightLayout({is_transposed=}, {is_gated=})."
    return f"H is x.shape[1], I comes from down_proj, and layout is {layout}."
