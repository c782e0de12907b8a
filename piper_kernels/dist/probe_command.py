"""The network's half of ``piper probe``: flags, starting ranks, the three files.

``pipeline/probe_command.py`` is the command; it adds the device.
"""

import argparse
import contextlib
import functools
import importlib.util
import json
import os
import subprocess
import sys
from collections.abc import Iterator
from datetime import timedelta
from pathlib import Path
from typing import TYPE_CHECKING

from piper_kernels.dist.whole_file import write_whole
from piper_kernels.errors import BackendError, ConfigError, instruction, require

if TYPE_CHECKING:
    from rich.console import Console

    from piper_kernels.dist.probe import OnProgress, ProbeReport


def configure(parser: argparse.ArgumentParser) -> None:
    """Add the flags of ``piper probe``."""
    parser.add_argument(
        "--out", type=Path, default=Path("topology.json"), metavar="FILE", help="a .json file"
    )
    parser.add_argument("--name", default="probed", help="of the machine")
    parser.add_argument(
        "--groups",
        type=Path,
        metavar="FILE",
        help="JSON: host name -> name of its switch group or rack; without it all are in one",
    )
    parser.add_argument(
        "--ranks",
        type=int,
        metavar="N",
        help="alone: ranks to start here, by default one for each GPU, or 2",
    )
    parser.add_argument(
        "--largest",
        type=int,
        default=1 << 24,
        metavar="BYTES",
        help="largest message; slow links stop sooner (default: 16 MiB)",
    )
    parser.add_argument(
        "--timeout", type=float, default=120.0, metavar="S", help="seconds for any one step"
    )


def run(arguments: argparse.Namespace) -> int:
    """Probe, and write what was found.

    Raises:
        PiperError: if anything that the user can change is in the way.
    """
    out: Path = arguments.out
    require(out.suffix == ".json", "probe", "--out", "end in .json", out)
    require(out.parent.is_dir(), "probe", "--out", "lie in a folder that exists", out)
    require(arguments.timeout > 0, "probe", "--timeout", "be above 0 s", arguments.timeout)
    largest = arguments.largest
    require(largest >= 1024, "probe", "--largest", "be at least 1024 bytes", largest)
    host_to_group = _read_groups(arguments.groups)
    if "RANK" not in os.environ:
        return _start_ranks(arguments)
    with _process_group(arguments.timeout) as rank:
        report = _probe(arguments, host_to_group, is_shown=rank == 0)
        if rank == 0:
            _write(out, report)
    return 0


def _read_groups(path: Path | None) -> dict[str, str] | None:
    if path is None:
        return None
    try:
        groups = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError, json.JSONDecodeError) as error:
        sentence = instruction("probe", "--groups", "be a readable JSON file", path, f"{error}.")
        raise ConfigError(sentence) from None
    fits = isinstance(groups, dict) and all(isinstance(name, str) for name in groups.values())
    require(fits, "probe", "--groups", 'look like {"host": "group"}', path)
    return dict(groups)


def _start_ranks(arguments: argparse.Namespace) -> int:
    """Start ourselves under torchrun on this machine."""
    import torch

    count = arguments.ranks
    if count is None:
        count = max(torch.cuda.device_count(), 2)
    require(count >= 1, "probe", "--ranks", "be at least 1", count)
    words = ["torch.distributed.run", "--standalone", f"--nproc-per-node={count}"]
    words += ["-m", "piper_kernels", "probe", "--out", str(arguments.out)]
    words += ["--name", arguments.name, "--timeout", str(arguments.timeout)]
    words += ["--largest", str(arguments.largest)]
    words += ["--groups", str(arguments.groups)] if arguments.groups else []
    # one thread each, as torchrun would choose too, though not without a warning
    environment = {"OMP_NUM_THREADS": "1", **os.environ}
    return subprocess.run([sys.executable, "-m", *words], env=environment, check=False).returncode


@contextlib.contextmanager
def _process_group(timeout_s: float) -> Iterator[int]:
    """The process group that the launcher has prepared; gives this process's rank."""
    import torch
    import torch.distributed as dist

    has_gpu = torch.cuda.is_available()
    if has_gpu:
        torch.cuda.set_device(int(os.environ.get("LOCAL_RANK", "0")))
    timeout = timedelta(seconds=timeout_s)
    try:
        dist.init_process_group("nccl" if has_gpu else "gloo", timeout=timeout)
    except (RuntimeError, ValueError) as error:
        remedy = "Do all ranks run, and does GLOO_SOCKET_IFNAME or NCCL_SOCKET_IFNAME fit?"
        raise BackendError(
            f"probe: the ranks did not find one another: {error}. {remedy}"
        ) from error
    try:
        yield dist.get_rank()
    finally:
        dist.destroy_process_group()


def _probe(
    arguments: argparse.Namespace, host_to_group: dict[str, str] | None, *, is_shown: bool
) -> "ProbeReport":
    """Probe with a progress line on one rank, and show the result there."""
    from rich.console import Console

    from piper_kernels.dist.probe import SIZES_BYTES, probe

    sizes_bytes = [size for size in SIZES_BYTES if size <= arguments.largest]
    measure = functools.partial(
        probe, name=arguments.name, host_to_group=host_to_group, sizes_bytes=sizes_bytes
    )
    console = Console(width=min(100, Console().width), highlight=False, stderr=False)
    if not is_shown:
        return measure()
    with _progress(console) as on_progress:
        report = measure(on_progress=on_progress)
    console.print(describe(report), highlight=False, soft_wrap=True, markup=False)
    return report


@contextlib.contextmanager
def _progress(console: "Console") -> "Iterator[OnProgress]":
    """A line that says what is being measured; plain lines where there is no terminal."""
    said: set[str] = set()
    with console.status("probing") as status:

        def show(what: str, size_bytes: int, num_messages: int) -> None:
            status.update(f"{what}: {num_messages} x {size_bytes} bytes")
            if not console.is_terminal and what not in said:
                said.add(what)
                console.print(f"measuring {what}")

        yield show


def describe(report: "ProbeReport") -> str:
    """A report in a few lines of at most 100 columns."""
    topology = report.topology
    sizes = f"{topology.num_ranks} ranks, {topology.num_nodes} nodes, {topology.num_groups} groups"
    lines = [f"{topology.name}: {sizes}"[:100]]
    lines.append(f"{'measured':<10} {'latency us':>12} {'us/message':>12} {'GB/s':>10}  points")
    for level in ("node", "group", "far"):
        link = getattr(topology.links, level)
        if link is None:
            continue
        count = sum(point.level == level for point in report.points)
        gap, rate = link.message_gap_s * 1e6, link.bandwidth_bytes_per_s / 1e9
        numbers = f"{link.latency_s * 1e6:>12.2f} {gap:>12.2f} {rate:>10.4f}"
        lines.append(f"{level:<10} {numbers}  {count}")
    for check in report.all_to_all:
        lines.append(
            f"all-to-all, {check.size_bytes:>7} bytes from rank to rank: "
            f"{check.seconds * 1e3:.3f} ms measured, {check.predicted_s * 1e3:.3f} ms modelled"
        )
    return "\n".join([*lines, *report.notes])


def _write(out: Path, report: "ProbeReport") -> None:
    """The three files, each whole or not at all."""
    write_whole("probe", "--out", out, lambda path: report.topology.save(path))
    write_whole("probe", "--out", out.with_suffix(".points.json"), lambda path: report.save(path))
    written = f"written: {out}, {out.with_suffix('.points.json')}"
    if importlib.util.find_spec("matplotlib") is not None:
        from piper_kernels.dist.probe_picture import draw_probe

        write_whole(
            "probe", "--out", out.with_suffix(".png"), lambda path: draw_probe(path, report)
        )
        written += f", {out.with_suffix('.png')}"
    else:
        written += "; no picture: pip install matplotlib"
    say(written)


def say(text: str) -> None:
    """Print one line, however wide the terminal."""
    from rich.console import Console

    Console(highlight=False).print(text, soft_wrap=True, markup=False)
