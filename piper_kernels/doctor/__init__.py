"""Say what is installed here, which backend would run, and what is wrong, with a remedy for each.

Every check runs, whatever the others find. Exit status 1 if something is broken.
"""

import argparse
import json
import sys
from dataclasses import asdict

from rich.console import Console
from rich.markup import escape
from rich.table import Table

import piper_kernels
from piper_kernels.doctor.backends import check_backends
from piper_kernels.doctor.devices import check_devices
from piper_kernels.doctor.environment import check_environment
from piper_kernels.doctor.findings import Finding, count, run_check
from piper_kernels.doctor.identity import check_identity
from piper_kernels.doctor.packages import check_packages
from piper_kernels.doctor.processor import check_processor

__all__ = ["configure", "run"]

CHECKS = {
    "piper": check_identity,
    "packages": check_packages,
    "devices": check_devices,
    "processor": check_processor,
    "environment": check_environment,
    "backends": check_backends,
}
STYLES = {"ok": "green", "warning": "yellow", "broken": "bold red"}


def configure(parser: argparse.ArgumentParser) -> None:
    """Add the command's arguments."""
    parser.add_argument("--json", action="store_true", help="print JSON instead of a table")


def examine() -> list[Finding]:
    """Run every check; one that fails becomes a finding itself."""
    return [finding for area, check in CHECKS.items() for finding in run_check(area, check)]


def as_json(findings: list[Finding]) -> str:
    """The findings for machines."""
    report = {
        "piper": piper_kernels.__version__,
        "num_warnings": count(findings, "warning"),
        "num_broken": count(findings, "broken"),
        "findings": [asdict(finding) for finding in findings],
    }
    return json.dumps(report, indent=2)


def print_table(findings: list[Finding], console: Console) -> None:
    """The findings for people, advice below what needs it."""
    table = Table(title=f"piper {piper_kernels.__version__}", title_justify="left")
    table.add_column("")
    table.add_column("what", max_width=22, overflow="fold")
    table.add_column("found", overflow="fold")
    area = ""
    for finding in findings:
        if area and finding.area != area:
            table.add_section()
        area = finding.area
        mark = f"[{STYLES[finding.status]}]{finding.status}[/]"
        # messages of others may hold brackets, which are rich's mark-up
        found = escape(finding.value)
        if finding.advice:
            found += f"\n[italic]-> {escape(finding.advice)}[/]"
        table.add_row(mark, escape(finding.name), found)
    console.print(table)
    warnings, broken = count(findings, "warning"), count(findings, "broken")
    console.print(f"{len(findings)} checks: {warnings} warnings, {broken} broken", highlight=False)


def run(arguments: argparse.Namespace) -> int:
    """Examine this machine, print, and return 1 if something is broken."""
    findings = examine()
    if arguments.json:
        sys.stdout.write(as_json(findings) + "\n")
    else:
        print_table(findings, Console())
    return int(count(findings, "broken") > 0)
