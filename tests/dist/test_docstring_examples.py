"""The numbers in the docstrings of the pure rooms are true."""

import doctest
import importlib
from pathlib import Path

import pytest

import piper_kernels

PACKAGE = Path(piper_kernels.__file__).parent
FILES = [PACKAGE / "strict_model.py", *sorted((PACKAGE / "dist").glob("*.py"))]
ROOMS = [path.stem for path in FILES if "import torch" not in path.read_text()]


@pytest.mark.parametrize("room", ROOMS)
def test_examples_in_docstrings(room: str) -> None:
    folder = "" if room == "strict_model" else "dist."
    module = importlib.import_module(f"piper_kernels.{folder}{room}".removesuffix(".__init__"))
    assert doctest.testmod(module).failed == 0
