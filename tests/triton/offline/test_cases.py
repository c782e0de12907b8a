"""The matrices: every kernel is in them, every tile and dtype, and they nest."""

import ast
from pathlib import Path
from typing import Any

import piper_kernels
from piper_kernels.triton.candidates import shipped_tiles
from piper_kernels.triton.offline.cases import (
    CI_TARGETS,
    DTYPES,
    GEMMS,
    KERNELS,
    OPS,
    PLAIN,
    TARGETS,
    Case,
    default_tiles_of,
    find_cases,
)

FOLDER = Path(piper_kernels.__file__).parent / "triton"


def kernels_in_the_folder() -> set[str]:
    """Functions that are launched: ``triton.jit`` and a name that ends in ``_kernel``."""
    return {
        node.name
        for path in FOLDER.glob("*.py")
        for node in ast.parse(path.read_text()).body
        if isinstance(node, ast.FunctionDef)
        and node.name.endswith("_kernel")
        and any("triton.jit" in ast.unparse(decorator) for decorator in node.decorator_list)
    }


def test_kernels_are_all_compiled() -> None:
    assert kernels_in_the_folder() == set(KERNELS.values())


def test_find_cases_of_ci_hold_every_kernel_on_two_targets() -> None:
    cases = find_cases("ci")
    for target in CI_TARGETS:
        found = {case.kernel for case in cases if case.target == target}
        assert found == set(KERNELS.values())
    for target in TARGETS:
        assert {case.op for case in cases if case.target == target} >= set(GEMMS)
    assert {case.dtype for case in cases} == {"bf16", "int"}


def test_find_cases_nest_and_are_distinct() -> None:
    ci, default, full = (find_cases(matrix) for matrix in ("ci", "default", "full"))
    assert set(ci) < set(default) < set(full)
    for cases in (ci, default, full):
        assert len(set(cases)) == len(cases)


def test_find_cases_in_full_hold_every_shipped_tile_and_dtype() -> None:
    cases = find_cases("full")
    for target in TARGETS:
        for op, (_, tile_op, _) in GEMMS.items():
            for dtype, element_bytes in (("bf16", 2), ("fp16", 2), ("fp32", 4)):
                found = {
                    case.tiles
                    for case in cases
                    if (case.target, case.op, case.dtype, case.variant)
                    == (target, op, dtype, PLAIN)
                }
                shipped = shipped_tiles(tile_op, element_bytes=element_bytes, target=target)
                assert found == set(shipped)


def test_find_cases_narrow() -> None:
    chosen: dict[str, Any] = {"targets": ["gfx942"], "ops": ["down", "count"], "dtypes": ["fp32"]}
    cases = find_cases("default", **chosen)
    assert {(case.target, case.op, case.dtype) for case in cases} == {("gfx942", "down", "fp32")}
    assert "tf32" in {case.variant for case in cases}
    assert "tf32" not in {case.variant for case in find_cases("default", dtypes=["bf16"])}
    assert "tf32" not in {case.variant for case in find_cases("default", targets=["gfx950"])}
    assert find_cases("default", ops=["count"], dtypes=["bf16"]) == []


def test_default_tiles_of_lists_four_heights() -> None:
    heights = [tiles.block_m for tiles in default_tiles_of("down", "bf16", "sm_90")]
    assert heights == [16, 32, 64, 128]


def test_tile_text_is_short() -> None:
    for case in find_cases("full"):
        assert len(case.tile_text()) <= 16
    plain = Case(target="sm_90", op="count", dtype="int", variant="halves", tiles=None)
    assert plain.tile_text() == ""


def test_ops_are_the_names_of_the_tables() -> None:
    assert set(OPS) == set(KERNELS)
    assert set(DTYPES) == {case.dtype for case in find_cases("default", targets=["sm_90"])}
