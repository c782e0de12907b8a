"""What exceeds a budget, and the file itself."""

from dataclasses import replace

import pytest

from piper_kernels.errors import ConfigError
from piper_kernels.triton.offline.assembly import Resources
from piper_kernels.triton.offline.budgets import (
    Budgets,
    Fp32Budget,
    TargetBudget,
    find_faults,
    load_budgets,
)
from piper_kernels.triton.offline.cases import TARGETS, Case
from piper_kernels.triton.tiles import TileConfig

TALL = TileConfig(block_m=64, block_n=64, block_k=64)
SHORT = TileConfig(block_m=32, block_n=64, block_k=64)
CASE = Case(target="sm_90", op="down", dtype="bf16", variant="halves", tiles=TALL)
FINE = Resources(
    registers=100,
    stack_bytes=0,
    num_spills=0,
    shared_bytes=1024,
    num_warps=4,
    waves_per_simd=0,
    matrix={"wgmma": 4},
    num_wide_loads=8,
    num_descriptor_loads=2,
)


def test_load_budgets_has_every_target() -> None:
    assert set(load_budgets().targets) == set(TARGETS)


def test_load_budgets_is_strict() -> None:
    text = '{"targets": {"sm_90": {"spills": 0}}}'
    with pytest.raises(ConfigError, match=r"budgets\.json"):
        Budgets.from_json(text, source="budgets.json")


@pytest.mark.parametrize(
    ("change", "fault"),
    [
        ({"stack_bytes": 8}, "8 stack bytes, allowed 0"),
        ({"num_spills": 1}, "1 spills, allowed 0"),
        ({"shared_bytes": 232449}, "232449 bytes of shared memory, allowed 232448"),
        ({"matrix": {}}, "no wgmma, but no matrix instruction"),
        ({"num_descriptor_loads": 0}, "weights are not read through a tensor descriptor"),
        ({"matrix": {"mma.sync": 16}}, "no wgmma, but 16 mma.sync"),
    ],
)
def test_find_faults_names_value_and_limit(change: dict, fault: str) -> None:
    assert find_faults(CASE, FINE, load_budgets()) == []
    assert find_faults(CASE, replace(FINE, **change), load_budgets()) == [fault]


def test_find_faults_lists_all() -> None:
    bad = replace(FINE, stack_bytes=8, num_spills=2, matrix={})
    assert len(find_faults(CASE, bad, load_budgets())) == 3


@pytest.mark.parametrize(
    ("target", "tiles", "kind", "is_fine"),
    [
        ("sm_90", SHORT, "mma.sync", True),
        ("sm_90", SHORT, "wgmma", True),
        ("sm_100", TALL, "tcgen05", True),
        ("sm_100", TALL, "mma.sync", False),
        ("sm_100", SHORT, "mma.sync", True),
        ("sm_80", TALL, "mma.sync", True),
        ("gfx942", TALL, "mfma_f32_32x32x8_bf16", True),
        ("gfx942", SHORT, "mma.sync", False),
    ],
)
def test_find_faults_knows_each_target(
    target: str, tiles: TileConfig, kind: str, is_fine: bool
) -> None:
    case = replace(CASE, target=target, tiles=tiles)
    faults = find_faults(case, replace(FINE, matrix={kind: 1}), load_budgets())
    assert (faults == []) is is_fine


def test_find_faults_asks_no_matrix_of_fp32_and_of_moves() -> None:
    plain = replace(FINE, matrix={})
    assert find_faults(replace(CASE, dtype="fp32"), plain, load_budgets()) == []
    assert find_faults(replace(CASE, op="permute", tiles=None), plain, load_budgets()) == []


def test_find_faults_of_fp32_follow_the_file() -> None:
    budget = TargetBudget(
        tall_matrix=("wgmma",),
        short_matrix=("wgmma",),
        fp32=Fp32Budget(stack_bytes=16, num_spills=4),
    )
    budgets = Budgets(targets={"sm_90": budget})
    case = replace(CASE, dtype="fp32")
    assert find_faults(case, replace(FINE, stack_bytes=16, num_spills=4), budgets) == []
    over = replace(FINE, stack_bytes=17, num_spills=5)
    assert find_faults(case, over, budgets) == ["17 stack bytes, allowed 16", "5 spills, allowed 4"]
    assert len(find_faults(CASE, replace(FINE, stack_bytes=16), budgets)) == 1
