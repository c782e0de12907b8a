"""Whose piper_kernels this is, with distributions made for the test."""

import sys
from importlib.metadata import Distribution, distributions
from pathlib import Path

import pytest

import piper_kernels
from piper_kernels.doctor.identity import (
    check_identity,
    find_from_elsewhere,
    find_strangers,
    judge_identity,
)

HOME = Path("/site/piper_kernels")


def install(site: Path, name: str, files: list[str]) -> None:
    """Lay out an installed distribution as pip does."""
    info = site / f"{name.replace('-', '_')}-1.0.dist-info"
    info.mkdir(parents=True)
    (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: 1.0\n")
    (info / "RECORD").write_text("".join(f"{file},,\n" for file in files))
    for file in files:
        (site / file).parent.mkdir(parents=True, exist_ok=True)
        (site / file).touch()


def installed_in(site: Path) -> list[Distribution]:
    return list(distributions(path=[str(site)]))


def test_find_strangers_names_who_installs_our_import(tmp_path: Path) -> None:
    install(tmp_path, "piper-kernels", ["piper_kernels/__init__.py"])
    install(tmp_path, "Piper_MoE", ["piper_kernels/__init__.py", "piper_kernels/config.py"])
    install(tmp_path, "pipes", ["pipes/__init__.py"])
    assert find_strangers(installed_in(tmp_path)) == {"piper-kernels": tmp_path / "piper_kernels"}


def test_find_strangers_survives_a_distribution_without_a_record(tmp_path: Path) -> None:
    install(tmp_path, "odd", ["odd.py"])
    (tmp_path / "odd-1.0.dist-info" / "RECORD").unlink()
    assert find_strangers(installed_in(tmp_path)) == {}


def test_find_from_elsewhere_leaves_out_the_current_folder(tmp_path: Path) -> None:
    here, there = tmp_path / "here", tmp_path / "there"
    for place in (here, there):
        (place / "piper_kernels").mkdir(parents=True)
        (place / "piper_kernels" / "__init__.py").touch()
    assert find_from_elsewhere([str(here), str(there)]) == there / "piper_kernels"
    assert find_from_elsewhere([str(here), ""]) is None
    # an editable installation of the current folder counts
    assert find_from_elsewhere([str(here), str(here)]) == here / "piper_kernels"


def judge(
    found: Path | None = HOME,
    installed: str | None = "1.0",
    strangers: dict[str, Path] | None = None,
) -> dict[str, tuple[str, str, str]]:
    findings = judge_identity(HOME, "1.0", installed, found, strangers or {})
    return {f.name: (f.status, f.value, f.advice) for f in findings}


def test_judge_identity_is_content_with_one_installed_copy() -> None:
    assert judge() == {
        "location": ("ok", "/site/piper_kernels", ""),
        "piper-moe": ("ok", "1.0", ""),
    }


def test_judge_identity_warns_of_a_copy_that_runs_in_one_folder_only() -> None:
    status, value, advice = judge(found=None)["location"]
    assert (status, value) == ("warning", "/site/piper_kernels, found in the current folder only")
    assert "pip install --editable ." in advice


def test_judge_identity_warns_of_two_copies() -> None:
    status, value, _ = judge(found=Path("/other/piper_kernels"))["location"]
    assert status == "warning"
    assert value == "/site/piper_kernels here, /other/piper_kernels from elsewhere"


@pytest.mark.parametrize(
    ("installed", "value"), [(None, "not installed"), ("0.9", "0.9, but the code is 1.0")]
)
def test_judge_identity_warns_of_a_stale_installation(installed: str | None, value: str) -> None:
    status, found, advice = judge(installed=installed)["piper-moe"]
    assert (status, found) == ("warning", value)
    assert "make install" in advice


def test_judge_identity_calls_a_shadow_broken() -> None:
    status, value, advice = judge(strangers={"piper-kernels": HOME})["shadow"]
    assert status == "broken"
    assert value == (
        "the unrelated distribution piper-kernels is what Python imports: /site/piper_kernels"
    )
    assert advice.startswith("pip uninstall piper-kernels, then pip install --force-reinstall")


def test_judge_identity_warns_of_a_stranger_that_waits_on_the_path() -> None:
    status, value, _ = judge(strangers={"piper-kernels": Path("/late/piper_kernels")})["shadow"]
    assert status == "warning"
    assert "may be imported instead" in value


def test_check_identity_finds_this_package(monkeypatch: pytest.MonkeyPatch) -> None:
    home = Path(piper_kernels.__file__).resolve().parent
    monkeypatch.setattr(sys, "path", ["/a/script", str(home.parent), *sys.path])
    location = check_identity()[0]
    assert (location.status, location.value) == ("ok", str(home))
