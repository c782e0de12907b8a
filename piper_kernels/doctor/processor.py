"""What matters to the CPU path: bf16 instructions, threads, huge pages."""

import os
import platform
import re
from dataclasses import dataclass
from pathlib import Path

from piper_kernels.doctor.findings import Finding

# x86: avx512_bf16, amx_bf16; ARM: bf16
BF16_FLAGS = ("avx512_bf16", "amx_bf16", "bf16")
SHOWN_FLAGS = ("avx2", "avx512f", *BF16_FLAGS)


@dataclass(frozen=True, kw_only=True, slots=True)
class Processor:
    """This machine's processor and how torch uses it.

    Attributes:
        name: as the system gives it.
        flags: instruction set extensions in lower case.
        capability: the vector level that torch compiled code is chosen for.
        has_onednn: torch can use oneDNN.
        num_threads: threads of one op in torch.
        num_usable_cores: cores that this process may use.
        huge_pages: the selected word of transparent_hugepage/enabled, empty where there is none.
        has_huge_page_allocator: THP_MEM_ALLOC_ENABLE=1 was set before torch was loaded.
    """

    name: str
    flags: frozenset[str]
    capability: str
    has_onednn: bool
    num_threads: int
    num_usable_cores: int
    huge_pages: str
    has_huge_page_allocator: bool


def judge_processor(found: Processor) -> list[Finding]:
    """Judge it. Pure."""
    shown = [flag for flag in SHOWN_FLAGS if flag in found.flags]
    first = Finding(
        area="processor",
        name="processor",
        value=f"{found.name}: {' '.join(shown) or 'no vector extension known here'}",
    )
    return [first, _judge_bf16(found), _judge_threads(found), _judge_huge_pages(found)]


def _judge_bf16(found: Processor) -> Finding:
    onednn = "with oneDNN" if found.has_onednn else "without oneDNN"
    value = f"torch uses {found.capability}, {onednn}"
    is_fast = found.has_onednn and any(flag in found.flags for flag in BF16_FLAGS)
    if is_fast:
        return Finding(area="processor", name="bf16", value=f"native; {value}")
    return Finding(
        area="processor",
        name="bf16",
        value=f"emulated; {value}",
        status="warning",
        advice="Train in fp32 on this processor: bf16 products are computed by conversion.",
    )


def _judge_threads(found: Processor) -> Finding:
    value = f"{found.num_threads} threads per op, {found.num_usable_cores} usable cores"
    if found.num_threads <= found.num_usable_cores:
        return Finding(area="processor", name="threads", value=value)
    advice = f"OMP_NUM_THREADS={found.num_usable_cores}: threads that wait for a core hold all up."
    return Finding(area="processor", name="threads", value=value, status="warning", advice=advice)


def _judge_huge_pages(found: Processor) -> Finding:
    allocator = "on" if found.has_huge_page_allocator else "off"
    value = f"{found.huge_pages or 'not offered'}; torch's allocator asks for them: {allocator}"
    is_used = found.huge_pages == "always" or (
        found.huge_pages == "madvise" and found.has_huge_page_allocator
    )
    if is_used or not found.huge_pages:
        return Finding(area="processor", name="huge pages", value=value)
    advice = "Set THP_MEM_ALLOC_ENABLE=1 before Python starts: fresh gradients fault less."
    if found.huge_pages == "never":
        advice = "As root: echo madvise > /sys/kernel/mm/transparent_hugepage/enabled. " + advice
    return Finding(
        area="processor", name="huge pages", value=value, status="warning", advice=advice
    )


def parse_cpuinfo(text: str) -> tuple[str, frozenset[str]]:
    """Name and flags from the text of /proc/cpuinfo (x86: ``flags``, ARM: ``Features``)."""
    fields = dict(re.findall(r"^([^\t:]+?)\s*:\s*(.*)$", text, flags=re.MULTILINE))
    flags = fields.get("flags") or fields.get("Features") or ""
    return fields.get("model name", ""), frozenset(flags.lower().split())


def parse_selected(text: str) -> str:
    """The word in brackets.

    Example:
        >>> parse_selected("always [madvise] never")
        'madvise'
    """
    match = re.search(r"\[(\w+)\]", text)
    return match.group(1) if match else ""


def parse_cpu_quota(text: str) -> int | None:
    """Whole cores of a cgroup's ``cpu.max``; ``None`` without a limit.

    Example:
        >>> parse_cpu_quota("150000 100000")
        2
    """
    quota, _, period = text.strip().partition(" ")
    if not (quota.isdecimal() and period.isdecimal() and int(period)):
        return None
    return max(1, -(-int(quota) // int(period)))


def _read(path: str) -> str:
    try:
        return Path(path).read_text()
    except OSError:
        return ""


def _usable_cores() -> int:
    """The fewest that affinity and the container's quota leave."""
    has_affinity = hasattr(os, "sched_getaffinity")
    cores = len(os.sched_getaffinity(0)) if has_affinity else os.cpu_count() or 1
    quota = parse_cpu_quota(_read("/sys/fs/cgroup/cpu.max"))
    return cores if quota is None else min(cores, quota)


def look_at_processor() -> Processor:
    """Ask the system and torch."""
    import torch

    name, flags = parse_cpuinfo(_read("/proc/cpuinfo"))
    return Processor(
        name=name or platform.processor() or platform.machine(),
        flags=flags,
        capability=torch.backends.cpu.get_cpu_capability(),
        has_onednn=torch.backends.mkldnn.is_available(),
        num_threads=torch.get_num_threads(),
        num_usable_cores=_usable_cores(),
        huge_pages=parse_selected(_read("/sys/kernel/mm/transparent_hugepage/enabled")),
        has_huge_page_allocator=os.environ.get("THP_MEM_ALLOC_ENABLE") == "1",
    )


def check_processor() -> list[Finding]:
    """Look at this machine's processor."""
    return judge_processor(look_at_processor())
