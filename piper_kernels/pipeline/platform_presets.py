"""Known machines, to plan with before there is a probe of the machine at hand.

Peaks, memory and links are published, their source beside them. Efficiency curves, overheads and
reserved memory are assumptions wherever the source says so: ``piper probe`` replaces them.

Pure: no torch, no process group.
"""

from collections.abc import Callable
from pathlib import Path

from piper_kernels.dist import topology_presets
from piper_kernels.dist.links import Fabric, Link, Links
from piper_kernels.dist.topology import Node, Topology
from piper_kernels.errors import ConfigError, did_you_mean, instruction
from piper_kernels.pipeline.curve import Curve
from piper_kernels.pipeline.platform import Device, Platform

ASSUMED = (
    "ASSUMED: efficiency curves, tiles, launch overhead, memory efficiency, reserved memory, "
    "20 us latency between GPUs and between nodes."
)
# shares of the peak once tiles and waves are full: what large 16-bit products and fused attention
# usually reach on these machines; no measurement of ours
_GEMM: Curve = ((1.0, 0.3), (64.0, 0.5), (512.0, 0.65), (4096.0, 0.75))
_ATTENTION: Curve = ((512.0, 0.3), (2048.0, 0.45), (8192.0, 0.55))
_RESERVED_BYTES = 4 * 2**30


def frontier() -> Platform:
    """Frontier at Oak Ridge: a rank is one GCD, half an MI250X."""
    return Platform(
        name="frontier",
        source=(
            "Device: OLCF user guide (64 GB HBM2e at 1.6 TB/s per GCD); 191.5 TFLOPS fp16 and 110 "
            "CUs per GCD, AMD MI250X data sheet. Fast domain of 4 nodes: Piper (2605.05049). "
            "ASSUMED: efficiency curves, whose top is the best single layer of Piper's figure 11 "
            "(129 of 191.5 TFLOPS), tiles, launch overhead, memory efficiency. "
            + topology_presets.FRONTIER_SOURCE
        ),
        device=Device(
            name="MI250X GCD",
            memory_bytes=64 * 2**30,
            peak_flops_per_s=191.5e12,
            memory_bandwidth_bytes_per_s=1.6e12,
            memory_efficiency=0.8,
            num_compute_units=110,
            gemm_tile_rows=128,
            gemm_tile_columns=128,
            gemm_efficiency=((1.0, 0.25), (64.0, 0.45), (512.0, 0.6), (4096.0, 0.68)),
            attention_efficiency=((512.0, 0.2), (2048.0, 0.3), (8192.0, 0.35)),
            launch_overhead_s=8e-6,
        ),
        topology=topology_presets.frontier(1),
        nodes_per_group=128,
        nodes_per_domain=4,
    )


def _hopper(name: str, product: str, memory_bytes: int, bandwidth: float, source: str) -> Platform:
    """Eight Hopper GPUs a node."""
    return Platform(
        name=name,
        source=f"{source} {topology_presets.DGX_H100_SOURCE} {ASSUMED}",
        device=Device(
            name=product,
            memory_bytes=memory_bytes,
            reserved_bytes=_RESERVED_BYTES,
            peak_flops_per_s=989.4e12,
            memory_bandwidth_bytes_per_s=bandwidth,
            memory_efficiency=0.85,
            num_compute_units=132,
            gemm_tile_rows=128,
            gemm_tile_columns=128,
            gemm_efficiency=_GEMM,
            attention_efficiency=_ATTENTION,
            launch_overhead_s=4e-6,
        ),
        topology=topology_presets.dgx_h100_like(1).replace(name=name),
        nodes_per_group=32,
        nodes_per_domain=32,
    )


def h100() -> Platform:
    """Nodes of eight H100 SXM, a 400 Gb/s NIC each."""
    source = "NVIDIA H100 data sheet, SXM: 989.4 TFLOPS bf16 dense, 80 GB at 3.35 TB/s, 132 SMs."
    return _hopper("h100", "H100 SXM 80 GB", 80 * 10**9, 3.35e12, source)


def h200() -> Platform:
    """Nodes of eight H200 SXM, a 400 Gb/s NIC each."""
    source = "NVIDIA H200 data sheet, SXM: 989.4 TFLOPS bf16 dense, 141 GB at 4.8 TB/s, 132 SMs."
    return _hopper("h200", "H200 SXM 141 GB", 141 * 10**9, 4.8e12, source)


def b200() -> Platform:
    """Nodes of eight B200, a 400 Gb/s NIC each."""
    return Platform(
        name="b200",
        source=(
            "NVIDIA DGX B200 data sheet, per GPU: 2.25 PFLOPS bf16 dense, 180 GB at 8 TB/s, NVLink "
            f"of 900 GB/s in each direction, 8 NICs of 50 GB/s; 148 SMs. {ASSUMED}"
        ),
        device=Device(
            name="B200 180 GB",
            memory_bytes=180 * 10**9,
            reserved_bytes=_RESERVED_BYTES,
            peak_flops_per_s=2.25e15,
            memory_bandwidth_bytes_per_s=8e12,
            memory_efficiency=0.85,
            num_compute_units=148,
            gemm_tile_rows=128,
            gemm_tile_columns=256,
            gemm_efficiency=_GEMM,
            attention_efficiency=_ATTENTION,
            launch_overhead_s=4e-6,
        ),
        topology=_one_node("b200", gpu_bytes_per_s=900e9),
        nodes_per_group=32,
        nodes_per_domain=32,
    )


def mi300x() -> Platform:
    """Nodes of eight MI300X, a 400 Gb/s NIC each."""
    return Platform(
        name="mi300x",
        source=(
            "AMD Instinct MI300X data sheet: 1307.4 TFLOPS bf16 dense, 192 GB at 5.3 TB/s, 304 "
            "CUs; platform: 7 Infinity Fabric links of 64 GB/s in each direction to others. "
            f"ASSUMED: 8 NICs of 50 GB/s, as most nodes have. {ASSUMED}"
        ),
        device=Device(
            name="MI300X 192 GB",
            memory_bytes=192 * 10**9,
            reserved_bytes=_RESERVED_BYTES,
            peak_flops_per_s=1307.4e12,
            memory_bandwidth_bytes_per_s=5.3e12,
            memory_efficiency=0.8,
            num_compute_units=304,
            gemm_tile_rows=256,
            gemm_tile_columns=256,
            gemm_efficiency=((1.0, 0.25), (64.0, 0.4), (512.0, 0.5), (4096.0, 0.6)),
            attention_efficiency=((512.0, 0.2), (2048.0, 0.35), (8192.0, 0.45)),
            launch_overhead_s=6e-6,
        ),
        topology=_one_node("mi300x", gpu_bytes_per_s=7 * 64e9),
        nodes_per_group=32,
        nodes_per_domain=32,
    )


PRESETS: dict[str, Callable[[], Platform]] = {
    "frontier": frontier,
    "h100": h100,
    "h200": h200,
    "b200": b200,
    "mi300x": mi300x,
}


def load_platform(name_or_path: str) -> Platform:
    """A preset by its name, or a platform file by its path.

    Raises:
        ConfigError: no such preset and no such file (the nearest preset is named), or a file that
            does not describe a platform.
    """
    if name_or_path in PRESETS:
        return PRESETS[name_or_path]()
    path = Path(name_or_path)
    if not path.exists():
        requirement = f"be one of {', '.join(PRESETS)}, or a platform file"
        remedy = did_you_mean(name_or_path, PRESETS)
        raise ConfigError(
            instruction("load_platform", "platform", requirement, name_or_path, remedy)
        )
    return Platform.load(path)


def _one_node(name: str, *, gpu_bytes_per_s: float) -> Topology:
    """Eight GPUs with a NIC of 50 GB/s each, on a fat tree of 32 nodes a group."""
    nic = Link(latency_s=20e-6, bandwidth_bytes_per_s=50e9)
    gpu = Link(latency_s=20e-6, bandwidth_bytes_per_s=gpu_bytes_per_s)
    eight = tuple(range(8))
    return Topology(
        name=name,
        source="the platform's",
        links=Links(node=gpu, group=nic, far=nic),
        fabric=Fabric(kind="fat_tree", uplink_bytes_per_s=32 * 8 * 50e9),
        nodes=(Node(host="node0", group="group0", ranks=eight, nics=eight),),
    )
