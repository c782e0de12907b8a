"""Which compilations there are: every kernel, shipped tile, dtype and flag that changes code. Pure.

A variant is a kind of layer or of call; ``recording`` says what it stands for.
"""

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Literal

from piper_kernels.triton.candidates import SHARED_MEMORY_BYTES, shipped_tiles
from piper_kernels.triton.device_traits import traits_of_target
from piper_kernels.triton.tiles import BLOCK_ROWS, Op, TileConfig, default_tiles

Matrix = Literal["ci", "default", "full"]
Dtype = Literal["bf16", "fp16", "fp32", "int"]

TARGETS = tuple(SHARED_MEMORY_BYTES)
DTYPES: tuple[Dtype, ...] = ("bf16", "fp16", "fp32", "int")
FLOATS: tuple[Dtype, ...] = ("bf16", "fp16", "fp32")
# the plain layer: SwiGLU, gates and ups in halves, trained
PLAIN = "halves"

# op -> (kernel, whose tiles, variants besides the plain one)
_ACTIVATIONS = ("gpt_oss", "ungated", "gelu", "gelu_tanh", "relu")
GEMMS: dict[str, tuple[str, Op, tuple[str, ...]]] = {
    "gate_up": (
        "_gate_up_kernel",
        "gate_up",
        (*_ACTIVATIONS, "transposed", "odd", "large", "tf32", "inference", "recompute"),
    ),
    "down": (
        "_grouped_gemm_kernel",
        "down",
        ("gpt_oss", "transposed", "odd", "large", "tf32"),
    ),
    "grad_act": (
        "_grad_act_kernel",
        "grad_act",
        (*_ACTIVATIONS, "transposed", "odd", "large", "tf32", "gates_only", "frozen_router"),
    ),
    "grad_x": (
        "_grouped_gemm_kernel",
        "grad_x",
        ("transposed", "odd", "large", "tf32"),
    ),
    "grad_gate_up": (
        "_wgrad_kernel",
        "wgrad",
        ("transposed", "odd", "large", "tf32", "chunked"),
    ),
    "grad_down": (
        "_wgrad_kernel",
        "wgrad",
        ("transposed", "odd", "large", "tf32", "chunked"),
    ),
    # the product alone, without an index: what a plain grouped GEMM needs
    "wgrad": ("_wgrad_kernel", "wgrad", ("accumulate",)),
}
# op -> (kernel, variants)
MOVES: dict[str, tuple[str, tuple[str, ...]]] = {
    "permute": ("_permute_kernel", (PLAIN, "odd", "large")),
    "unpermute": ("_sum_over_rows_kernel", (PLAIN, "odd", "large")),
    "permute_backward": ("_sum_over_rows_kernel", (PLAIN, "odd", "large")),
    "unpermute_backward": ("_unpermute_backward_kernel", (PLAIN, "odd", "large")),
    "activation": ("_activation_kernel", (PLAIN, "gpt_oss", "ungated", "odd")),
    "add_shares": ("_add_shares_kernel", (PLAIN, "gpt_oss", "odd")),
    "sum_tiles": ("_sum_tiles_kernel", ("gpt_oss", "odd")),
    "sum_tiles_gathered": ("_sum_tiles_kernel", ("gpt_oss", "odd")),
    "sum_experts": ("_sum_experts_kernel", ("gpt_oss", "odd")),
    "add_chunks": ("_add_chunks_kernel", ("chunked", "accumulate")),
    "zero_tail": ("_zero_tail_kernel", (PLAIN, "odd")),
}
ROUTING: dict[str, tuple[str, tuple[str, ...]]] = {
    "count": ("_count_kernel", (PLAIN,)),
    "scan": ("_scan_kernel", (PLAIN,)),
    "offsets": ("_offsets_kernel", (PLAIN,)),
    "place": ("_place_kernel", (PLAIN,)),
    "one_program": ("_one_program_kernel", ("one_token", "few_tokens")),
    "tile_schedule": ("_tile_schedule_kernel", (PLAIN,)),
}
OPS = (*GEMMS, *MOVES, *ROUTING)
# GEMMs that read weights, which a tensor descriptor may do
_READS_WEIGHTS = ("gate_up", "down", "grad_act", "grad_x")
KERNELS: dict[str, str] = {
    op: entry[0] for table in (GEMMS, MOVES, ROUTING) for op, entry in table.items()
}
# on these every kernel is compiled in CI, on the others the tall plain GEMMs
CI_TARGETS = ("sm_90", "gfx942")


@dataclass(frozen=True, kw_only=True, slots=True)
class Case:
    """One compilation.

    Attributes:
        target: e.g. ``"sm_90"``.
        op: a name of ``OPS``.
        dtype: of x and the weights; ``"int"`` for routing, which sees neither.
        variant: what kind of layer or call.
        tiles: of the GEMM; ``None`` for the other kernels.
    """

    target: str
    op: str
    dtype: Dtype
    variant: str
    tiles: TileConfig | None

    @property
    def kernel(self) -> str:
        """The kernel's Python name."""
        return KERNELS[self.op]

    @property
    def reads_descriptor(self) -> bool:
        """Whether weights come through a tensor descriptor: as ``weight_source`` should decide."""
        return (
            self.op in _READS_WEIGHTS
            and self.dtype in ("bf16", "fp16")
            and self.variant != "odd"
            and (self.op, self.variant) != ("gate_up", "transposed")
            and traits_of_target(self.target).has_descriptors
        )

    def tile_text(self) -> str:
        """E.g. ``"128x64x64 w8 s3"``: block_m, block_n, block_k, warps, stages."""
        if self.tiles is None:
            return ""
        tiles = self.tiles
        shape = f"{tiles.block_m}x{tiles.block_n}x{tiles.block_k}"
        return f"{shape} w{tiles.num_warps} s{tiles.num_stages}"


def default_tiles_of(
    op: Op, dtype: Dtype, target: str, variant: str = PLAIN
) -> tuple[TileConfig, ...]:
    """Every tile that :func:`default_tiles` can give on a target, few rows first."""
    chosen = (
        default_tiles(
            op,
            num_rows=rows,
            num_experts=1,
            element_bytes=4 if dtype == "fp32" else 2,
            is_hip=target.startswith("gfx"),
            is_lean=variant == "odd" or (variant == "gpt_oss" and op == "grad_act"),
        )
        for rows in BLOCK_ROWS
    )
    return tuple(dict.fromkeys(chosen))


def _gemm_cases(matrix: Matrix, target: str, op: str, dtype: Dtype) -> Iterator[Case]:
    _, tile_op, variants = GEMMS[op]
    defaults = default_tiles_of(tile_op, dtype, target)
    tiles = defaults
    if matrix == "full":
        element_bytes = 4 if dtype == "fp32" else 2
        tiles = shipped_tiles(tile_op, element_bytes=element_bytes, target=target)
    elif matrix == "ci" and target not in CI_TARGETS:
        tiles = defaults[-1:]
    for one in tiles:
        yield Case(target=target, op=op, dtype=dtype, variant=PLAIN, tiles=one)
    if matrix == "ci":
        return
    # a flag changes an epilogue or a load: the most and the fewest registers are enough
    for variant in variants:
        has_tf32 = dtype == "fp32" and traits_of_target(target).has_tf32
        if variant != "tf32" or has_tf32:
            defaults = default_tiles_of(tile_op, dtype, target, variant)
            for one in dict.fromkeys((defaults[0], defaults[-1])):
                yield Case(target=target, op=op, dtype=dtype, variant=variant, tiles=one)


def _simple_cases(matrix: Matrix, target: str, op: str, dtype: Dtype) -> Iterator[Case]:
    _, variants = MOVES[op] if op in MOVES else ROUTING[op]
    if matrix == "ci":
        variants = variants[:1] if target in CI_TARGETS else ()
    for variant in variants:
        yield Case(target=target, op=op, dtype=dtype, variant=variant, tiles=None)


def find_cases(
    matrix: Matrix,
    *,
    targets: Iterable[str] = TARGETS,
    ops: Iterable[str] = OPS,
    dtypes: Iterable[Dtype] = DTYPES,
) -> list[Case]:
    """The compilations of one matrix, narrowed by target, op and dtype.

    Args:
        matrix: ``"ci"``: plain bf16 layers, every kernel on two targets, tall GEMMs on the others.
            ``"default"``: default tiles in every variant. ``"full"``: every shipped tile too.
        targets: names of ``TARGETS``.
        ops: names of ``OPS``.
        dtypes: names of ``DTYPES``.

    Example:
        >>> [case.tile_text() for case in find_cases(
        ...     "ci", targets=["sm_80"], ops=["down"], dtypes=["bf16"])]
        ['128x128x64 w8 s3']
    """
    found: list[Case] = []
    for target in targets:
        for dtype in dtypes:
            for op in ops:
                if matrix == "ci" and dtype in ("fp16", "fp32"):
                    continue
                if (op in ROUTING) != (dtype == "int"):
                    continue
                find = _gemm_cases if op in GEMMS else _simple_cases
                found += find(matrix, target, op, dtype)
    return found
