"""The comparison with the oracle finds faults, not only agreement."""

import pytest
import torch
from torch import Tensor

from piper_kernels.reference.experts import experts as reference_experts
from piper_kernels.testing.experts import (
    assert_experts_match_oracle,
    make_experts_inputs,
    run_experts,
)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("name", ["y", "x", "gates", "gate_up_proj", "down_proj", "down_bias"])
def test_assert_experts_match_oracle_finds_one_wrong_element(name: str, dtype: torch.dtype) -> None:
    inputs = make_experts_inputs(9, 8, 6, 4, 2, dtype=dtype, has_down_bias=True)
    results = run_experts(reference_experts, inputs)
    assert_experts_match_oracle(results, inputs)
    wrong: Tensor = results[name].clone()
    wrong.view(-1)[3] += 0.3
    with pytest.raises(AssertionError, match=f"^{name}: 1 of "):
        assert_experts_match_oracle(results | {name: wrong}, inputs)


def test_assert_experts_match_oracle_takes_any_order_of_sums() -> None:
    # against one order only, plain torch in the reverse order is off by up to 7 ulp here
    inputs = make_experts_inputs(11, 320, 130, 3, 2, routing="skewed")
    turned = inputs.map(
        lambda name, t: t if name == "gates" else t.flip(1 if name == "down_proj" else -1)
    )
    results = run_experts(reference_experts, turned)
    for name, dim in {"y": 1, "x": 1, "gate_up_proj": 2, "down_proj": 1}.items():
        results[name] = results[name].flip(dim)
    assert_experts_match_oracle(results, inputs)


def test_make_experts_inputs_repr_names_sizes() -> None:
    text = repr(make_experts_inputs(2, 8, 6, 4, 1))
    assert "x: [2, 8] float32 strides (8, 1)" in text
    assert len(text) < 800
