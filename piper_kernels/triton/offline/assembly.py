"""Read what a compiler wrote: registers, stack, spills, matrix instructions, wide loads. Pure."""

import re
from collections import Counter
from dataclasses import dataclass

# a load of 16 bytes by one thread, in PTX: global, or global to shared memory
_PTX_WIDE = re.compile(
    r"\bld\.global(?:\.\w+(?:::\w+)?)*\.(?:v4\.[bfsu]32|v2\.[bfsu]64|v8\.[bfsu]16|b128)\b"
    r"|\bcp\.async\.cg\.shared\.global\b"
)
# a whole tile through a tensor descriptor
_PTX_DESCRIPTOR = re.compile(r"\bcp\.async\.bulk\.tensor[\w.:]*\.shared::\w+\.global\b")
_PTX_MATRIX = {
    "wgmma": re.compile(r"\bwgmma\.mma_async\b"),
    "tcgen05": re.compile(r"\btcgen05\.mma\b"),
    "mma.sync": re.compile(r"\bmma\.sync\b"),
}
_USAGE = re.compile(r"REG:(\d+) STACK:(\d+) SHARED:\d+ LOCAL:(\d+)")
# local memory, which only stack and spills use
_SASS_LOCAL = re.compile(r"\b(?:STL|LDL)(?:\.\w+)*\b")
_AMD_MATRIX = re.compile(r"\bv_(s?mfma_\w+)")
_AMD_WIDE = re.compile(r"\b(?:global|buffer|flat)_load_(?:lds_)?(?:dwordx4|b128)\b")
_AMD_SCRATCH = re.compile(r"\bscratch_(?:load|store)_\w+")


@dataclass(frozen=True, kw_only=True, slots=True)
class Resources:
    """What one compiled kernel takes.

    Attributes:
        registers: of a thread; on AMD vector and accumulation registers together.
        stack_bytes: of a thread; on AMD its private segment.
        num_spills: instructions that move registers to or from local memory; on AMD the registers
            the compiler says it spilled, or scratch instructions if there are more of them.
        shared_bytes: of a program.
        num_warps: of a program.
        waves_per_simd: what the AMD compiler says the registers allow; 0 on NVIDIA.
        matrix: instruction kind -> how many are in the code.
        num_wide_loads: instructions that load 16 bytes a thread from global memory.
        num_descriptor_loads: instructions that load a tile through a tensor descriptor (TMA); 0 on
            AMD.
    """

    registers: int
    stack_bytes: int
    num_spills: int
    shared_bytes: int
    num_warps: int
    waves_per_simd: int
    matrix: dict[str, int]
    num_wide_loads: int
    num_descriptor_loads: int = 0

    def matrix_text(self) -> str:
        """E.g. ``"8 wgmma"``; the shapes of AMD's instructions stay in the JSON."""
        families: Counter[str] = Counter()
        for kind, count in self.matrix.items():
            families[kind.split("_")[0]] += count
        return " ".join(f"{count} {family}" for family, count in families.items())


def read_nvidia(ptx: str, *, usage: str, sass: str, num_warps: int, shared_bytes: int) -> Resources:
    """Read PTX, ``cuobjdump --dump-resource-usage`` and ``nvdisasm``.

    Args:
        ptx: of one kernel.
        usage: what cuobjdump says of its cubin.
        sass: what nvdisasm says of its cubin.
        num_warps: of a program.
        shared_bytes: of a program.

    Raises:
        ValueError: ``usage`` names no kernel.
    """
    found = _USAGE.search(usage)
    if found is None:
        raise ValueError(f"cuobjdump printed no registers: {usage[:200]!r}")
    registers, stack_bytes, local_bytes = map(int, found.groups())
    matrix = {kind: len(pattern.findall(ptx)) for kind, pattern in _PTX_MATRIX.items()}
    return Resources(
        registers=registers,
        stack_bytes=stack_bytes + local_bytes,
        num_spills=len(_SASS_LOCAL.findall(sass)),
        shared_bytes=shared_bytes,
        num_warps=num_warps,
        waves_per_simd=0,
        matrix={kind: count for kind, count in matrix.items() if count},
        num_wide_loads=len(_PTX_WIDE.findall(ptx)),
        num_descriptor_loads=len(_PTX_DESCRIPTOR.findall(ptx)),
    )


def _amd_number(pattern: str, text: str) -> int:
    found = re.search(pattern, text)
    if found is None:
        raise ValueError(f"the assembly has no {pattern!r}")
    return int(found[1])


def read_amd(amdgcn: str, *, num_warps: int, shared_bytes: int) -> Resources:
    """Read AMD assembly with its metadata.

    Args:
        amdgcn: of one kernel.
        num_warps: of a program.
        shared_bytes: of a program.

    Raises:
        ValueError: the metadata are missing.
    """
    spilled = _amd_number(r"\.vgpr_spill_count:\s*(\d+)", amdgcn)
    scratch = len(_AMD_SCRATCH.findall(amdgcn))
    return Resources(
        registers=_amd_number(r"\.vgpr_count:\s*(\d+)", amdgcn),
        stack_bytes=_amd_number(r"\.private_segment_fixed_size:\s*(\d+)", amdgcn),
        num_spills=max(spilled, scratch),
        shared_bytes=shared_bytes,
        num_warps=num_warps,
        waves_per_simd=_amd_number(r"Occupancy:\s*(\d+)", amdgcn),
        matrix=dict(Counter(_AMD_MATRIX.findall(amdgcn))),
        num_wide_loads=len(_AMD_WIDE.findall(amdgcn)),
    )
