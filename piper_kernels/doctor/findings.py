"""What a check says."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Literal

from piper_kernels.errors import require

Status = Literal["ok", "warning", "broken"]


@dataclass(frozen=True, kw_only=True, slots=True)
class Finding:
    """One line of the report.

    Attributes:
        area: which check it belongs to.
        name: what was looked at.
        value: what was found.
        status: ``ok``; ``warning``: works, with a drawback; ``broken``: something cannot work.
        advice: what to do about it; a warning and a fault always have some.
    """

    area: str
    name: str
    value: str
    status: Status = "ok"
    advice: str = ""

    def __post_init__(self) -> None:
        has_remedy = self.status == "ok" or bool(self.advice)
        require(has_remedy, "Finding", "advice", f"say what to do about {self.name}", "nothing")


def count(findings: Sequence[Finding], status: Status) -> int:
    """How many findings have a status."""
    return sum(finding.status == status for finding in findings)


def run_check(area: str, check: Callable[[], list[Finding]]) -> list[Finding]:
    """Run a check; an exception becomes a ``broken`` finding, so that the others still run."""
    try:
        return check()
    # a doctor that dies of the disease helps nobody: whatever a driver raises is reported
    except Exception as error:
        value = f"{type(error).__name__}: {error}"
        advice = "This check failed; the message says where. Reinstall what it names."
        return [Finding(area=area, name="check", value=value, status="broken", advice=advice)]
