"""What experts says of wrong arguments."""

import re

import pytest
import torch

from piper_kernels.config import GPT_OSS_SWIGLU, WeightLayout
from piper_kernels.errors import (
    ConfigError,
    DeviceError,
    DtypeError,
    PiperError,
    RoutingError,
    ShapeError,
)
from piper_kernels.functional.composed import composed_experts
from piper_kernels.functional.experts import experts

T, H, I, E, K = 5, 8, 6, 4, 2


def arguments() -> dict[str, object]:
    return {
        "x": torch.randn(T, H),
        "expert_ids": torch.randint(0, E, (T, K)),
        "gates": torch.rand(T, K),
        "gate_up_proj": torch.randn(E, 2 * I, H),
        "down_proj": torch.randn(E, H, I),
    }


META = {"device": "meta"}


@pytest.mark.parametrize(
    ("changes", "error", "message"),
    [
        # field report A27: (3, 5, H) and (H,)
        ({"x": torch.randn(3, 5, H)}, ShapeError, "x must have shape (T, H) = (any, any), got (3"),
        ({"x": torch.randn(3, 5, H)}, ShapeError, "Flatten it with x.reshape(-1, x.shape[-1])."),
        ({"x": torch.randn(H)}, ShapeError, "x must have shape (T, H) = (any, any), got (8)."),
        ({"x": torch.ones(T, H).long()}, DtypeError, "x must be one of float32, bfloat16, float16"),
        (
            {"x": torch.randn(T, H + 1)},
            ShapeError,
            "down_proj must have shape (E, H, I) = (4, 9, 6), got (4, 8, 6). H is x.shape[1]",
        ),
        (
            {"expert_ids": torch.rand(T, K)},
            DtypeError,
            "got float32. Convert it with expert_ids.lo",
        ),
        ({"expert_ids": torch.zeros(T + 1, K).long()}, ShapeError, "(T, K) = (5, any), got (6, 2)"),
        ({"expert_ids": torch.zeros(T).long()}, ShapeError, "expert_ids must have shape (T, K)"),
        (
            {"expert_ids": torch.zeros(T, 0).long(), "gates": torch.zeros(T, 0)},
            ShapeError,
            "top_k must be at least 1, got 0",
        ),
        ({"gates": torch.rand(T, K + 1)}, ShapeError, "gates must have shape (T, K) = (5, 2), got"),
        ({"gates": torch.ones(T, K).long()}, DtypeError, "gates must be one of float32"),
        (
            {"gate_up_proj": torch.randn(E + 1, 2 * I, H)},
            ShapeError,
            "down_proj must have shape (E, H, I) = (5, 8, 6), got (4, 8, 6)",
        ),
        (
            {"gate_up_proj": torch.randn(E, I, H)},
            ShapeError,
            "gate_up_proj must have shape (E, 2I, H) = (4, 12, 8), got (4, 6, 8). These shapes fit "
            "layout=WeightLayout(is_transposed=False, is_gated=False).",
        ),
        (
            {"layout": WeightLayout(is_transposed=True)},
            ShapeError,
            "These shapes fit layout=WeightLayout(is_transposed=False, is_gated=True).",
        ),
        (
            {"gate_up_proj": torch.randn(2 * I, H)},
            ShapeError,
            "gate_up_proj must have shape (E, out, in)",
        ),
        (
            {"gate_up_proj": torch.randn(0, 2 * I, H), "down_proj": torch.randn(0, H, I)},
            ShapeError,
            "num_experts must be at least 1, got 0",
        ),
        (
            {"x": torch.randn(T, 0), "gate_up_proj": torch.randn(E, 12, 0)}
            | {"down_proj": torch.randn(E, 0, 6)},
            ShapeError,
            "hidden_size must be at least 1, got 0",
        ),
        (
            {"gate_up_bias": torch.randn(E, I)},
            ShapeError,
            "gate_up_bias must have shape (E, 2I) = (4, 12), got (4, 6)",
        ),
        (
            {"down_bias": torch.randn(E, I)},
            ShapeError,
            "down_bias must have shape (E, H) = (4, 8), got (4, 6)",
        ),
        (
            {"down_proj": torch.randn(E, H, I, **META)},
            DeviceError,
            "down_proj must be on the device of x (cpu), got meta. Move it with down_proj.to(",
        ),
        (
            {"expert_ids": torch.zeros(T, K, dtype=torch.long, **META)},
            DeviceError,
            "expert_ids must be on the device of x (cpu)",
        ),
        ({"save": "act"}, ConfigError, "save must be one of preact, x, got 'act'"),
        ({"backend": "cuda"}, ConfigError, "backend must be one of auto, triton, cpu, reference"),
        (
            {
                "layout": WeightLayout(is_gated=False),
                "gate_up_proj": torch.randn(E, I, H),
                "activation": GPT_OSS_SWIGLU,
            },
            ConfigError,
            "activation must have no limit and no up_offset when layout.is_gated is False",
        ),
    ],
)
def test_check_experts_messages(
    changes: dict[str, object], error: type[PiperError], message: str
) -> None:
    with pytest.raises(error, match="^experts: .*" + re.escape(message)):
        experts(**arguments() | changes)


def test_check_experts_negative_ids() -> None:
    ids = torch.tensor([[0, 1], [-1, 2], [3, 3], [-7, 0], [1, 0]])
    message = r"experts: expert_ids must be >= 0, got 2 negative ids\. Mark slots .* E = 4\."
    with pytest.raises(RoutingError, match=message):
        experts(**arguments() | {"expert_ids": ids})


def test_check_experts_names_the_function_that_was_called() -> None:
    changed = arguments() | {"x": torch.randn(H)}
    with pytest.raises(ShapeError, match=r"^composed_experts: x must have shape"):
        composed_experts(**changed, apply_gate=torch.relu)
