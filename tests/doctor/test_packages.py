"""Versions: parsed, compared, and asked for as in pyproject.toml."""

import re
import tomllib
from pathlib import Path

import pytest

from piper_kernels.doctor import packages
from piper_kernels.doctor.packages import (
    REQUIREMENTS,
    Requirement,
    check_packages,
    is_at_least,
    judge_package,
    release,
)

PYPROJECT = tomllib.loads((Path(__file__).parents[2] / "pyproject.toml").read_text())["project"]
TORCH = Requirement("torch", "2.10")
HF = Requirement("transformers", "5.17", "hf")


def asked_for(lines: list[str]) -> dict[str, str]:
    """Distribution -> minimum of pyproject's ``name>=version; marker`` lines."""
    found = {}
    for line in lines:
        match = re.match(r"([A-Za-z0-9_-]+)(?:\[\w+\])?>=([\d.]+)", line)
        if match:
            found[match.group(1)] = match.group(2)
    return found


def test_requirements_are_those_of_pyproject() -> None:
    core = {r.name: r.minimum for r in REQUIREMENTS if not r.extra}
    assert core == asked_for(PYPROJECT["dependencies"])
    for requirement in REQUIREMENTS:
        if requirement.extra:
            extra = asked_for(PYPROJECT["optional-dependencies"][requirement.extra])
            assert extra[requirement.name] == requirement.minimum
    assert PYPROJECT["requires-python"] == f">={packages.MINIMUM_PYTHON}"
    development = asked_for(PYPROJECT["optional-dependencies"]["dev"])
    assert development["transformers"] == packages.TRANSFORMERS_FOR_EP


@pytest.mark.parametrize(
    ("text", "numbers"),
    [("2.13.0+cpu", (2, 13, 0)), ("5.24.0.dev1", (5, 24, 0)), ("3.9", (3, 9)), ("odd", ())],
)
def test_release_takes_the_numbers(text: str, numbers: tuple[int, ...]) -> None:
    assert release(text) == numbers


@pytest.mark.parametrize(
    ("found", "minimum", "is_enough"),
    [
        ("2.10.0+cpu", "2.10", True),
        ("2.9.1", "2.10", False),
        ("3", "2.10", True),
        ("2.10", "2.10.0", True),
        ("odd", "1", False),
    ],
)
def test_is_at_least_compares_numbers_not_text(found: str, minimum: str, is_enough: bool) -> None:
    assert is_at_least(found, minimum) == is_enough


def test_judge_package_breaks_on_what_piper_needs() -> None:
    missing = judge_package(TORCH, None, is_linux=True)
    assert (missing.status, missing.advice) == ("broken", "pip install 'torch>=2.10'")
    old = judge_package(TORCH, "2.9.1", is_linux=True)
    assert (old.status, old.value) == ("broken", "2.9.1, older than 2.10")
    assert judge_package(TORCH, "2.13.0+cpu", is_linux=True).status == "ok"


def test_judge_package_lets_an_extra_be_absent_but_not_old() -> None:
    missing = judge_package(HF, None, is_linux=True)
    assert (missing.status, missing.value) == ("ok", "not installed")
    assert missing.advice == "optional: pip install 'piper-moe[hf]'"
    assert judge_package(HF, "5.0.0", is_linux=True).status == "warning"


def test_judge_package_says_what_an_older_transformers_lacks() -> None:
    assert "needs 5.24" in judge_package(HF, "5.17.0", is_linux=True).advice
    assert judge_package(HF, "5.24.0", is_linux=True).advice == ""


def test_judge_package_asks_for_triton_on_linux_only() -> None:
    triton = Requirement("triton", "3.6")
    assert judge_package(triton, None, is_linux=True).status == "broken"
    assert judge_package(triton, None, is_linux=False).status == "ok"


def test_check_packages_finds_what_these_tests_run_on() -> None:
    found = {finding.name: finding for finding in check_packages()}
    import torch

    assert found["torch"].value == torch.__version__
    assert found["python"].status == "ok"
    assert set(found) == {"python", *(r.name for r in REQUIREMENTS)}
