"""The wording of every error: function, argument, requirement, value, remedy."""

import pytest
import torch

from piper_kernels import errors
from piper_kernels.errors import (
    BackendError,
    CheckpointError,
    ConfigError,
    DataError,
    DeviceError,
    DtypeError,
    PiperError,
    RoutingError,
    ShapeError,
    check_dtype,
    check_same_device,
    check_shape,
    did_you_mean,
    instruction,
    require,
)


@pytest.mark.parametrize(
    ("error", "builtin"),
    [
        (ShapeError, ValueError),
        (DtypeError, TypeError),
        (DeviceError, ValueError),
        (ConfigError, ValueError),
        (RoutingError, ValueError),
        (BackendError, RuntimeError),
        (CheckpointError, RuntimeError),
        (DataError, ValueError),
    ],
)
def test_errors_are_piper_errors_and_builtin_ones(
    error: type[PiperError], builtin: type[Exception]
) -> None:
    with pytest.raises(PiperError):
        raise error("x")
    assert issubclass(error, builtin)


def test_errors_family_is_documented_and_builtin() -> None:
    """Whoever catches ValueError, TypeError or RuntimeError need not know this library."""
    classes = [e for e in vars(errors).values() if isinstance(e, type)]
    family = [e for e in classes if issubclass(e, PiperError) and e is not PiperError]
    for error in family:
        assert error.__doc__
        assert issubclass(error, ValueError | TypeError | RuntimeError), error


def test_instruction_with_and_without_a_remedy() -> None:
    bare = "route: top_k must be at most 4, got 5."
    assert instruction("route", "top_k", "be at most 4", 5) == bare
    assert instruction("route", "top_k", "be at most 4", 5, "Lower it.") == f"{bare} Lower it."


def test_require_raises_what_it_is_told() -> None:
    require(True, "f", "a", "be 1", 2)
    with pytest.raises(ConfigError, match=r"^f: a must be 1, got 2\.$"):
        require(False, "f", "a", "be 1", 2)
    with pytest.raises(RoutingError, match=r"^f: a must be 1, got 2\. Do so\.$"):
        require(False, "f", "a", "be 1", 2, "Do so.", error=RoutingError)


def test_check_shape_names_wanted_and_given() -> None:
    check_shape("f", "a", torch.zeros(2, 3), ("T", "H"), (2, 3))
    check_shape("f", "a", torch.zeros(2, 3), ("T", "H"), (None, 3))
    check_shape("f", "a", torch.zeros(()), (), ())
    for given, names, sizes, match in (
        ((2, 3), ("T", "H"), (2, 4), r"\(T, H\) = \(2, 4\), got \(2, 3\)\. Fix\."),
        ((2, 3), ("T", "H"), (None, 4), r"\(T, H\) = \(any, 4\), got \(2, 3\)"),
        ((2,), ("T", "H"), (2, 3), r"\(T, H\) = \(2, 3\), got \(2\)"),
        ((2, 3, 4), ("T", "H"), (2, 3), r"\(T, H\) = \(2, 3\), got \(2, 3, 4\)"),
        ((3,), ("3",), (4,), r"\(3\) = \(4\), got \(3\)"),
        ((), ("4",), (4,), r"\(4\), got \(\)"),
    ):
        with pytest.raises(ShapeError, match=f"^f: a must have shape {match}"):
            check_shape("f", "a", torch.zeros(given), names, sizes, "Fix.")


def test_check_dtype_names_the_supported_set() -> None:
    check_dtype("f", "a", torch.zeros(1), (torch.float32,))
    with pytest.raises(
        DtypeError, match=r"^f: a must be one of float32, bfloat16, got int64\. Cast it\.$"
    ):
        check_dtype("f", "a", torch.ones(1).long(), (torch.float32, torch.bfloat16), "Cast it.")


def test_check_same_device_names_both() -> None:
    here, there = torch.zeros(1), torch.zeros(1, device="meta")
    check_same_device("f", {"x": here, "bias": None, "y": here})
    with pytest.raises(
        DeviceError,
        match=r"^f: y must be on the device of x \(cpu\), got meta\. Move it with y\.to\('cpu'\)",
    ):
        check_same_device("f", {"x": here, "bias": None, "y": there})


def test_did_you_mean_suggests_or_lists() -> None:
    assert did_you_mean("hiden_size", ["top_k", "hidden_size"]) == "Did you mean 'hidden_size'?"
    assert did_you_mean("zzz", ["b", "a"]) == "Known: a, b."
