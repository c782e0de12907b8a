"""Every example in a docstring of the package and the benches is run, and shows what it says."""

import doctest
import importlib
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
# __main__ is a command: importing it runs it
FILES = sorted(
    path
    for folder in ("piper_kernels", "bench")
    for path in (ROOT / folder).rglob("*.py")
    if path.name != "__main__.py"
)


def module_name(path: Path) -> str:
    return ".".join(path.relative_to(ROOT).with_suffix("").parts).removesuffix(".__init__")


@pytest.mark.parametrize("path", FILES, ids=module_name)
def test_doctests(path: Path) -> None:
    module = importlib.import_module(module_name(path))
    results = doctest.testmod(module)
    assert results.failed == 0
    # a prompt that doctest did not find is an example that nobody runs
    num_prompts = sum(line.lstrip().startswith(">>> ") for line in path.read_text().splitlines())
    assert results.attempted == num_prompts
