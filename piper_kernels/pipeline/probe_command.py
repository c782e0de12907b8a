"""Measure the network between the ranks of a job, and on request what one rank computes with.

Start it like the job itself, with torchrun; alone it starts some ranks on this machine. It writes
three files: FILE.json, the topology; FILE.points.json, what was measured; FILE.png, the points and
the curves fitted to them. --platform adds a few seconds of micro-benchmarks (the experts' products,
attention, copies, launches) on rank 0 and writes the file that piper plan reads.

For example:
  piper probe --out machine.json --platform platform.json
  torchrun --nnodes 4 --nproc-per-node 8 ... -m piper_kernels probe --out machine.json
  piper plan --model olmoe-1b-7b --platform platform.json --gpus 2
"""

import argparse
import os
from datetime import UTC, datetime
from pathlib import Path

from piper_kernels.dist import probe_command as network
from piper_kernels.dist.topology import Topology
from piper_kernels.dist.whole_file import write_whole
from piper_kernels.errors import require
from piper_kernels.pipeline.platform import Device, Platform


def configure(parser: argparse.ArgumentParser) -> None:
    """Add the flags of ``piper probe``."""
    network.configure(parser)
    parser.add_argument(
        "--platform", type=Path, metavar="FILE", help="write a platform for piper plan here, too"
    )


def run(arguments: argparse.Namespace) -> int:
    """Probe the network, then rank 0's device if a platform is wanted.

    Raises:
        PiperError: if anything that the user can change is in the way.
    """
    wanted: Path | None = arguments.platform
    if wanted is not None:
        require(wanted.suffix == ".json", "probe", "--platform", "end in .json", wanted)
        is_there = wanted.parent.is_dir()
        require(is_there, "probe", "--platform", "lie in a folder that exists", wanted)
        is_other = wanted.resolve() != arguments.out.resolve()
        require(is_other, "probe", "--platform", "be another file than --out", wanted)
    status = network.run(arguments)
    if status == 0 and wanted is not None and os.environ.get("RANK", "0") == "0":
        from piper_kernels.pipeline.probe_compute import probe_rank

        platform = describe_machine(Topology.load(arguments.out), probe_rank())
        write_whole("probe", "--platform", wanted, platform.save)
        network.say(f"written: {wanted}")
    return status


def describe_machine(topology: Topology, device: Device) -> Platform:
    """The platform of a probed machine, all of whose ranks compute alike.

    Example:
        >>> from piper_kernels.dist.topology_presets import frontier
        >>> device = Device(name="cpu", memory_bytes=8, peak_flops_per_s=1,
        ...                 memory_bandwidth_bytes_per_s=1)
        >>> describe_machine(frontier(2), device).nodes_per_group
        2
    """
    first_group = topology.nodes[0].group
    return Platform(
        name=topology.name,
        source=f"piper probe, {datetime.now(UTC):%Y-%m-%d}",
        device=device,
        topology=topology,
        nodes_per_group=sum(node.group == first_group for node in topology.nodes),
        nodes_per_domain=1,
    )
