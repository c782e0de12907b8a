"""Records survive the file, and say where they come from."""

import re
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from bench.record import Record, describe_environment, read_records, write_records
from piper_kernels.errors import DataError

RECORD = Record(
    op="experts",
    mode="forward",
    shape="olmoe_1b_7b",
    T=16,
    H=2048,
    I=1024,
    E=64,
    K=8,
    dtype="bf16",
    routing="uniform",
    variant="piper",
    num_rounds=7,
    time_us=12.5,
    p20_us=12.0,
    p80_us=13.0,
    gflops=100.0,
    gb_per_s=1.5,
    roof_gflops=200.0,
    roof_fraction=0.5,
    read_gb_per_s=None,
    read_fraction=None,
    baseline="grouped_mm",
    speedup=1.2,
    speedup_low=1.1,
    speedup_high=1.3,
    commit="abc1234",
    machine="a test",
    num_threads=2,
    load=0.5,
    torch="0",
    transformers="0",
    date="2026-01-01T00:00:00+00:00",
)


def test_write_records_appends_and_read_records_gives_them_back(tmp_path: Path) -> None:
    path = tmp_path / "new" / "moe.jsonl"
    other = replace(RECORD, variant="eager", read_gb_per_s=3.5)
    write_records(path, [RECORD])
    write_records(path, [other])
    assert read_records(path) == [RECORD, other]


@pytest.mark.parametrize("line", ['{"op": "experts"}', "not json", '{"op": 1'])
def test_read_records_names_the_line(tmp_path: Path, line: str) -> None:
    path = tmp_path / "moe.jsonl"
    write_records(path, [RECORD])
    with path.open("a") as file:
        file.write(line + "\n")
    with pytest.raises(DataError, match=r"moe\.jsonl, line 2, is no record"):
        read_records(path)


def test_describe_environment_says_what_this_is() -> None:
    environment = describe_environment()
    assert environment.torch == torch.__version__
    assert environment.num_threads == torch.get_num_threads()
    assert re.fullmatch(r"([0-9a-f]{7,}(-dirty)?|unknown)", environment.commit)
    assert re.fullmatch(r".+, \d+ cores", environment.machine)
    assert environment.date.endswith("+00:00")


def test_environment_is_noisy_when_others_take_cores(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("os.cpu_count", lambda: 8)
    environment = replace(describe_environment(), num_threads=2)
    assert not replace(environment, load=6.0).is_noisy
    assert replace(environment, load=7.0).is_noisy
