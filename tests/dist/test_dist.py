"""The public names of piper_kernels.dist: all there, loaded when used."""

import subprocess
import sys

import pytest

import piper_kernels.dist as pdist


def test_public_names_resolve() -> None:
    for name in pdist.__all__:
        assert callable(getattr(pdist, name)), f"{name} is listed but missing"
    assert dir(pdist) == pdist.__all__
    with pytest.raises(AttributeError, match="no attribute 'nonsense'"):
        _ = pdist.nonsense


def test_importing_loads_no_torch() -> None:
    code = "import sys, piper_kernels.dist; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], timeout=60).returncode == 0
