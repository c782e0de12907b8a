"""Peak numbers of GPUs, as their vendors state them: what modelled times are computed with.

Dense rates, without sparsity; the last-level cache is the L2 on NVIDIA and the Infinity Cache on
AMD. Sources: NVIDIA H100 and H200 Tensor Core GPU data sheets, NVIDIA H100 architecture white paper
(L2, number of SMs), AMD Instinct MI300X data sheet.
"""

from dataclasses import dataclass

from piper_kernels.cost.traffic import Memory


@dataclass(frozen=True, kw_only=True, slots=True)
class Machine:
    """One GPU.

    Attributes:
        name: as printed.
        flops_per_s: dense bf16.
        bytes_per_s: of its memory.
        cache_bytes: last-level cache.
        num_processors: SMs or CUs; one GEMM program runs on each at a time.
        is_hip: AMD: its tiles differ.
    """

    name: str
    flops_per_s: float
    bytes_per_s: float
    cache_bytes: float
    num_processors: int
    is_hip: bool = False

    @property
    def memory(self) -> Memory:
        """What the traffic model needs of it."""
        return Memory(cache_bytes=self.cache_bytes, num_programs=self.num_processors)

    @property
    def ridge(self) -> float:
        """FLOPs per byte from which on arithmetic is the limit.

        Example:
            >>> round(H100.ridge)
            295
        """
        return self.flops_per_s / self.bytes_per_s


H100 = Machine(
    name="H100 SXM",
    flops_per_s=989e12,
    bytes_per_s=3.35e12,
    cache_bytes=50e6,
    num_processors=132,
)
H200 = Machine(
    name="H200 SXM",
    flops_per_s=989e12,
    bytes_per_s=4.8e12,
    cache_bytes=50e6,
    num_processors=132,
)
MI300X = Machine(
    name="MI300X",
    flops_per_s=1307e12,
    bytes_per_s=5.3e12,
    cache_bytes=256e6,
    num_processors=304,
    is_hip=True,
)
MACHINES = (H100, H200, MI300X)
