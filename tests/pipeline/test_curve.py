"""Efficiency curves."""

import pytest

from piper_kernels.errors import ConfigError
from piper_kernels.pipeline.curve import check_curve, share_at

CURVE = ((10.0, 0.2), (1000.0, 0.6), (4000.0, 0.5))


@pytest.mark.parametrize(
    ("size", "share"), [(1, 0.2), (10, 0.2), (100, 0.4), (1000, 0.6), (2000, 0.55), (1e9, 0.5)]
)
def test_share_at_reads_between_points(size: float, share: float) -> None:
    assert share_at(CURVE, size) == pytest.approx(share)


def test_share_at_without_points_is_the_peak() -> None:
    assert share_at((), 5.0) == 1.0


def test_check_curve_wants_order_and_positive_shares() -> None:
    check_curve("Device", "gemm_efficiency", CURVE)
    with pytest.raises(ConfigError, match="Device: gemm_efficiency must have rising sizes"):
        check_curve("Device", "gemm_efficiency", CURVE[::-1])
    with pytest.raises(ConfigError, match="shares above 0"):
        check_curve("Device", "gemm_efficiency", ((1.0, 0.0),))
