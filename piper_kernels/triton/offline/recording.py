"""What a layer would launch, for one case: the launchers run on tensors that have no memory.

Sizes decide what Triton specialises on: divisibility by 16, strides of 1, and on AMD whether a
tensor stays below 2 GiB. So plain cases have the sizes of Qwen3-30B-A3B's layer
(https://huggingface.co/Qwen/Qwen3-30B-A3B, config.json), ``odd`` ones odd sizes and ``large`` ones
tensors beyond 2 GiB.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, fields, replace

import torch
from torch import Tensor

from piper_kernels.config import GPT_OSS_SWIGLU, RELU2, SWIGLU, Activation, WeightLayout
from piper_kernels.contracts import ExpertsNeeds, ExpertsWeights
from piper_kernels.permutation import Permutation
from piper_kernels.triton.device_traits import assume_traits, traits_of_target
from piper_kernels.triton.experts import experts_backward, experts_forward
from piper_kernels.triton.grouped_gemm import grouped_gemm
from piper_kernels.triton.grouped_gemm_wgrad import grouped_gemm_wgrad
from piper_kernels.triton.launch import Launch, recorded_launches
from piper_kernels.triton.offline.cases import ROUTING, Case
from piper_kernels.triton.permute import permute_forward
from piper_kernels.triton.routing_metadata import (
    MAX_SLOTS_OF_ONE_PROGRAM,
    permutation_from_expert_ids,
)
from piper_kernels.triton.tiles import ExpertsTiles, TileConfig
from piper_kernels.triton.unpermute import unpermute_backward

FLOAT_DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32}
SPLIT_ROWS = 4096


@dataclass(frozen=True, kw_only=True, slots=True)
class Sizes:
    """Of a layer: T, K, E, H and I."""

    num_tokens: int = 32768
    top_k: int = 8
    num_experts: int = 128
    hidden: int = 2048
    intermediate: int = 768


SIZES = {
    "odd": Sizes(num_tokens=1001, hidden=1999, intermediate=751),
    "large": Sizes(num_tokens=1 << 20, num_experts=1024),
}
LAYOUTS = {
    "gpt_oss": WeightLayout(is_transposed=True, is_interleaved=True),
    "ungated": WeightLayout(is_gated=False),
    "transposed": WeightLayout(is_transposed=True),
}
ACTIVATIONS = {
    "gpt_oss": GPT_OSS_SWIGLU,
    "ungated": RELU2,
    "gelu": Activation(function="gelu"),
    "gelu_tanh": Activation(function="gelu_tanh"),
    "relu": Activation(function="relu"),
}
NO_NEEDS = ExpertsNeeds(
    x=False, gates=False, gate_up_proj=False, down_proj=False, gate_up_bias=False, down_bias=False
)
ALL_NEEDS = ExpertsNeeds(
    x=True, gates=True, gate_up_proj=True, down_proj=True, gate_up_bias=True, down_bias=True
)
# variant or op of a backward -> what is needed of it
NEEDS = {
    "gates_only": replace(NO_NEEDS, gates=True),
    "frozen_router": replace(ALL_NEEDS, gates=False),
    "recompute": replace(NO_NEEDS, gate_up_proj=True),
    "grad_act": ALL_NEEDS,
    "add_shares": ALL_NEEDS,
    "grad_x": replace(NO_NEEDS, x=True),
    "permute_backward": replace(NO_NEEDS, x=True),
    "grad_gate_up": replace(NO_NEEDS, gate_up_proj=True),
    "add_chunks": replace(NO_NEEDS, gate_up_proj=True),
    "grad_down": replace(NO_NEEDS, down_proj=True, gates=True),
    "activation": replace(NO_NEEDS, down_proj=True),
    "sum_tiles": replace(NO_NEEDS, gate_up_bias=True),
    "sum_tiles_gathered": replace(NO_NEEDS, down_bias=True),
    "sum_experts": replace(NO_NEEDS, down_bias=True),
}
# for the kernels that are not GEMMs: what surrounds them does not change them
_ANY_TILES = TileConfig(block_m=128, block_n=64, block_k=64, num_warps=8)


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class Layer:
    """The arguments of a layer."""

    x: Tensor
    gates: Tensor
    permutation: Permutation
    weights: ExpertsWeights


def make_layer(
    variant: str, dtype: torch.dtype, *, sizes: Sizes | None = None, device: str = "meta"
) -> Layer:
    """A layer of one variant, its values undefined.

    Args:
        variant: of a case.
        dtype: of x and the weights.
        sizes: ``None``: the variant's.
        device: ``"meta"``: the tensors have no memory.
    """
    sizes = sizes or SIZES.get(variant, Sizes())
    layout = LAYOUTS.get(variant, WeightLayout())
    num_experts, hidden, intermediate = sizes.num_experts, sizes.hidden, sizes.intermediate
    gate_up, down = layout.weight_shapes(num_experts, hidden, intermediate)

    def make(*shape: int) -> Tensor:
        return torch.zeros(shape, dtype=dtype, device=device)

    has_bias = variant in ("gpt_oss", "odd")
    weights = ExpertsWeights(
        gate_up_proj=make(*gate_up),
        down_proj=make(*down),
        gate_up_bias=make(num_experts, layout.preact_size(intermediate)) if has_bias else None,
        down_bias=make(num_experts, hidden) if has_bias else None,
        layout=layout,
        activation=ACTIVATIONS.get(variant, SWIGLU),
    )
    shape = sizes.num_tokens, sizes.top_k
    ids = torch.zeros(shape, dtype=torch.int64, device=device)
    return Layer(
        x=make(sizes.num_tokens, hidden),
        gates=torch.zeros(shape, dtype=torch.float32, device=device),
        permutation=permutation_from_expert_ids(ids, num_experts),
        weights=weights,
    )


@contextmanager
def _precision(variant: str) -> Iterator[None]:
    """Let fp32 be multiplied as TF32 for the variant that is about it."""
    before = torch.backends.cuda.matmul.fp32_precision
    torch.backends.cuda.matmul.fp32_precision = "tf32" if variant == "tf32" else "ieee"
    try:
        yield
    finally:
        torch.backends.cuda.matmul.fp32_precision = before


def _layer_tiles(variant: str, tiles: TileConfig | None) -> ExpertsTiles:
    tiles = tiles or _ANY_TILES
    if variant == "chunked":
        tiles = replace(tiles, split_rows=SPLIT_ROWS)
    return ExpertsTiles(**{field.name: tiles for field in fields(ExpertsTiles)})


def run_layer(op: str, variant: str, layer: Layer, tiles: TileConfig | None) -> None:
    """Call whatever launches an op's kernel.

    Args:
        op: a name of ``OPS``, routing apart.
        variant: of a case.
        layer: of the same variant.
        tiles: of the GEMM, if it is one.
    """
    x, gates, permutation, weights = layer.x, layer.gates, layer.permutation, layer.weights
    offsets = permutation.expert_offsets
    if op == "permute":
        permute_forward(x, permutation)
    elif op == "unpermute_backward":
        rows = x.new_empty(permutation.num_rows, x.shape[1])
        unpermute_backward(x, rows, gates, permutation)
    elif op == "zero_tail":
        rows = x.new_empty(permutation.num_rows, weights.intermediate_size)
        grouped_gemm(rows, weights.down_proj, offsets, tiles=_ANY_TILES)
    elif op == "wgrad" or variant == "accumulate":
        rows = x.new_empty(permutation.num_rows, weights.intermediate_size)
        grouped_gemm_wgrad(
            x.new_empty(permutation.num_rows, x.shape[1]),
            rows,
            offsets,
            out=torch.empty_like(weights.down_proj, dtype=torch.float32),
            accumulate=variant == "accumulate",
            tiles=replace(tiles or _ANY_TILES, split_rows=SPLIT_ROWS if tiles is None else None),
        )
    elif op in NEEDS or variant == "recompute":
        preact = x.new_empty(permutation.num_rows, weights.preact_size)
        needs = NEEDS.get(variant) or NEEDS[op]
        args = x, x, gates, permutation, weights, None if variant == "recompute" else preact
        experts_backward(*args, needs=needs, tiles=_layer_tiles(variant, tiles))
    else:
        experts_forward(
            x,
            gates,
            permutation,
            weights,
            needs_preact=variant != "inference",
            tiles=_layer_tiles(variant, tiles),
        )


def _run_routing(variant: str) -> None:
    sizes = Sizes()
    num_tokens = {"one_token": 1, "few_tokens": MAX_SLOTS_OF_ONE_PROGRAM // sizes.top_k}
    shape = num_tokens.get(variant, sizes.num_tokens), sizes.top_k
    permutation = permutation_from_expert_ids(
        torch.zeros(shape, dtype=torch.int64, device="meta"), sizes.num_experts
    )
    rows = torch.zeros(permutation.num_rows, sizes.hidden, device="meta")
    weight = torch.zeros(sizes.num_experts, sizes.hidden, sizes.hidden, device="meta")
    grouped_gemm(rows, weight, permutation.expert_offsets, tiles=_ANY_TILES)


def record(case: Case) -> Launch:
    """The launch of the case's kernel on its target."""
    with _precision(case.variant), assume_traits(traits_of_target(case.target)):
        if case.op in ROUTING:
            with recorded_launches() as launches:
                _run_routing(case.variant)
        else:
            layer = make_layer(case.variant, FLOAT_DTYPES[case.dtype])
            with recorded_launches() as launches:
                run_layer(case.op, case.variant, layer, case.tiles)
    found = [launch for launch in launches if launch.kernel.fn.__name__ == case.kernel]
    assert len(found) == 1, f"{case}: {len(found)} launches of {case.kernel}"
    return found[0]
