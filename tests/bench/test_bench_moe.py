"""The MoE bench from its command line to its last line, on a tiny shape."""

import io
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from bench import bench_moe
from bench.bench_moe import Settings, list_cases, list_targets, main, make_parser, read_settings
from bench.gate import GateError
from bench.moe_problem import build_problem
from bench.moe_variants import register_implementations
from bench.record import Record, read_records
from bench.shapes import SHAPES, Shape
from bench.timing import Budget

TINY = Shape(name="tiny", H=32, I=40, E=16, K=2, family="mixtral", source="tests/config.json")


@pytest.fixture(autouse=True)
def _tiny(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(SHAPES, "tiny", TINY)
    register_implementations()


def settings(**changes: Any) -> Settings:
    words = ["--shape", "tiny", "--tokens", "4", "--dtype", "fp32", "--routing", "uniform"]
    return replace(read_settings(make_parser().parse_args(words)), **changes)


def test_main_checks_times_and_counts(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(bench_moe, "Budget", lambda **_: Budget(min_rounds=6, max_rounds=6))
    words = "--shape tiny --tokens 4,32 --dtype fp32 --routing uniform --op experts,block"
    status = main([*words.split(), "--out", str(tmp_path)])
    lines = capsys.readouterr().out.splitlines()
    assert status == 0, "a miss counts with --strict only"
    assert lines[-1].startswith("targets: ")
    assert max(map(len, lines)) <= 100
    records = read_records(tmp_path / "moe_cpu.jsonl")
    assert (tmp_path / "moe_cpu.png").read_bytes().startswith(b"\x89PNG")
    assert {(r.op, r.T) for r in records} == {
        (op, num_tokens) for op in ("experts", "block") for num_tokens in (4, 32)
    }
    forward = {r.variant for r in records if (r.mode, r.T) == ("forward", 4)}
    assert forward == {"piper", "grouped_mm", "eager", "batched_mm"}
    # eager's backward takes part at one T, the one nearest to 64
    eager = {r.T for r in records if (r.mode, r.variant) == ("forward_backward", "eager")}
    assert eager == {32}
    assert all((r.read_fraction is not None) == (r.mode == "forward" and r.T == 4) for r in records)
    assert {r.kind for r in records} == {"measured"}


def test_main_refuses_a_wrong_variant(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    from transformers.integrations.moe import ALL_EXPERTS_FUNCTIONS

    def register_a_wrong_one() -> None:
        register_implementations()
        right = ALL_EXPERTS_FUNCTIONS["piper"]
        ALL_EXPERTS_FUNCTIONS.register("piper", lambda *args: right(*args) * 1.01)

    monkeypatch.setattr(bench_moe, "register_implementations", register_a_wrong_one)
    words = "--shape tiny --tokens 4 --dtype fp32 --routing uniform --mode forward"
    assert main(words.split()) == 2
    captured = capsys.readouterr()
    assert "bench_moe: gate: piper disagrees with the oracle: y, part" in captured.err
    assert "targets:" not in captured.out


def test_run_problem_raises_before_timing(monkeypatch: pytest.MonkeyPatch) -> None:
    problem = build_problem("experts", TINY, 4, "fp32", "uniform")

    def wrong(*arguments: Any, **keywords: Any) -> list[Any]:
        variants = bench_moe.implementation_variant(problem, "forward", "eager")
        return [replace(variants, outputs=lambda: {"y": problem.x.detach()})]

    def stopwatch(run: Callable[[], object]) -> float:
        raise AssertionError("a wrong variant was timed")

    monkeypatch.setattr(bench_moe, "choose_variants", wrong)
    case = bench_moe.Case(
        op="experts",
        mode="forward",
        shape=TINY,
        num_tokens=4,
        dtype="fp32",
        routing="uniform",
        cost=bench_moe.case_cost(problem, "forward"),
    )
    with pytest.raises(GateError, match="eager disagrees"):
        bench_moe.run_problem(
            problem,
            case,
            "forward",
            has_eager_backward=False,
            environment=bench_moe.describe_environment(),
            budget=Budget(),
            stopwatch=stopwatch,
        )


def test_choose_variants_leaves_batched_mm_out_where_it_copies_too_much(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    problem = build_problem("experts", TINY, 4, "fp32", "uniform")

    def names() -> list[str]:
        found = bench_moe.choose_variants(problem, "forward_backward", has_eager_backward=False)
        return [variant.name for variant in found]

    assert names() == ["piper", "grouped_mm", "batched_mm"]
    monkeypatch.setattr(bench_moe, "MAX_BATCHED_BYTES", 1)
    assert names() == ["piper", "grouped_mm"]


def test_case_cost_counts_hit_experts_and_a_blocks_router() -> None:
    few = build_problem("experts", TINY, 1, "fp32", "uniform")
    # fp32: x 128, two experts' weights 30720, pre-activation none, act 320, rows 256, y 128,
    # act and rows read again, and the maps 8 + 16
    forward = bench_moe.case_cost(few, "forward")
    assert forward.bytes == 128 + 30720 + 2 * 320 + 2 * 256 + 128 + 8 + 16
    assert forward.flops == 2 * 2 * 3 * 32 * 40 + 2 * 2 * 32
    block = bench_moe.case_cost(build_problem("block", TINY, 1, "fp32", "router"), "forward")
    assert block.flops - forward.flops == 2 * 32 * 16


def test_list_cases_gives_a_block_one_routing() -> None:
    both = settings(ops=("experts", "block"), routings=("uniform", "skewed"))
    found = [(op, routing) for op, _, _, _, routing in list_cases(both)]
    assert found == [("experts", "uniform"), ("experts", "skewed"), ("block", "router")]


def record(**changes: Any) -> Record:
    problem = build_problem("experts", TINY, 4, "fp32", "uniform")
    case = bench_moe.Case(
        op="experts",
        mode="forward",
        shape=TINY,
        num_tokens=64,
        dtype="fp32",
        routing="uniform",
        cost=bench_moe.case_cost(problem, "forward"),
    )
    samples = {"piper": [1.0], "grouped_mm": [1.0], "dense_gemm": [1.0]}
    from bench.harness import Roof, make_records

    base = make_records(
        case,
        samples,
        gemm_roof=Roof(variant="dense_gemm", amount=1),
        read_roof=None,
        baseline="grouped_mm",
        environment=bench_moe.describe_environment(),
    )[0]
    return replace(base, **changes)


def test_list_targets_takes_means_and_worst_cases_of_the_right_records() -> None:
    train = {"mode": "forward_backward", "roof_fraction": 0.5}
    found = list_targets(
        [
            record(**train, speedup=1.0, speedup_low=0.9),
            record(**train, speedup=4.0, speedup_low=3.0, T=1),
            record(speedup=2.0, speedup_low=1.5, roof_fraction=0.8),
            record(speedup=3.0, speedup_low=0.5, T=16, roof_fraction=0.01, read_fraction=0.75),
            record(speedup=99.0, speedup_low=0.1, variant="eager"),
            record(speedup=99.0, speedup_low=0.1, op="block"),
        ]
    )
    assert [target.measured for target in found] == pytest.approx([2.0, 0.9, 2.0, 1.5, 3.0])
    assert [target.is_met for target in found] == [True, False, True, True, True]
    # at the roof: 2 / 0.5, 2 / 0.8, and in decode 3 / 0.75
    limits = [target.limit for target in found if target.limit is not None]
    assert limits == pytest.approx([4.0, 2.5, 4.0])


def test_list_targets_without_records_measures_nothing() -> None:
    assert all(target.measured is None for target in list_targets([]))


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ("--dtype fp64", "--dtype: 'fp64' is none of fp32, bf16"),
        ("--op expert", "--op: 'expert' is none of experts, block"),
        ("--routing odd", "--routing: 'odd' is none of uniform, skewed"),
        ("--tokens 4,x", "--tokens: 4,x are not integers >= 1"),
        ("--tokens 0", "--tokens: 0 are not integers >= 1"),
        ("--tokens ,", "--tokens: nothing is named"),
        ("--shape ,", "--shape: nothing is named"),
        ("--mode ,", "--mode: nothing is named"),
        ("--seconds nan", "--seconds: nan is not a number above 0"),
        ("--seconds 0", "--seconds: 0.0 is not a number above 0"),
        ("--device cuda", "invalid choice: 'cuda'"),
    ],
)
def test_main_refuses_unknown_words(
    words: str, message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit, match="2"):
        main(words.split())
    assert message in capsys.readouterr().err


def test_main_refuses_a_folder_that_it_cannot_write_before_it_measures(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(bench_moe, "run", None)
    assert main(["--quick", "--out", "/dev/null/results"]) == 2
    message = "out must be writable, got /dev/null/results/moe_cpu.jsonl (Not a directory). Choose"
    assert message in capsys.readouterr().err


def test_main_suggests_a_shape(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--shape", "olmoe_1b"]) == 2
    assert "find_shape: name must be a known shape, got 'olmoe_1b'" in capsys.readouterr().err


def test_read_settings_quick_is_small() -> None:
    quick = read_settings(make_parser().parse_args(["--quick"]))
    assert [shape.name for shape in quick.shapes] == ["granite_moe_3b", "olmoe_1b_7b"]
    assert len(list_cases(quick)) == 4


def test_run_prints_every_case_as_it_ends(monkeypatch: pytest.MonkeyPatch) -> None:
    text = io.StringIO()
    cases = bench_moe.run(
        settings(budget=Budget(min_rounds=1, max_rounds=1)),
        Console(file=text, width=100),
        bench_moe.describe_environment(),
    )
    records = list(next(cases))
    assert text.getvalue().count("roofs: dense GEMM") == 1
    for found in cases:
        records += found
    assert text.getvalue().count("roofs: dense GEMM") == 2
    assert {r.mode for r in records} == {"forward", "forward_backward"}
