"""Tables of at most 100 columns, JSON, Markdown."""

import io
import json
from dataclasses import replace

from rich.console import Console

from piper_kernels.triton.offline.assembly import Resources
from piper_kernels.triton.offline.cases import OPS, Case, find_cases
from piper_kernels.triton.offline.pool import Outcome
from piper_kernels.triton.offline.report import Row, as_json, as_markdown, print_tables
from piper_kernels.triton.tiles import TileConfig

CASE = Case(
    target="sm_90",
    op="gate_up",
    dtype="bf16",
    variant="halves",
    tiles=TileConfig(block_m=128, block_n=128, block_k=64, num_warps=8),
)
TAKES = Resources(
    registers=139,
    stack_bytes=0,
    num_spills=0,
    shared_bytes=98304,
    num_warps=8,
    waves_per_simd=0,
    matrix={"wgmma": 4},
    num_wide_loads=24,
    num_descriptor_loads=2,
)
FINE = Row(outcome=Outcome(case=CASE, resources=TAKES), faults=())
BAD = Row(
    outcome=Outcome(case=replace(CASE, target="gfx942"), error="[x] dead"),
    faults=("does not compile: [x] dead",),
)


def shown(rows: list[Row]) -> list[str]:
    text = io.StringIO()
    print_tables(rows, Console(file=text, width=100))
    return text.getvalue().splitlines()


def test_print_tables_show_numbers_and_faults() -> None:
    lines = shown([FINE, BAD])
    words = {" ".join(line.split()) for line in lines}
    assert "gate_up halves 128x128x64 w8 s3 139 0 0 96 1 4 wgmma 24 2" in words
    assert "sm_90, bf16 (227 KiB shared)" in {line.strip() for line in lines}
    assert "missed gate_up halves 128x128x64 w8 s3: does not compile: [x] dead" in lines


def test_print_tables_fit_100_columns_whole() -> None:
    widest = replace(TAKES, matrix={"tcgen05": 128}, stack_bytes=1000, num_spills=1000)
    rows = [
        Row(outcome=Outcome(case=case, resources=widest), faults=())
        for case in find_cases("default", targets=["sm_100"], dtypes=["bf16", "int"])
    ]
    lines = shown(rows)
    assert max(map(len, lines)) <= 100
    text = "\n".join(lines)
    assert all(op in text for op in OPS)
    assert "128 tcgen05" in text
    assert "\u2026" not in text


def test_as_json_keeps_everything() -> None:
    report = json.loads(as_json([FINE, BAD], triton_version="3.9.0"))
    assert report["triton"] == "3.9.0"
    first, second = report["rows"]
    assert first["case"]["tiles"]["block_m"] == 128
    assert first["resources"]["matrix"] == {"wgmma": 4}
    assert first["resident_programs"] == 1
    assert (second["resources"], second["faults"]) == (None, ["does not compile: [x] dead"])


def test_as_markdown_has_one_table_a_target() -> None:
    text = as_markdown([FINE, FINE, BAD])
    row = "| gate_up | halves | 128x128x64 w8 s3 | 139 | 0 | 0 | 96 | 1 | 4 wgmma | 24 | 2 |"
    assert text.count(row) == 2
    assert text.count("### ") == 2
    assert "| gate_up | halves | 128x128x64 w8 s3 | - | - | - | - | - | - | - | - |" in text
