"""The roofline's table: one line a layer and direction, one column a machine."""

from bench.machines import H100, MI300X
from bench.roofline import model_passes
from bench.roofline_report import markdown_table
from bench.shapes import GRANITE


def test_markdown_table_shows_the_numbers_of_each_machine() -> None:
    passes = [found for m in (H100, MI300X) for found in model_passes(GRANITE, 64, m)]
    header, rule, *lines = markdown_table(passes).splitlines()
    assert header.count("|") == rule.count("|") == lines[0].count("|")
    assert "DRAM GB H100 SXM" in header
    assert ">= ms MI300X" in header
    cells = [cell.strip() for cell in lines[0].strip("|").split("|")]
    assert cells[:2] == ["`granite_moe_3b` T=64", "piper forward"]
    assert cells[4] == f"{passes[0].compulsory_bytes / 1e9:.2f}"
    assert cells[6] == f"{passes[0].dram_bytes / 1e9:.2f}"
    assert len(lines) == 4
