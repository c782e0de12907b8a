"""Which piper_kernels this is, and whether an unrelated package shadows it.

PyPI has an unrelated distribution ``piper-kernels`` that installs a package of our import name.
"""

import importlib.machinery
import sys
from collections.abc import Iterable, Sequence
from importlib.metadata import Distribution, distributions
from pathlib import Path

import piper_kernels
from piper_kernels.doctor.findings import Finding

IMPORT_NAME = "piper_kernels"
DISTRIBUTION = "piper-moe"


def _normal(name: str) -> str:
    return name.lower().replace("_", "-")


def find_strangers(installed: Iterable[Distribution]) -> dict[str, Path]:
    """Other distributions that install a package of our name: name -> where its package lies."""
    strangers: dict[str, Path] = {}
    for distribution in installed:
        name = _normal(distribution.metadata["Name"] or "")
        for file in distribution.files or ():
            if file.parts[0] == IMPORT_NAME and name != DISTRIBUTION:
                strangers[name] = Path(str(distribution.locate_file(IMPORT_NAME))).resolve()
                break
    return strangers


def find_from_elsewhere(paths: Sequence[str]) -> Path | None:
    """Where Python finds our name when it is started in another folder.

    The first entry of ``sys.path`` is the script's folder or the current one; it is left out. An
    editable installation has an entry of its own further down, be it the same folder.
    """
    elsewhere = [path for path in paths[1:] if path]
    spec = importlib.machinery.PathFinder.find_spec(IMPORT_NAME, elsewhere)
    return None if spec is None or spec.origin is None else Path(spec.origin).resolve().parent


def judge_identity(
    home: Path, version: str, installed: str | None, found: Path | None, strangers: dict[str, Path]
) -> list[Finding]:
    """Judge where this package lies and who else claims its name. Pure.

    Args:
        home: folder of the package that runs.
        version: its own version.
        installed: version of the installed distribution ``piper-moe``; ``None`` without one.
        found: folder that Python finds from elsewhere; ``None`` if it finds none.
        strangers: other distributions with our import name, and their folders.
    """
    return [
        _judge_location(home, found),
        _judge_distribution(version, installed),
        *(_judge_stranger(name, folder, found) for name, folder in strangers.items()),
    ]


def _judge_location(home: Path, found: Path | None) -> Finding:
    if found == home:
        return Finding(area="piper", name="location", value=str(home))
    if found is None:
        value = f"{home}, found in the current folder only"
        advice = "Install it: make install, or pip install --editable ."
    else:
        value = f"{home} here, {found} from elsewhere"
        advice = "Two copies: uninstall one, or always start Python in the same folder."
    return Finding(area="piper", name="location", value=value, status="warning", advice=advice)


def _judge_distribution(version: str, installed: str | None) -> Finding:
    if installed == version:
        return Finding(area="piper", name=DISTRIBUTION, value=version)
    value = "not installed" if installed is None else f"{installed}, but the code is {version}"
    advice = "make install, or pip install --editable ."
    return Finding(area="piper", name=DISTRIBUTION, value=value, status="warning", advice=advice)


def _judge_stranger(name: str, folder: Path, found: Path | None) -> Finding:
    shadows = folder == found
    effect = "is what Python imports" if shadows else "may be imported instead, by path order"
    return Finding(
        area="piper",
        name="shadow",
        value=f"the unrelated distribution {name} {effect}: {folder}",
        status="broken" if shadows else "warning",
        advice=f"pip uninstall {name}, then pip install --force-reinstall --no-deps {DISTRIBUTION}",
    )


def check_identity() -> list[Finding]:
    """Look at this process and its installed distributions."""
    everything = list(distributions())
    ours = [d.version for d in everything if _normal(d.metadata["Name"] or "") == DISTRIBUTION]
    return judge_identity(
        home=Path(piper_kernels.__file__).resolve().parent,
        version=piper_kernels.__version__,
        installed=ours[0] if ours else None,
        found=find_from_elsewhere(sys.path),
        strangers=find_strangers(everything),
    )
