"""The import table of docs/design.md, enforced: who may import whom, and what loads when."""

import ast
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
PACKAGE = ROOT / "piper_kernels"

PURE_DIST = {
    f"dist.{m}"
    for m in (
        "links",
        "topology",
        "topology_presets",
        "topology_launcher",
        "topology_advice",
        "mesh_layout",
        "placement_map",
        "exchange_counts",
        "halo_plan",
        "halo_phases",
        "halo_program",
        "halo_routes",
        "halo_check",
        "halo_print",
        "link_loads",
        "phase_time",
        "chunk_schedule",
        "traffic_tasks",
        "traffic",
        "flow_network",
        "fair_share",
        "reduction_chunks",
        "simulate",
    )
}
PURE_PIPELINE = {
    f"pipeline.{m}"
    for m in (
        "platform",
        "resource_model",
        "plan",
        "planner",
        "schedule",
        "expert_costs",
        "load_history",
        "migration_policy",
        "placement_exact",
        "placement_moves",
        "placement_pack",
        "placement_replicate",
        "placement_swap",
    )
}
PURE = {"errors", "config", "cost", "strict_model", *PURE_DIST, *PURE_PIPELINE}

# Room -> the rooms it may import. A room is the longest matching prefix of a module's dotted name.
ROUTING_AND_BELOW = {
    "errors",
    "config",
    "cost",
    "strict_model",
    "autocast",
    "choice",
    "routing",
    "balance",
    "permutation",
    "contracts",
}
OPS = {*ROUTING_AND_BELOW, "functional", "cpu", "reference"}
EVERYTHING = {"*"}
ALLOWED: dict[str, set[str]] = {
    "errors": set(),
    "config": {"errors"},
    "strict_model": {"errors"},
    "cost": {"errors", "config"},
    "autocast": set(),
    "choice": {"config"},
    "routing": {"errors", "config", "autocast", "choice"},
    "balance": {"errors", "config", "autocast", "routing"},
    "permutation": {"errors", "config", "routing"},
    "contracts": {"config"},
    "reference": {*ROUTING_AND_BELOW, "reference"},
    "cpu": {*ROUTING_AND_BELOW, "cpu"},
    "triton": {*ROUTING_AND_BELOW, "triton"},
    "functional": {*ROUTING_AND_BELOW, "reference", "cpu", "triton", "functional"},
    "modules": {*ROUTING_AND_BELOW, "functional", "reference", "modules"},
    "moe": {*ROUTING_AND_BELOW, "functional", "modules", "dist.dispatcher"},
    "huggingface": {*OPS, "moe", "dist", "huggingface"},
    **dict.fromkeys(PURE_DIST, PURE - PURE_PIPELINE),
    **dict.fromkeys(PURE_PIPELINE, PURE),
    "dist": {*OPS, "dist"},
    "pipeline": {*OPS, "moe", "huggingface", "dist", "pipeline"},
    "train": {*OPS, "moe", "huggingface", "dist", "pipeline", "train"},
    "testing": EVERYTHING,
    "doctor": EVERYTHING,
    "cli": EVERYTHING,
    "__main__": EVERYTHING,
    "": EVERYTHING,
}
MODULES = sorted(PACKAGE.rglob("*.py"))


def dotted_name(path: Path) -> str:
    parts = path.relative_to(PACKAGE).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


def room_of(name: str) -> str:
    while name and name not in ALLOWED:
        name = name.rpartition(".")[0]
    return name


def imported_names(tree: ast.AST) -> list[str]:
    """Absolute dotted names of everything imported anywhere in a module, lazy imports included."""
    names: list[str] = []
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            names += [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"relative import in line {node.lineno}"
            names += [f"{node.module}.{alias.name}" for alias in node.names]
    return names


@pytest.mark.parametrize("path", MODULES, ids=lambda p: dotted_name(p) or "piper_kernels")
def test_imports_follow_the_table(path: Path) -> None:
    room = room_of(dotted_name(path))
    allowed = ALLOWED[room]
    for name in imported_names(ast.parse(path.read_text())):
        top, _, rest = name.partition(".")
        assert top not in {"bench", "tests"}, f"{room} imports {name}"
        assert top != "triton" or room in {"triton", "doctor"}, f"{room} imports the triton library"
        assert name != "piper_kernels.triton", f"{path}: import functions, not the triton folder"
        if top != "piper_kernels" or not rest:
            continue
        target = room_of(rest)
        assert target != "testing" or room == "testing", f"{room} imports testing"
        fits = "*" in allowed or any(target == a or target.startswith(a + ".") for a in allowed)
        assert fits, f"{room} may not import {name} (room {target})"


def run_python(code: str) -> str:
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, cwd=ROOT, timeout=120
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


PURE_MODULES = [name for name in map(dotted_name, MODULES) if name in PURE]


def test_pure_rooms_load_without_torch() -> None:
    modules = [f"piper_kernels.{name}".rstrip(".") for name in ["", *PURE_MODULES]]
    code = f"""
import importlib, sys
for name in {modules!r}:
    importlib.import_module(name)
    assert not {{"torch", "triton"}} & set(sys.modules), f"{{name}} loads torch or triton"
"""
    run_python(code)


def test_triton_is_the_library() -> None:
    triton = pytest.importorskip("triton")
    assert not Path(triton.__file__).is_relative_to(PACKAGE), "the folder shadows the library"


def test_public_names_resolve() -> None:
    import piper_kernels

    for name in piper_kernels.__all__:
        assert getattr(piper_kernels, name) is not None, f"{name} is listed but missing"
    with pytest.raises(AttributeError, match="no attribute 'nonsense'"):
        _ = piper_kernels.nonsense


def test_functional_names_are_the_ops() -> None:
    from piper_kernels import functional

    for name in functional.__all__:
        assert callable(getattr(functional, name)), f"functional.{name} is not the op"
