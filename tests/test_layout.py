"""Size is a design signal: ceilings for files and functions, and a test file for every module."""

import ast
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
PACKAGE = ROOT / "piper_kernels"
MODULES = sorted(PACKAGE.rglob("*.py"))
BENCHES = sorted((ROOT / "bench").rglob("*.py"))

MOST_LINES_OF_A_FILE = 400
# docstrings apart: they are as long as the op needs
MOST_LINES_OF_A_FUNCTION = 80
MOST_LINES_OF_A_KERNEL = 160

# modules without a test file of their own name, and why; a key that ends in / is a folder whose
# modules may be tested through others
TESTED_ELSEWHERE = {
    "piper_kernels/__init__.py": "tests/test_imports.py: every public name resolves, lazily",
    "piper_kernels/contracts.py": "data and four sizes, used by every test of functional/ and cpu/",
    "piper_kernels/dist/dedup.py": "tests/dist/test_dispatcher.py, which every layer goes through",
    "piper_kernels/dist/exchange_group.py": "tests/dist/test_all_to_all.py, as every group",
    "piper_kernels/dist/expert_parallel.py": "settings; tests/dist/test_dispatcher.py",
    "piper_kernels/dist/halo.py": "tests/dist/test_all_to_all.py carries out every route",
    "piper_kernels/dist/halo_program.py": "data; tests/dist/test_halo_routes.py carries it out",
    "piper_kernels/dist/header.py": "mistakes in tests/dist/test_all_to_all.py, test_dispatcher.py",
    "piper_kernels/dist/messages.py": "tests/dist/test_all_to_all.py and test_exchange_faults.py",
    "piper_kernels/pipeline/stage_gradients.py": "tests/pipeline/test_runtime.py: every gradient",
    "piper_kernels/pipeline/torch_schedule.py": "tests/pipeline/test_runtime.py: every schedule",
    "piper_kernels/train/export.py": "tests/train/test_parallel_run.py: equal to the bit",
    "piper_kernels/train/parallel_checkpoint.py": "tests/train/test_parallel_run.py: any mesh",
    "piper_kernels/train/parallel_trainer.py": "tests/train/test_parallel_run.py trains with it",
    "piper_kernels/train/rank_tensors.py": "tests/train/test_parallel_run.py compares all keys",
    "piper_kernels/testing/training.py": "the plain loop that tests/pipeline/test_runtime.py needs",
    "piper_kernels/triton/offline/compiling.py": "tests/triton/offline/test_pool.py and _recording",
    "piper_kernels/testing/cluster/bridge_engine.py": "tests/testing/cluster/test_cluster.py",
    "piper_kernels/testing/cluster/counters.py": "tests/testing/cluster/test_cluster.py",
    "piper_kernels/testing/cluster/host.py": "tests/testing/cluster/test_cluster.py",
    "piper_kernels/testing/cluster/node_network.py": "tests/testing/cluster/test_cluster.py",
    "piper_kernels/testing/cluster/tun_engine.py": "tests/testing/cluster/test_cluster.py",
    "piper_kernels/testing/exchange.py": "a simulation that tests/dist/test_halo_routes.py runs",
    "piper_kernels/testing/rank_group.py": "tests/testing/test_ranks.py, through run_ranks",
    "piper_kernels/testing/rank_process.py": "tests/testing/test_ranks.py, through run_ranks",
    "piper_kernels/triton/chunks.py": "long experts in tests/triton/test_grouped_gemm_wgrad.py",
    "piper_kernels/triton/gate_up.py": "kernel of the experts: tests/triton/test_experts.py",
    "piper_kernels/triton/grad_act.py": "kernel of the experts: tests/triton/test_experts.py",
    "piper_kernels/triton/ragged.py": "device code that every ragged kernel's test runs",
    "piper_kernels/triton/tune_layer.py": "tests/triton/test_launch_tiles.py tunes layers with it",
    "bench/gpu/": "run whole by .ci/run (python -m bench.gpu --dry-run); what decides has tests",
    "piper_kernels/huggingface/": "tested by what users call: experts function, blocks, models",
    "piper_kernels/cpu/": "held to the oracle through functional/, whose backend it is",
    "piper_kernels/functional/": "tested by public op; the ops' parts are not public",
    "piper_kernels/modules/": "parts of PiperMoE, tested through it: tests/test_moe*.py",
    "piper_kernels/reference/": "the oracle: tests/test_doctests.py runs its numeric examples",
}


def relative(path: Path) -> str:
    return path.relative_to(ROOT).as_posix()


def test_file_of(path: Path) -> Path:
    """Where a module's tests belong; a package's ``__init__`` is tested under its folder's name."""
    inside = path.relative_to(PACKAGE if path.is_relative_to(PACKAGE) else ROOT)
    name = inside.parent.name if inside.stem == "__init__" else inside.stem
    return ROOT / "tests" / inside.parent / f"test_{name}.py"


test_file_of.__test__ = False  # type: ignore[attr-defined]


def has_code(path: Path) -> bool:
    """Whether there is anything besides a docstring and names handed on."""
    return any(
        not isinstance(node, ast.Expr | ast.Import | ast.ImportFrom)
        and not (isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) == "__all__")
        for node in ast.parse(path.read_text()).body
    )


def is_kernel(function: ast.FunctionDef | ast.AsyncFunctionDef) -> bool:
    """Whether a decorator is ``triton.jit``, called or not."""
    return any("triton.jit" in ast.unparse(decorator) for decorator in function.decorator_list)


def num_code_lines(function: ast.FunctionDef | ast.AsyncFunctionDef) -> int:
    """Lines from ``def`` to the end, its docstring apart."""
    assert function.end_lineno is not None
    lines = function.end_lineno - function.lineno + 1
    first = function.body[0]
    if ast.get_docstring(function) is not None:
        assert first.end_lineno is not None
        lines -= first.end_lineno - first.lineno + 1
    return lines


@pytest.mark.parametrize("path", [*MODULES, *BENCHES], ids=relative)
def test_files_and_functions_stay_small(path: Path) -> None:
    text = path.read_text()
    assert text.count("\n") <= MOST_LINES_OF_A_FILE, "one purpose a file: cut it"
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            ceiling = MOST_LINES_OF_A_KERNEL if is_kernel(node) else MOST_LINES_OF_A_FUNCTION
            assert num_code_lines(node) <= ceiling, f"{node.name}, line {node.lineno}: cut it"


@pytest.mark.parametrize("path", [*MODULES, *BENCHES], ids=relative)
def test_every_module_has_a_test_file(path: Path) -> None:
    expected = test_file_of(path)
    reason = TESTED_ELSEWHERE.get(relative(path))
    if not has_code(path):
        assert reason is None, "nothing to test: take it off the table"
    elif reason is not None:
        assert not expected.exists(), f"{relative(expected)} exists: take it off the table"
    elif f"{relative(path.parent)}/" not in TESTED_ELSEWHERE:
        remedy = "Write it, or give a reason in TESTED_ELSEWHERE."
        assert expected.exists(), f"{relative(path)} has no {relative(expected)}. {remedy}"


def test_tested_elsewhere_names_what_exists() -> None:
    for name, reason in TESTED_ELSEWHERE.items():
        assert (ROOT / name).is_dir() if name.endswith("/") else (ROOT / name).is_file()
        assert len(reason) > 20, f"{name}: say why"


def test_tests_have_no_init_and_differ_in_path() -> None:
    assert not list((ROOT / "tests").rglob("__init__.py")), "it would shadow a library"


def test_num_code_lines_leaves_the_docstring_out() -> None:
    source = 'def f():\n    """One.\n\n    Two.\n    """\n    return 1\n'
    (function,) = ast.parse(source).body
    assert isinstance(function, ast.FunctionDef)
    assert num_code_lines(function) == 2


def test_is_kernel_knows_the_decorator() -> None:
    source = "@triton.jit\ndef a(): pass\n@triton.jit(do_not_specialize=['n'])\ndef b(): pass\n"
    source += "@lru_cache\ndef c(): pass\n"
    functions = [node for node in ast.parse(source).body if isinstance(node, ast.FunctionDef)]
    assert [is_kernel(function) for function in functions] == [True, True, False]
