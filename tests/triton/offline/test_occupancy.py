"""Resident programs, worked out by hand from the vendors' tables."""

import pytest

from piper_kernels.triton.offline.assembly import Resources
from piper_kernels.triton.offline.occupancy import resident_programs


def take(registers: int, warps: int, shared_kib: int, waves: int = 0) -> Resources:
    return Resources(
        registers=registers,
        stack_bytes=0,
        num_spills=0,
        shared_bytes=shared_kib * 1024,
        num_warps=warps,
        waves_per_simd=waves,
        matrix={},
        num_wide_loads=0,
    )


@pytest.mark.parametrize(
    ("target", "resources", "expected"),
    [
        # 64 warps at most
        ("sm_90", take(16, 4, 0), 16),
        ("sm_90", take(32, 8, 0), 8),
        # a warp of 255 registers takes 8192: 2 on each quarter, 8 in all
        ("sm_90", take(255, 8, 0), 1),
        ("sm_90", take(255, 4, 0), 2),
        # 129 registers are allocated as 136, 4352 a warp: 3 on each quarter
        ("sm_80", take(129, 4, 0), 3),
        ("sm_80", take(128, 4, 0), 4),
        # 228 KiB in all, 97 each with what the system keeps
        ("sm_90", take(64, 4, 96), 2),
        # 164 KiB
        ("sm_80", take(64, 4, 96), 1),
        ("sm_80", take(64, 4, 164), 0),
        ("sm_100", take(64, 4, 227), 1),
        # 4 SIMDs: 5 waves each are 20, or 2 programs of 8
        ("gfx942", take(92, 8, 8, waves=5), 2),
        ("gfx942", take(92, 4, 20, waves=5), 3),
        ("gfx950", take(92, 4, 20, waves=5), 5),
        ("gfx90a", take(92, 4, 65, waves=5), 0),
    ],
)
def test_resident_programs_by_hand(target: str, resources: Resources, expected: int) -> None:
    assert resident_programs(resources, target) == expected
