"""``piper``: one command, one module per sub-command, each loaded only when it is asked for.

A sub-command's module offers ``configure(parser)``, which adds its arguments, and
``run(arguments) -> int``, which returns the exit status.
"""

import argparse
import difflib
import importlib
import io
import re
import sys
from collections.abc import Sequence

from piper_kernels import __version__
from piper_kernels.errors import PiperError, did_you_mean

# name -> (module, one line of help)
COMMANDS = {
    "train": ("piper_kernels.train.command", "train a Mixture-of-Experts language model"),
    "tune": ("piper_kernels.tune", "measure which tiles the GPU kernels should use"),
    "probe": ("piper_kernels.pipeline.probe_command", "measure this machine: network and device"),
    "simulate": ("piper_kernels.dist.simulate_command", "model an exchange on a network"),
    "plan": ("piper_kernels.pipeline.plan_command", "plan a run: what fits, how fast, and why"),
    "inspect": ("piper_kernels.triton.offline.command", "compile every kernel for GPUs not here"),
    "doctor": ("piper_kernels.doctor", "say what is installed and which backend would run"),
}


def _overview() -> str:
    width = max(map(len, COMMANDS))
    lines = [f"  {name:<{width}}  {text}" for name, (_, text) in COMMANDS.items()]
    usage = "usage: piper [--version] COMMAND ..."
    example = "example: piper train --out runs/first"
    help_line = "`piper COMMAND --help` explains a command."
    return "\n".join([usage, "", "commands:", *lines, "", example, help_line])


def main(arguments: Sequence[str] | None = None) -> int:
    """Run ``piper`` with ``arguments`` (default: the process's) and return the exit status."""
    if isinstance(sys.stdout, io.TextIOWrapper):
        # a terminal that has no such character must not end a run of hours
        sys.stdout.reconfigure(errors="replace")
    words = list(sys.argv[1:] if arguments is None else arguments)
    if not words or words[0] in {"-h", "--help"}:
        print(_overview())
        return 0
    if words[0] in {"-V", "--version"}:
        print(f"piper {__version__}")
        return 0
    name, *rest = words
    if name not in COMMANDS:
        print(f"piper: unknown command {name!r}. {did_you_mean(name, COMMANDS)}", file=sys.stderr)
        return 2
    module_name, text = COMMANDS[name]
    module = importlib.import_module(module_name)
    parser = argparse.ArgumentParser(
        prog=f"piper {name}",
        description=module.__doc__ or text,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    module.configure(parser)
    parsed, unknown = parser.parse_known_args(rest)
    if unknown:
        flags = re.findall(r"--[\w-]+", parser.format_usage())
        near = difflib.get_close_matches(unknown[0], flags, n=1)
        hint = f"Did you mean {near[0]}?" if near else f"See `piper {name} --help`."
        parser.error(f"unknown argument {unknown[0]}. {hint}")
    try:
        return int(module.run(parsed))
    except PiperError as error:
        print(f"piper {name}: {error}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        print(f"piper {name}: interrupted", file=sys.stderr)
        return 130
