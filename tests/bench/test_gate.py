"""The gate lets right results through and says where a wrong one is wrong."""

import pytest
import torch

from bench.gate import Expected, GateError, check_outputs

TRUTH = torch.tensor([[1.0, -2.0, 3.0], [0.5, 0.0, -4.0]], dtype=torch.float64)


def expected(index: object = slice(None)) -> list[Expected]:
    return [Expected(name="y", index=index, value=TRUTH[index])]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_check_outputs_passes_rounded_results(dtype: torch.dtype) -> None:
    check_outputs("a", {"y": TRUTH.to(dtype)}, expected(), dtype)


def test_check_outputs_names_the_worst_element() -> None:
    wrong = TRUTH.float()
    wrong[0, 0] = 1.01
    wrong[1, 2] = 4.0
    message = (
        r"gate: fast disagrees with the oracle: y, part \(1, 2\): got 4, must be -4 within "
        r"\S+; 2 of 6 checked elements are wrong\. Not timed\."
    )
    with pytest.raises(GateError, match=message):
        check_outputs("fast", {"y": wrong}, expected(), torch.float32)


@pytest.mark.parametrize("bad", [torch.nan, torch.inf])
def test_check_outputs_refuses_what_is_no_number(bad: float) -> None:
    wrong = TRUTH.float()
    wrong[0, 1] = bad
    with pytest.raises(GateError, match=r"y, part \(0, 1\): got (nan|inf), must be -2"):
        check_outputs("a", {"y": wrong}, expected(), torch.float32)


def test_check_outputs_wants_zeros_to_the_bit() -> None:
    zeros = [Expected(name="grad", index=0, value=torch.zeros(3, dtype=torch.float64))]
    check_outputs("a", {"grad": torch.zeros(2, 3)}, zeros, torch.float32)
    with pytest.raises(GateError, match="grad"):
        check_outputs("a", {"grad": torch.full((2, 3), 1e-30)}, zeros, torch.float32)


def test_check_outputs_looks_only_at_the_part() -> None:
    wrong_elsewhere = TRUTH.float()
    wrong_elsewhere[1] = 9.0
    check_outputs("a", {"y": wrong_elsewhere}, expected(0), torch.float32)


def test_check_outputs_wants_every_tensor() -> None:
    with pytest.raises(GateError, match=r"gate: a gives no y; it gives z\. Not timed\."):
        check_outputs("a", {"z": TRUTH.float()}, expected(), torch.float32)
    with pytest.raises(GateError, match=r"y has shape \(1, 3\), the oracle's \(2, 3\)"):
        check_outputs("a", {"y": TRUTH[:1].float()}, expected(), torch.float32)
