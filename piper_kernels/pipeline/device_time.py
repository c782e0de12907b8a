"""Seconds of what a device does: matrix products, attention, traffic.

A matrix product is cut into tiles, tiles into waves over the compute units; a part of a tile or of
a wave takes as long as a whole one. Then the roofline: compute or memory, whichever takes longer,
plus the launch.

Pure: no torch, no process group. Source of the form: papers.md 1.6; the curves are the platform's.
"""

import math
from dataclasses import dataclass

from piper_kernels.errors import require
from piper_kernels.pipeline.curve import share_at
from piper_kernels.pipeline.platform import Device


@dataclass(frozen=True, kw_only=True, slots=True)
class GemmTime:
    """A launch of equal matrix products, and why it takes so long.

    Attributes:
        seconds: the larger of the two below, plus the launch.
        compute_s: all waves, at the efficiency of the smallest of rows, columns and depth.
        memory_s: operands and result, each once.
        flops: useful ones.
        fill: useful share of the tiles and waves.
        intensity: useful FLOPs per byte; below the device's ridge memory decides.
    """

    seconds: float
    compute_s: float
    memory_s: float
    flops: float
    fill: float
    intensity: float


def gemm_time(
    device: Device, rows: float, columns: int, depth: int, count: float = 1, element_bytes: int = 2
) -> GemmTime:
    """One launch of ``count`` products ``[rows, depth] x [depth, columns]``.

    Args:
        device: which computes it.
        rows: of each product: tokens, or tokens of one expert. May be a mean, thus not whole.
        columns: of each.
        depth: of each.
        count: products in the launch: 1, or the local experts.
        element_bytes: of operands and result.

    Raises:
        ConfigError: a size below 0, or no column or depth.

    Example:
        One full wave of a device with 4 units and tiles of 2 x 2, and one tile more:

        >>> tiny = Device(name="tiny", memory_bytes=1, peak_flops_per_s=32.0, num_compute_units=4,
        ...     memory_bandwidth_bytes_per_s=1e9, gemm_tile_rows=2, gemm_tile_columns=2)
        >>> full, more = gemm_time(tiny, 4, 4, 1), gemm_time(tiny, 5, 4, 1)
        >>> full.compute_s, full.fill, more.compute_s, more.fill
        (1.0, 1.0, 2.0, 0.625)
    """
    name = "gemm_time"
    require(rows >= 0 and count >= 0, name, "rows, count", "be >= 0", (rows, count))
    require(columns >= 1 and depth >= 1, name, "columns, depth", "be >= 1", (columns, depth))
    if not rows or not count:
        return GemmTime(seconds=0, compute_s=0, memory_s=0, flops=0, fill=1, intensity=0)
    tile_rows, tile_columns = device.gemm_tile_rows, device.gemm_tile_columns
    # a mean of rows may be below one, yet an expert that is hit has a row at least
    tiles = count * math.ceil(rows / tile_rows) * math.ceil(columns / tile_columns)
    waves = math.ceil(tiles / device.num_compute_units)
    padded = waves * device.num_compute_units * tile_rows * tile_columns
    share = share_at(device.gemm_efficiency, min(rows, columns, depth))
    compute_s = 2.0 * padded * depth / (device.peak_flops_per_s * share)
    flops = 2.0 * count * rows * columns * depth
    size = element_bytes * count * (rows * depth + depth * columns + rows * columns)
    memory_s = size / device.copy_bytes_per_s
    return GemmTime(
        seconds=max(compute_s, memory_s) + device.launch_overhead_s,
        compute_s=compute_s,
        memory_s=memory_s,
        flops=flops,
        fill=count * rows * columns / padded,
        intensity=flops / size,
    )


def attention_s(
    device: Device,
    *,
    num_sequences: float,
    seq_len: int,
    num_heads: float,
    qk_dim: int,
    v_dim: int,
    is_fused: bool = True,
    is_causal: bool = True,
) -> float:
    """Forward of softmax attention: two products a head, and what lies between.

    Fused attention skips what the causal mask hides, as its kernels do, at the device's measured
    efficiency. Otherwise the whole square is computed by plain products, and the scores travel
    through memory: written, masked and normalised (read, write), dropped out (read, write), read.

    Args:
        device: which computes it.
        num_sequences: in the microbatch.
        seq_len: s.
        num_heads: query heads on this rank.
        qk_dim: of one head's query and key.
        v_dim: of one head's value.
        is_fused: whether the scores stay on the chip.
        is_causal: whether later tokens are masked.
    """
    square = num_sequences * num_heads * float(seq_len) ** 2
    if is_fused:
        flops = 2 * square * (qk_dim + v_dim) * (0.5 if is_causal else 1.0)
        share = share_at(device.attention_efficiency, seq_len)
        return flops / (device.peak_flops_per_s * share) + device.launch_overhead_s
    count = num_sequences * num_heads
    scores = gemm_time(device, seq_len, seq_len, qk_dim, count).seconds
    values = gemm_time(device, seq_len, v_dim, seq_len, count).seconds
    return scores + values + traffic_s(device, SCORE_BYTES * square, num_launches=2)


# between the two products: read and write of softmax at 2 bytes, of dropout also its 1-byte mask
SCORE_BYTES = 4 + 5


def traffic_s(device: Device, num_bytes: float, num_launches: int = 1) -> float:
    """Element-wise work: nothing but bytes through memory.

    Example:
        >>> tiny = Device(name="tiny", memory_bytes=1, peak_flops_per_s=1.0,
        ...     memory_bandwidth_bytes_per_s=10.0, launch_overhead_s=0.5)
        >>> traffic_s(tiny, 20.0, num_launches=2)
        3.0
    """
    return num_bytes / device.copy_bytes_per_s + num_launches * device.launch_overhead_s
