"""How many programs fit one multiprocessor at once, from what a program takes. Pure.

Sources: CUDA C++ Programming Guide, technical specifications per compute capability (64 K
registers, 64 warps, allocation in units of 256 a warp and of 1 KiB of shared memory); AMD CDNA 2
and 3 instruction set guides (4 SIMDs of a compute unit, local data share).
"""

from piper_kernels.triton.candidates import SHARED_MEMORY_BYTES
from piper_kernels.triton.offline.assembly import Resources

_MAX_WARPS = 64
_REGISTERS_PER_QUARTER = 16384
_REGISTER_UNIT = 256
# the system keeps 1 KiB of shared memory for each program
_RESERVED_BYTES = 1024
_SIMDS_PER_UNIT = 4


def _fit(available: int, needed: int, most: int) -> int:
    return min(most, available // needed) if needed else most


def resident_programs(resources: Resources, target: str) -> int:
    """Programs that a multiprocessor (a compute unit on AMD) can hold at once.

    Args:
        resources: of the kernel.
        target: e.g. ``"sm_90"``.

    Returns:
        The least of what registers, warps and shared memory allow; 0 if one does not even fit.

    Example:
        >>> resources = Resources(registers=128, stack_bytes=0, num_spills=0, shared_bytes=98304,
        ...     num_warps=8, waves_per_simd=0, matrix={}, num_wide_loads=0)
        >>> resident_programs(resources, "sm_90")
        2
    """
    limit = SHARED_MEMORY_BYTES[target]
    if target.startswith("gfx"):
        by_registers = resources.waves_per_simd * _SIMDS_PER_UNIT // resources.num_warps
        return _fit(limit, resources.shared_bytes, by_registers)
    units = -(-resources.registers * 32 // _REGISTER_UNIT)
    warps = min(_MAX_WARPS, 4 * _fit(_REGISTERS_PER_QUARTER, units * _REGISTER_UNIT, _MAX_WARPS))
    if resources.shared_bytes > limit:
        return 0
    total = limit + _RESERVED_BYTES
    return _fit(total, resources.shared_bytes + _RESERVED_BYTES, warps // resources.num_warps)
