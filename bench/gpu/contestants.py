"""Who takes part in a sweep: Piper, and every rival that can be imported here."""

import importlib
import os
import sys
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from bench.gpu.part_log import NotMeasured
from bench.gpu.problem import is_known_to_transformers
from bench.moe_problem import FAMILIES, Problem, model_config
from bench.shapes import Shape
from bench.timing import Variant
from piper_kernels.functional import experts

PEERS_VARIABLE = "BENCH_PEERS"
PIPER, HUGGING_FACE, LIGER, SCATTERMOE = "piper", "hf_grouped_mm", "liger", "scattermoe"
TORCH_GEMMS = "torch_grouped_mm_gemms"
# computes y from (x, gates, gate_up, down); closes over the routing
Layer = Callable[[], Tensor]


def add_peers_to_path() -> str | None:
    """Put the folder that ``BENCH_PEERS`` names on the path; return it."""
    folder = os.environ.get(PEERS_VARIABLE)
    if folder and folder not in sys.path:
        sys.path.insert(0, folder)
    return folder


def _import(module: str) -> Any:
    add_peers_to_path()
    try:
        return importlib.import_module(module)
    except Exception as error:
        # a rival that breaks while it is imported is as absent as one that is missing
        raise NotMeasured(f"{module}: {type(error).__name__}: {error}") from None


def piper_layer(problem: Problem, shape: Shape) -> Layer:
    """Piper's experts, as users call them; the backend is named, so nothing else can run."""
    weights = problem.module
    args = problem.x, problem.expert_ids, problem.gates, weights.gate_up_proj, weights.down_proj
    return partial(experts, *args, backend="triton")


def hugging_face_layer(problem: Problem, shape: Shape) -> Layer:
    """The family's own experts class with ``grouped_mm`` selected and these very weights."""
    if not is_known_to_transformers(shape):
        raise NotMeasured(f"the bench knows no class of family {shape.family} in transformers")
    _import("transformers")
    family = FAMILIES[shape.family]
    modeling = _import(f"transformers.models.{family.module}.modeling_{family.module}")
    with torch.device("meta"):
        module = getattr(modeling, family.experts_class)(model_config(shape, family))
    if family.layout.is_transposed or family.layout.is_interleaved:
        raise NotMeasured(f"{shape.family} stores its weights another way")
    module.gate_up_proj, module.down_proj = problem.module.gate_up_proj, problem.module.down_proj
    module.config._experts_implementation = "grouped_mm"
    dtype = problem.x.dtype

    def run() -> Tensor:
        gates = problem.gates if family.has_wide_gates else problem.gates.to(dtype)
        return module(problem.x, problem.expert_ids, gates)

    return run


def liger_layer(problem: Problem, shape: Shape) -> Layer:
    """Liger's fused MoE, which reads the same layout."""
    function = _import("liger_kernel.ops.fused_moe").LigerFusedMoEFunction
    ids, weights = problem.expert_ids.int(), problem.module
    args = problem.x, weights.gate_up_proj, weights.down_proj, ids, problem.gates
    return partial(function.apply, *args)


def scattermoe_layer(problem: Problem, shape: Shape) -> Layer:
    """ScatterMoE's gated MLP. It stores up before gate: its weights are swapped copies."""
    mlp_class = _import("scattermoe.mlp").GLUMLP
    gate_up, down = problem.module.gate_up_proj, problem.module.down_proj
    device, dtype = gate_up.device, gate_up.dtype
    with device:
        mlp = mlp_class(shape.H, shape.I, shape.E, shape.K, activation=nn.SiLU()).to(dtype)
    gate, up = gate_up.detach().chunk(2, dim=1)
    mlp.experts.weight.data = torch.cat([up, gate], dim=1)
    mlp.output_experts.weight.data = down.detach().clone()
    # so that its gradients are cleared with all others
    problem.module.add_module(SCATTERMOE, mlp)

    def run() -> Tensor:
        return mlp(problem.x, problem.gates.to(dtype), problem.expert_ids)

    return run


LAYERS: dict[str, Callable[[Problem, Shape], Layer]] = {
    PIPER: piper_layer,
    HUGGING_FACE: hugging_face_layer,
    LIGER: liger_layer,
    SCATTERMOE: scattermoe_layer,
}
# their weights are copies, so the weight gradients do not land where the gate looks
OWN_WEIGHTS = (SCATTERMOE,)


def clear_gradients(problem: Problem) -> None:
    """Forget all gradients."""
    for tensor in (problem.x, problem.gates, *problem.module.parameters()):
        tensor.grad = None


def _forward(layer: Layer) -> Tensor:
    with torch.no_grad():
        return layer()


def _forward_backward(layer: Layer, grad_y: Tensor) -> Tensor:
    y = layer()
    y.backward(grad_y)
    return y


def layer_variant(
    name: str,
    layer: Layer,
    problem: Problem,
    *,
    has_backward: bool,
    flush: Callable[[], None],
) -> Variant:
    """A layer as a variant of the harness."""
    run = partial(_forward_backward, layer, problem.grad_y) if has_backward else None

    def prepare() -> None:
        clear_gradients(problem)
        flush()

    def outputs() -> Mapping[str, Tensor]:
        clear_gradients(problem)
        if run is None:
            return {"y": _forward(layer)}
        y = run()
        module = problem.module
        found = {
            "y": y.detach(),
            "grad_x": problem.x.grad,
            "grad_gates": problem.gates.grad,
            "grad_gate_up_proj": module.gate_up_proj.grad,
            "grad_down_proj": module.down_proj.grad,
        }
        return {key: value for key, value in found.items() if value is not None}

    return Variant(name=name, run=run or partial(_forward, layer), prepare=prepare, outputs=outputs)


def torch_gemms_variant(
    problem: Problem, shape: Shape, *, has_backward: bool, flush: Callable[[], None]
) -> Variant:
    """``F.grouped_mm`` twice on rows that are sorted already: the GEMMs alone, no roof but a mark.

    It computes no layer: gather, activation, weighting and combine are left out.
    """
    if not hasattr(F, "grouped_mm"):
        raise NotMeasured("this torch has no torch.nn.functional.grouped_mm")
    ids = problem.expert_ids.flatten()
    offsets = ids.bincount(minlength=shape.E).cumsum(0).int()
    dtype, device = problem.x.dtype, problem.x.device
    x = torch.randn(len(ids), shape.H, device=device).to(dtype).requires_grad_(has_backward)
    act = torch.randn(len(ids), shape.I, device=device).to(dtype).requires_grad_(has_backward)
    weights = [
        weight.detach().requires_grad_(has_backward)
        for weight in (problem.module.gate_up_proj, problem.module.down_proj)
    ]
    pairs = list(zip((x, act), weights, strict=True))
    grads = [torch.randn(len(ids), weight.shape[1], device=device).to(dtype) for weight in weights]

    def run() -> None:
        for (rows, weight), grad in zip(pairs, grads, strict=True):
            out = F.grouped_mm(rows, weight.mT, offs=offsets)
            if has_backward:
                out.backward(grad)

    def prepare() -> None:
        for tensor in (x, act, *weights):
            tensor.grad = None
        flush()

    return Variant(name=TORCH_GEMMS, run=run, prepare=prepare)
