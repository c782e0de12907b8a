import runpy
import subprocess
import sys
import types
from pathlib import Path

import pytest
import transformers
from transformers.integrations import moe

from piper_kernels.huggingface import integration

ROOT = Path(__file__).resolve().parents[2]


def run_python(code: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, cwd=ROOT, timeout=120
    )


def test_import_without_transformers_says_what_to_install(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setitem(sys.modules, "transformers", None)
    message = "transformers must be installed, version 5.17 or newer, got none. Run: pip install"
    with pytest.raises(ImportError, match=message):
        runpy.run_path(integration.__file__)


def test_import_with_old_transformers_names_its_version(monkeypatch: pytest.MonkeyPatch) -> None:
    old = types.ModuleType("transformers")
    old.__version__ = "4.57.1"
    monkeypatch.setitem(sys.modules, "transformers", old)
    # else the import machinery would find the real one's parts
    monkeypatch.delitem(sys.modules, "transformers.activations")
    message = r"transformers must be version 5.17 or newer, got 4\.57\.1\. Run: pip install"
    with pytest.raises(ImportError, match=message):
        runpy.run_path(integration.__file__)


def test_import_with_transformers_before_the_flags_names_its_version(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def decorator(experts_class: type, *, is_transposed: bool = False) -> type:
        return experts_class

    monkeypatch.setattr(moe, "use_experts_implementation", decorator)
    with pytest.raises(ImportError, match=f"got {transformers.__version__}"):
        runpy.run_path(integration.__file__)


@pytest.mark.slow
def test_import_of_the_package_without_transformers() -> None:
    code = "import sys; sys.modules['transformers'] = None; import piper_kernels.huggingface"
    done = run_python(code)
    assert done.returncode == 1
    assert done.stderr.rstrip().endswith("Run: pip install 'transformers>=5.17'")
