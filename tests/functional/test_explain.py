"""explain_experts tells what experts does, and how much it keeps."""

import pytest
import torch

from piper_kernels.config import SWIGLU, WeightLayout
from piper_kernels.errors import ShapeError
from piper_kernels.functional.experts import experts
from piper_kernels.functional.explain import explain_experts
from piper_kernels.testing.experts import make_experts_inputs
from piper_kernels.testing.memory import saved_for_backward


def arguments(dtype: torch.dtype = torch.float32, *, is_training: bool = True) -> dict[str, object]:
    inputs = make_experts_inputs(12, 10, 6, 4, 2, dtype=dtype)
    names = ("x", "gates", "gate_up_proj", "down_proj")
    leaves = {name: getattr(inputs, name).requires_grad_(is_training) for name in names}
    return {"expert_ids": inputs.expert_ids, **leaves}


@pytest.mark.parametrize("x_dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("autocast", [False, True])
@pytest.mark.parametrize("save", ["preact", "x"])
def test_explain_experts_counts_what_is_kept(
    save: str, autocast: bool, x_dtype: torch.dtype
) -> None:
    given = arguments()
    given["x"] = given["x"].detach().to(x_dtype).requires_grad_()
    with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
        kept = saved_for_backward(
            lambda: experts(**given, save=save), [given["gate_up_proj"], given["down_proj"]]
        )
        explanation = explain_experts(**given, save=save)
    assert explanation.saved_bytes == sum(tensor.nbytes for tensor in kept)
    assert explanation.compute_dtype == (torch.bfloat16 if autocast else torch.float32)
    assert explanation.output_dtype == (torch.bfloat16 if autocast else x_dtype)


def test_explain_experts_counts_what_the_composed_path_keeps() -> None:
    given = arguments()
    given["gate_up_proj"] = given["gate_up_proj"].detach()[:, :6].clone().requires_grad_()
    # relu keeps nothing but its output, which the second GEMM keeps anyway
    options = {"layout": WeightLayout(is_gated=False), "activation": torch.relu}
    weights = [given["gate_up_proj"], given["down_proj"]]
    kept = saved_for_backward(lambda: experts(**given, **options), weights)
    explanation = explain_experts(**given, **options)
    assert explanation.path == "composed"
    assert explanation.saved_bytes == sum(tensor.nbytes for tensor in kept)
    assert "the callable runs under autograd" in explanation.notes[0]


def test_explain_experts_reads_well() -> None:
    text = str(explain_experts(**arguments()))
    # x 12 x 10, preact 24 x 12, gates and maps
    num_bytes = (12 * 10 + 24 * 12 + 24 + 3 * 24 + 2 * 4 + 1) * 4
    assert text.splitlines() == [
        "experts: cpu (the tensors are on the CPU)",
        "  path:              fused",
        "  dtypes:            computes in float32, returns float32",
        f"  kept for backward: {num_bytes:,} bytes",
    ]


@pytest.mark.parametrize(
    ("options", "note"),
    [
        ({"save": "x"}, "the backward repeats the first GEMM"),
        ({"is_training": False}, "no gradient is wanted, so nothing is kept"),
        ({"dtype": torch.float16}, "float16 is multiplied in float32"),
        ({"x_dtype": torch.float64}, "x is cast from float64 to float32"),
        ({"autocast": True}, "autocast casts all weights from float32 to bfloat16 at each call"),
    ],
)
def test_explain_experts_notes(options: dict[str, object], note: str) -> None:
    given = arguments(
        options.get("dtype", torch.float32), is_training=options.get("is_training", True)
    )
    given["x"] = given["x"].to(options.get("x_dtype", given["x"].dtype))
    with torch.autocast("cpu", torch.bfloat16, enabled=options.get("autocast", False)):
        explanation = explain_experts(**given, save=options.get("save", "preact"))
    assert any(note in line for line in explanation.notes)
    assert note in str(explanation)
    assert (explanation.saved_bytes == 0) == ("is_training" in options)


def test_explain_experts_reference_keeps_what_autograd_keeps() -> None:
    explanation = explain_experts(**arguments(), backend="reference")
    assert (explanation.path, explanation.saved_bytes) == ("autograd", None)
    assert "kept for backward: decided by autograd" in str(explanation)


def test_explain_experts_needs_no_data() -> None:
    given = {name: tensor.detach().to("meta") for name, tensor in arguments().items()}
    assert explain_experts(**given, activation=SWIGLU).backend == "cpu"


def test_explain_experts_raises_what_experts_raises() -> None:
    with pytest.raises(ShapeError, match="experts: x must have shape"):
        explain_experts(**arguments() | {"x": torch.zeros(8)})
