"""What is compiled is what is launched: meta tensors against the interpreter, each argument."""

from typing import Any

import pytest
import torch
from triton.runtime.jit import JITFunction
from triton.tools.tensor_descriptor import TensorDescriptor

from piper_kernels.triton.launch import Launch, recorded_launches
from piper_kernels.triton.offline.cases import FLOATS, GEMMS, MOVES, PLAIN, Case, find_cases
from piper_kernels.triton.offline.compiling import gpu_target, specialize
from piper_kernels.triton.offline.recording import (
    FLOAT_DTYPES,
    Sizes,
    make_layer,
    record,
    run_layer,
)
from piper_kernels.triton.tiles import TileConfig

SMALL = Sizes(num_tokens=4, top_k=2, num_experts=3, hidden=32, intermediate=16)
TILES = TileConfig(block_m=16, block_n=32, block_k=16)


def launches_of(op: str, variant: str, device: str) -> list[Launch]:
    layer = make_layer(variant, torch.float32, sizes=SMALL, device=device)
    with recorded_launches() as found:
        run_layer(op, variant, layer, TILES if op in GEMMS else None)
    return found


def describe(value: Any) -> Any:
    """What specialisation sees of an argument: not where a tensor lies, but how it is aligned."""
    if isinstance(value, torch.Tensor):
        return value.dtype, value.shape, value.stride(), value.data_ptr() % 16
    if isinstance(value, TensorDescriptor):
        return describe(value.base), value.shape, value.strides, value.block_shape
    return value


def compiled_as(launch: Launch, target: str) -> tuple[Any, ...]:
    """Signature, constants and hints of a launch, as Triton's own launch code derives them."""
    kernel = launch.kernel
    compiled = JITFunction(kernel.fn, do_not_specialize=kernel.kwargs.get("do_not_specialize"))
    source, options = specialize(Launch(compiled, launch.arguments), gpu_target(target))
    return source.signature, source.constants, source.attrs, options


VARIANTS = {(op, PLAIN) for op in GEMMS} | {
    (op, variants[0]) for op, (_, variants) in MOVES.items()
}
VARIANTS |= {("gate_up", v) for v in ("gpt_oss", "inference", "recompute", "ungated", "odd")}
VARIANTS |= {("grad_act", v) for v in ("gpt_oss", "gates_only", "frozen_router", "transposed")}


@pytest.mark.parametrize(("op", "variant"), sorted(VARIANTS))
def test_record_on_meta_equals_the_interpreter(op: str, variant: str) -> None:
    on_meta, on_cpu = (launches_of(op, variant, device) for device in ("meta", "cpu"))
    assert [launch.kernel for launch in on_meta] == [launch.kernel for launch in on_cpu]
    assert on_cpu
    for meta, cpu in zip(on_meta, on_cpu, strict=True):
        described = {name: describe(value) for name, value in cpu.arguments.items()}
        assert {name: describe(value) for name, value in meta.arguments.items()} == described
        for target in ("sm_90", "gfx942"):
            assert compiled_as(meta, target) == compiled_as(cpu, target)


def test_record_finds_one_launch_for_every_case() -> None:
    cases = [*find_cases("default", targets=["sm_90"], dtypes=["bf16", "int"])]
    cases += find_cases("default", targets=["gfx942"], ops=["gate_up", "wgrad"], dtypes=["fp32"])
    for case in cases:
        launch = record(case)
        assert launch.kernel.fn.__name__ == case.kernel
        if case.tiles is not None:
            names = ("BLOCK_M", "BLOCK_N", "BLOCK_K", "num_warps", "num_stages")
            wanted = tuple(getattr(case.tiles, name.lower()) for name in names)
            assert tuple(launch.arguments[name] for name in names) == wanted


def storage_bytes(value: torch.Tensor | TensorDescriptor) -> int:
    base = value.base if isinstance(value, TensorDescriptor) else value
    return base.untyped_storage().nbytes()


def arguments_of(variant: str, op: str = "gate_up", dtype: Any = "bf16") -> dict[str, Any]:
    tiles = TileConfig(block_m=64, block_n=64, block_k=64)
    return record(Case(target="sm_90", op=op, dtype=dtype, variant=variant, tiles=tiles)).arguments


def test_record_variants_say_what_they_mean() -> None:
    plain = arguments_of(PLAIN)
    assert (plain["SAVES_PREACT"], plain["SAVES_ACT"]) == (True, True)
    assert (plain["FUNCTION"], plain["IS_GATED"], plain["HAS_BIAS"]) == ("silu", True, False)
    assert (plain["EVEN_N"], plain["EVEN_K"], plain["stride_w_h"]) == (True, True, 1)
    assert arguments_of("inference")["SAVES_PREACT"] is False
    assert arguments_of("recompute")["SAVES_ACT"] is False
    gpt_oss = arguments_of("gpt_oss")
    assert (gpt_oss["LIMIT"], gpt_oss["HAS_BIAS"], gpt_oss["IS_INTERLEAVED"]) == (7.0, True, True)
    assert gpt_oss["stride_w_n"] == arguments_of("transposed")["stride_w_n"] == 1
    odd = arguments_of("odd")
    assert (odd["EVEN_N"], odd["EVEN_K"], odd["hidden"] % 2) == (False, False, 1)
    large = arguments_of("large")
    for name in ("x_ptr", "weight", "act_ptr"):
        assert storage_bytes(large[name]) > 2**31
        assert storage_bytes(plain[name]) < 2**31
    assert arguments_of("ungated")["IS_GATED"] is False
    assert arguments_of("gelu")["FUNCTION"] == "gelu"


def test_record_variants_of_the_backward() -> None:
    needs = ("NEEDS_PREACT_GRAD", "NEEDS_SCALED_ACT", "NEEDS_GATES")
    expected = {
        PLAIN: [True, True, True],
        "gates_only": [False, False, True],
        "frozen_router": [True, True, False],
    }
    for variant, flags in expected.items():
        arguments = arguments_of(variant, "grad_act")
        assert [arguments[name] for name in needs] == flags
    assert arguments_of("chunked", "grad_down")["HAS_CHUNKS"] is True
    assert arguments_of(PLAIN, "grad_down")["GRAD_HAS_INDEX"] is True
    assert arguments_of(PLAIN, "grad_gate_up")["ROWS_HAVE_INDEX"] is True
    alone = arguments_of("accumulate", "wgrad")
    assert (alone["ROWS_HAVE_INDEX"], alone["GRAD_HAS_INDEX"], alone["ACCUMULATES"]) == (
        False,
        False,
        True,
    )


def test_record_knows_dtypes_and_precision() -> None:
    for dtype in FLOATS:
        arguments = arguments_of(PLAIN, dtype=dtype)
        assert arguments["x_ptr"].dtype == FLOAT_DTYPES[dtype]
        assert isinstance(arguments["weight"], TensorDescriptor) is (dtype != "fp32")
        assert arguments["PRECISION"] == "ieee"
    before = torch.backends.cuda.matmul.fp32_precision
    assert arguments_of("tf32", dtype="fp32")["PRECISION"] == "tf32"
    assert torch.backends.cuda.matmul.fp32_precision == before


def test_record_reads_descriptors_where_the_case_says_so() -> None:
    ops = ["gate_up", "down", "grad_act", "grad_x", "grad_down"]
    for target in ("sm_80", "sm_90", "sm_100", "gfx942"):
        cases = find_cases("default", targets=[target], ops=ops)
        for case in cases:
            source = record(case).arguments.get("SOURCE", "pointers")
            assert (source != "pointers") is case.reads_descriptor, case
        assert any(case.reads_descriptor for case in cases) is (target in ("sm_90", "sm_100"))


def test_specialize_gives_the_launch_hints() -> None:
    launch = record(Case(target="sm_90", op="permute", dtype="bf16", variant=PLAIN, tiles=None))
    signature, constants, hints, options = compiled_as(launch, "sm_90")
    names = list(signature)
    assert signature["rows_ptr"] == "*bf16"
    assert signature["num_rows"] == "i32"
    assert signature["stride_x_h"] == "constexpr"
    assert constants[(names.index("stride_x_h"),)] == 1
    assert hints[(names.index("hidden"),)] == [["tt.divisibility", 16]]
    assert hints.get((names.index("num_rows"),), []) == []
    assert options["enable_fp_fusion"] is True
    # AMD adds that offsets fit 32 bits while a tensor is below 2 GiB
    _, _, hints, _ = compiled_as(launch, "gfx942")
    assert ["tt.pointer_range", 32] in hints[(names.index("x_ptr"),)]
    large = Case(target="gfx942", op="permute", dtype="bf16", variant="large", tiles=None)
    _, _, hints, _ = compiled_as(record(large), "gfx942")
    assert ["tt.pointer_range", 32] not in hints[(names.index("x_ptr"),)]
