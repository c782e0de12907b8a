"""Runs everything; with ``--part``, the process of one part."""

import argparse
import os
import sys
from collections.abc import Sequence
from pathlib import Path

import bench.gpu
from bench.gpu.conduct import PARTS, Conductor


def make_parser() -> argparse.ArgumentParser:
    """The command line."""
    parser = argparse.ArgumentParser(
        prog="python -m bench.gpu",
        description=bench.gpu.__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--seconds", type=float, default=480.0, help="of everything together")
    parser.add_argument("--out", type=Path, default=Path("runs/gpu"), help="folder of the results")
    parser.add_argument("--dry-run", action="store_true", help="on the CPU, tiny, interpreted")
    parser.add_argument("--strict", action="store_true", help="a missed target is exit status 1")
    names = [part.name for part in PARTS]
    parser.add_argument("--only", help="some of the parts: " + ",".join(names))
    parser.add_argument("--part", choices=names, help=argparse.SUPPRESS)
    parser.add_argument("--rows", type=Path, help=argparse.SUPPRESS)
    return parser


def main(words: Sequence[str] | None = None) -> int:
    """Run the bench and return the exit status: 1 if a check failed or a part was lost."""
    parser = make_parser()
    arguments = parser.parse_args(words)
    if arguments.dry_run:
        # before any kernel is decorated
        os.environ["TRITON_INTERPRET"] = "1"
    from bench.gpu.parts import run_part
    from bench.gpu.report import print_summary, write_report

    if arguments.part:
        return run_part(arguments.part, arguments.rows, arguments.seconds, is_dry=arguments.dry_run)
    wanted = arguments.only.split(",") if arguments.only else [part.name for part in PARTS]
    unknown = [name for name in wanted if name not in {part.name for part in PARTS}]
    if unknown:
        parser.error(f"--only: {unknown[0]!r} is no part")
    arguments.out.mkdir(parents=True, exist_ok=True)
    conductor = Conductor(out=arguments.out, seconds=arguments.seconds, is_dry=arguments.dry_run)
    parts = [part for part in PARTS if part.name in {"environment", *wanted}]
    results = conductor.run(parts, lambda found: write_report(arguments.out, found))
    return print_summary(results, arguments.out, is_strict=arguments.strict)


if __name__ == "__main__":
    sys.exit(main())
