"""Is it right on this device? Every op against the oracle, and what only a device can show."""

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor

from bench.gpu import device_checks
from bench.gpu.comparing import assert_close, to_device
from bench.gpu.device import Device
from bench.gpu.part_log import PartLog, Row
from piper_kernels import functional
from piper_kernels.config import GPT_OSS_SWIGLU, RELU2, WeightLayout
from piper_kernels.permutation import Permutation
from piper_kernels.reference.experts import experts as reference_experts
from piper_kernels.testing import (
    ExpertsInputs,
    RoutingKind,
    make_experts_inputs,
    make_routing,
    run_experts,
)

DTYPES = (torch.bfloat16, torch.float16, torch.float32)
# T, H, I, E, K: whole tiles, then a multiple of nothing
SIZES = ((640, 512, 256, 8, 4), (301, 200, 136, 7, 3))
DRY_SIZES = ((9, 24, 16, 3, 2),)
LAYERS: dict[str, dict[str, Any]] = {
    "swiglu halves": {"routing": "skewed"},
    "gpt_oss interleaved transposed": {
        "routing": "with_sentinels",
        "layout": WeightLayout(is_interleaved=True, is_transposed=True),
        "activation": GPT_OSS_SWIGLU,
        "has_gate_up_bias": True,
        "has_down_bias": True,
    },
    "relu2 ungated": {
        "routing": "one_expert_empty",
        "layout": WeightLayout(is_gated=False),
        "activation": RELU2,
    },
}


@dataclass(frozen=True, slots=True)
class ExpertsCase:
    """One layer in one dtype."""

    layer: str
    sizes: tuple[int, int, int, int, int]
    dtype: torch.dtype

    @property
    def name(self) -> str:
        """As it is reported."""
        sizes = "T={} H={} I={} E={} K={}".format(*self.sizes)
        return f"experts {self.layer} {sizes} {str(self.dtype).removeprefix('torch.')}"

    def inputs(self) -> ExpertsInputs:
        """On the CPU."""
        return make_experts_inputs(*self.sizes, dtype=self.dtype, **LAYERS[self.layer])


def list_cases(*, is_dry: bool) -> list[ExpertsCase]:
    """Every layer in every dtype at every size."""
    return [
        ExpertsCase(layer, sizes, dtype)
        for sizes in (DRY_SIZES if is_dry else SIZES)
        for dtype in DTYPES
        for layer in LAYERS
    ]


def run(log: PartLog, device: Device) -> None:
    """One row for each check; the quick ones first."""
    for kind in ("uniform", "with_sentinels"):
        for num_tokens in (9,) if device.is_dry else (9, 5000):
            name = f"routing metadata {kind} T={num_tokens}"
            log.attempt(name, partial(check_routing, device, kind, num_tokens))
    for dtype in DTYPES:
        suffix = str(dtype).removeprefix("torch.")
        for op, check in OPS.items():
            log.attempt(f"{op} {suffix}", partial(check, device, dtype))
    for case in list_cases(is_dry=device.is_dry):
        log.attempt(case.name, partial(check_experts, device, case), fewest_s=2.0)
    for name, special in device_checks.CHECKS.items():
        log.attempt(name, partial(special, device), fewest_s=5.0)


def check_routing(device: Device, kind: RoutingKind, num_tokens: int) -> None:
    """The permutation equals plain torch's to the bit."""
    from piper_kernels.triton.routing_metadata import permutation_from_expert_ids

    ids, _ = make_routing(kind, num_tokens, 40, 4)
    found = permutation_from_expert_ids(ids.to(device.torch_device), 40)
    expected = Permutation.from_expert_ids(ids, 40)
    for name in ("expert_counts", "expert_offsets", "row_to_slot", "slot_to_row", "row_to_token"):
        same = torch.equal(getattr(found, name).cpu(), getattr(expected, name))
        assert same, f"{name} differs from plain torch"


def check_experts(device: Device, case: ExpertsCase) -> None:
    """Forward and all gradients of one layer."""
    inputs = to_device(case.inputs(), device.torch_device)
    found = run_experts(functional.experts, inputs, backend="triton")
    baseline = run_experts(reference_experts, inputs)
    truth = run_experts(reference_experts, inputs.to(torch.float64))
    assert_close(device, case.dtype, found, baseline, truth)


def _compare(
    device: Device,
    dtype: torch.dtype,
    op: Callable[..., Tensor],
    tensors: dict[str, Tensor],
) -> None:
    """Output and all gradients of an op, as exact as the oracle in the same dtype."""

    def run_op(backend: str, compute: torch.dtype) -> dict[str, Tensor]:
        # gates stay fp32 in the ops, fp64 in the truth
        wide = torch.promote_types(compute, torch.float32)
        leaves = {
            name: tensor.to(device.torch_device, wide if name == "gates" else compute)
            .detach()
            .requires_grad_()
            for name, tensor in tensors.items()
        }
        out = op(**leaves, backend=backend)
        generator = torch.Generator().manual_seed(1)
        grad = torch.randn(out.shape, generator=generator).to(dtype).to(out)
        grads = torch.autograd.grad(out, list(leaves.values()), grad)
        return {"out": out.detach(), **dict(zip(leaves, grads, strict=True))}

    found = run_op("triton", dtype)
    baseline, truth = run_op("reference", dtype), run_op("reference", torch.float64)
    assert_close(device, dtype, found, baseline, truth)


def _case(device: Device, dtype: torch.dtype) -> tuple[Permutation, Tensor, Tensor, Tensor]:
    """A permutation with sentinels, its gates, and tokens and rows in ``dtype``."""
    num_tokens, hidden = (9, 24) if device.is_dry else (301, 520)
    ids, gates = make_routing("with_sentinels", num_tokens, 5, 3)
    permutation = Permutation.from_expert_ids(ids.to(device.torch_device), 5)
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(num_tokens, hidden, generator=generator).to(dtype)
    rows = torch.randn(num_tokens * 3, hidden, generator=generator).to(dtype)
    return permutation, gates, x, rows


def check_permute(device: Device, dtype: torch.dtype) -> None:
    """Gather and its gradient."""
    permutation, _, x, _ = _case(device, dtype)
    op = partial(functional.permute, permutation=permutation)
    _compare(device, dtype, op, {"x": x})


def check_unpermute(device: Device, dtype: torch.dtype) -> None:
    """Weighted sum and its gradients."""
    permutation, gates, _, rows = _case(device, dtype)
    op = partial(functional.unpermute, permutation=permutation)
    _compare(device, dtype, op, {"rows": rows, "gates": gates})


def check_grouped_gemm(device: Device, dtype: torch.dtype) -> None:
    """Grouped GEMM with bias, and its three gradients."""
    permutation, _, _, rows = _case(device, dtype)
    hidden = rows.shape[1]
    generator = torch.Generator().manual_seed(2)
    weight = (torch.randn(5, 72, hidden, generator=generator) * hidden**-0.5).to(dtype)
    bias = torch.randn(5, 72, generator=generator).to(dtype)
    op = partial(functional.grouped_gemm, expert_offsets=permutation.expert_offsets)
    _compare(device, dtype, op, {"rows": rows, "weight": weight, "bias": bias})


OPS: dict[str, Callable[[Device, torch.dtype], Row | None]] = {
    "permute": check_permute,
    "unpermute": check_unpermute,
    "grouped_gemm": check_grouped_gemm,
}
