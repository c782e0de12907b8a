"""What is installed, and whether it is recent enough."""

import platform
import re
import sys
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, version

from piper_kernels.doctor.findings import Finding


@dataclass(frozen=True, slots=True)
class Requirement:
    """A distribution, the oldest version that works, and the extra that asks for it.

    ``extra`` is empty for what Piper cannot do without.
    """

    name: str
    minimum: str
    extra: str = ""


# as in pyproject.toml; a test compares the two
REQUIREMENTS = (
    Requirement("torch", "2.10"),
    Requirement("triton", "3.6"),
    Requirement("numpy", "1.26"),
    Requirement("scipy", "1.11"),
    Requirement("einops", "0.8"),
    Requirement("pydantic", "2.8"),
    Requirement("rich", "13.7"),
    Requirement("transformers", "5.17", "hf"),
    Requirement("safetensors", "0.5", "hf"),
    Requirement("matplotlib", "3.9", "train"),
    Requirement("accelerate", "1.10", "dev"),
    Requirement("peft", "0.21", "dev"),
)
MINIMUM_PYTHON = "3.11"
# distributed experts behind Hugging Face's own registry need more than the experts function does
TRANSFORMERS_FOR_EP = "5.24"


def release(text: str) -> tuple[int, ...]:
    """The numeric part of a version.

    Example:
        >>> release("2.13.0+cpu")
        (2, 13, 0)
    """
    match = re.match(r"\d+(\.\d+)*", text)
    return tuple(int(part) for part in match.group().split(".")) if match else ()


def is_at_least(found: str, minimum: str) -> bool:
    """Compare releases; ``3.9`` equals ``3.9.0``, a pre-release counts as its release."""
    have, want = release(found), release(minimum)
    length = max(len(have), len(want))
    return have + (0,) * (length - len(have)) >= want + (0,) * (length - len(want))


def judge_package(requirement: Requirement, found: str | None, *, is_linux: bool) -> Finding:
    """Judge one distribution. Pure.

    Args:
        requirement: what is asked for.
        found: the installed version, ``None`` for none.
        is_linux: triton is required on Linux only.
    """
    name, minimum, extra = requirement.name, requirement.minimum, requirement.extra
    is_optional = bool(extra) or (name == "triton" and not is_linux)
    install = f"pip install '{name}>={minimum}'"
    if found is None:
        note = f"optional: pip install 'piper-moe[{extra}]'" if extra else "optional: Linux only"
        return Finding(
            area="packages",
            name=name,
            value="not installed",
            status="ok" if is_optional else "broken",
            advice=note if is_optional else install,
        )
    if not is_at_least(found, minimum):
        return Finding(
            area="packages",
            name=name,
            value=f"{found}, older than {minimum}",
            status="warning" if is_optional else "broken",
            advice=install,
        )
    advice = ""
    if name == "transformers" and not is_at_least(found, TRANSFORMERS_FOR_EP):
        advice = f"expert parallelism through transformers needs {TRANSFORMERS_FOR_EP}"
    return Finding(area="packages", name=name, value=found, advice=advice)


def _installed(name: str) -> str | None:
    try:
        return version(name)
    except PackageNotFoundError:
        return None


def check_packages() -> list[Finding]:
    """Look at this interpreter and its packages."""
    python = platform.python_version()
    is_new = is_at_least(python, MINIMUM_PYTHON)
    first = Finding(
        area="packages",
        name="python",
        value=f"{python} ({sys.executable})",
        status="ok" if is_new else "broken",
        advice="" if is_new else f"Use Python {MINIMUM_PYTHON} or later.",
    )
    is_linux = sys.platform == "linux"
    return [
        first,
        *(judge_package(r, _installed(r.name), is_linux=is_linux) for r in REQUIREMENTS),
    ]
