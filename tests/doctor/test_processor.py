"""Processors judged from data and from texts of the kernel's own form."""

from dataclasses import replace

import pytest
import torch

from piper_kernels.doctor.processor import (
    Processor,
    check_processor,
    judge_processor,
    look_at_processor,
    parse_cpu_quota,
    parse_cpuinfo,
    parse_selected,
)

FAST = Processor(
    name="EPYC",
    flags=frozenset({"avx2", "avx512f", "avx512_bf16", "fpu"}),
    capability="AVX512",
    has_onednn=True,
    num_threads=2,
    num_usable_cores=2,
    huge_pages="madvise",
    has_huge_page_allocator=True,
)


def judged(**changes: object) -> dict[str, tuple[str, str, str]]:
    findings = judge_processor(replace(FAST, **changes))  # type: ignore[arg-type]
    return {f.name: (f.status, f.value, f.advice) for f in findings}


def test_judge_processor_is_content_with_a_fast_one() -> None:
    found = judged()
    assert {status for status, _, _ in found.values()} == {"ok"}
    assert found["processor"][1] == "EPYC: avx2 avx512f avx512_bf16"
    assert found["bf16"][1] == "native; torch uses AVX512, with oneDNN"


@pytest.mark.parametrize(
    "changes", [{"flags": frozenset({"avx2"})}, {"has_onednn": False}], ids=["flags", "onednn"]
)
def test_judge_processor_warns_where_bf16_is_emulated(changes: dict[str, object]) -> None:
    status, value, advice = judged(**changes)["bf16"]
    assert status == "warning"
    assert value.startswith("emulated")
    assert "Train in fp32" in advice


def test_judge_processor_warns_of_more_threads_than_cores() -> None:
    status, value, advice = judged(num_threads=8)["threads"]
    assert (status, value) == ("warning", "8 threads per op, 2 usable cores")
    assert advice.startswith("OMP_NUM_THREADS=2")


@pytest.mark.parametrize(
    ("huge_pages", "allocator", "status"),
    [
        ("always", False, "ok"),
        ("madvise", True, "ok"),
        ("madvise", False, "warning"),
        ("never", True, "warning"),
        ("", False, "ok"),
    ],
)
def test_judge_processor_judges_huge_pages(huge_pages: str, allocator: bool, status: str) -> None:
    found = judged(huge_pages=huge_pages, has_huge_page_allocator=allocator)["huge pages"]
    assert found[0] == status
    if status == "warning":
        assert "THP_MEM_ALLOC_ENABLE=1" in found[2]
    assert ("As root" in found[2]) == (huge_pages == "never")


def test_parse_cpuinfo_reads_x86_and_arm() -> None:
    x86 = "processor\t: 0\nmodel name\t: AMD EPYC 9B14\nflags\t\t: fpu avx2 AVX512_BF16\n\n"
    assert parse_cpuinfo(x86) == ("AMD EPYC 9B14", frozenset({"fpu", "avx2", "avx512_bf16"}))
    arm = "processor\t: 0\nFeatures\t: fp asimd bf16\n"
    assert parse_cpuinfo(arm) == ("", frozenset({"fp", "asimd", "bf16"}))
    assert parse_cpuinfo("") == ("", frozenset())


def test_parse_selected_takes_the_word_in_brackets() -> None:
    assert parse_selected("always madvise [never]\n") == "never"
    assert parse_selected("") == ""


@pytest.mark.parametrize(
    ("text", "cores"),
    [
        ("max 100000", None),
        ("200000 100000\n", 2),
        ("50000 100000", 1),
        ("150000 100000", 2),
        ("", None),
        ("100000 0", None),
    ],
)
def test_parse_cpu_quota_counts_whole_cores(text: str, cores: int | None) -> None:
    assert parse_cpu_quota(text) == cores


def test_look_at_processor_agrees_with_torch() -> None:
    found = look_at_processor()
    assert found.num_threads == torch.get_num_threads()
    assert found.num_usable_cores >= 1
    assert {finding.name for finding in check_processor()} == {
        "processor",
        "bf16",
        "threads",
        "huge pages",
    }
