"""explain_experts: what one call of experts would do, without doing it."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from piper_kernels.config import SWIGLU, Activation, Backend, Save, WeightLayout
from piper_kernels.contracts import ExpertsWeights
from piper_kernels.functional.backend import Choice, Running, choose_for, load
from piper_kernels.functional.checks import check_experts, check_options
from piper_kernels.functional.dtypes import choose_dtypes, gate_dtype
from piper_kernels.functional.experts import is_gradient_wanted

Path = Literal["fused", "composed", "autograd"]


@dataclass(frozen=True, kw_only=True, slots=True)
class Explanation:
    """What runs, why, and what it keeps for the backward.

    Attributes:
        backend: ``triton``, ``cpu`` or ``reference``.
        reason: why this backend.
        path: ``fused`` (one op), ``composed`` (grouped GEMMs around a callable) or ``autograd``
            (the reference, differentiated by torch).
        compute_dtype: what the GEMMs compute in.
        output_dtype: y's dtype.
        saved_bytes: kept for the backward, parameters not counted; 0 if no gradient is wanted,
            ``None`` where torch's autograd decides.
        tiles: of each GEMM of the fused Triton path, and where they come from (default, cache,
            tuned).
        notes: everything that makes this call slower or bigger than it could be.
    """

    backend: Running
    reason: str
    path: Path
    compute_dtype: torch.dtype
    output_dtype: torch.dtype
    saved_bytes: int | None
    tiles: tuple[str, ...] = ()
    notes: tuple[str, ...] = ()

    def __str__(self) -> str:
        kept = "decided by autograd" if self.saved_bytes is None else f"{self.saved_bytes:,} bytes"
        dtypes = f"computes in {_name(self.compute_dtype)}, returns {_name(self.output_dtype)}"
        lines = [
            f"experts: {self.backend} ({self.reason})",
            f"  path:              {self.path}",
            f"  dtypes:            {dtypes}",
            f"  kept for backward: {kept}",
            *(f"  tiles:             {line}" for line in self.tiles),
            *(f"  note:              {note}" for note in self.notes),
        ]
        return "\n".join(lines)


def explain_experts(
    x: Tensor,
    expert_ids: Tensor,
    gates: Tensor,
    gate_up_proj: Tensor,
    down_proj: Tensor,
    *,
    layout: WeightLayout | None = None,
    activation: Activation | Callable[[Tensor], Tensor] = SWIGLU,
    gate_up_bias: Tensor | None = None,
    down_bias: Tensor | None = None,
    save: Save = "preact",
    backend: Backend = "auto",
) -> Explanation:
    """Say what :func:`~piper_kernels.functional.experts.experts` would do with these arguments.

    Looks at shapes, dtypes, devices and autocast only: computes nothing and never synchronises.

    Args:
        x: as for ``experts``, and so are all others.
        expert_ids: ``[T, K]``.
        gates: ``[T, K]``.
        gate_up_proj: ``[E, 2I, H]``, or as ``layout`` says.
        down_proj: ``[E, H, I]``, or as ``layout`` says.
        layout: how the weights are stored.
        activation: an ``Activation`` or a callable.
        gate_up_bias: or ``None``.
        down_bias: or ``None``.
        save: ``"preact"`` or ``"x"``.
        backend: what would be asked for.

    Returns:
        The explanation; ``print`` it.

    Raises:
        PiperError: what ``experts`` would raise for these arguments.

    Example:
        >>> x, ids, gates = torch.zeros(4, 8), torch.zeros(4, 2).long(), torch.zeros(4, 2)
        >>> print(explain_experts(x, ids, gates, torch.zeros(3, 12, 8), torch.zeros(3, 8, 6)))
        experts: cpu (the tensors are on the CPU)
          path:              fused
          dtypes:            computes in float32, returns float32
          kept for backward: 0 bytes
          note:              no gradient is wanted, so nothing is kept
    """
    name = "experts"
    layout = layout or WeightLayout()
    tensors = (gate_up_proj, down_proj, gate_up_bias, down_bias)
    check_options(name, layout, activation, save)
    check_experts(name, x, expert_ids, gates, *tensors, layout)
    is_callable = not isinstance(activation, Activation)
    dtype, output_dtype = choose_dtypes(x, gate_up_proj)
    choice = choose_for(name, backend, x, dtype)
    is_wanted = is_gradient_wanted(x, gates, *tensors)
    path: Path = "composed" if is_callable else "fused"
    if choice.backend == "reference" and not is_callable:
        path = "autograd"
    saved_bytes: int | None = 0
    if is_wanted and choice.backend == "reference":
        saved_bytes = None
    elif is_wanted:
        width = gate_up_proj.shape[2 if layout.is_transposed else 1]
        inner_size = down_proj.shape[1 if layout.is_transposed else 2]
        elements = _saved_elements(x, expert_ids.numel(), width, inner_size, path, save)
        casts = (t for t in tensors if t is not None and t.dtype != dtype)
        elements += sum(tensor.numel() for tensor in casts)
        small_bytes = _small_bytes(expert_ids.numel(), gate_up_proj.shape[0], dtype)
        saved_bytes = elements * dtype.itemsize + small_bytes
    tiles: tuple[str, ...] = ()
    if choice.backend == "triton" and isinstance(activation, Activation):
        weights = ExpertsWeights(
            gate_up_proj=gate_up_proj,
            down_proj=down_proj,
            gate_up_bias=gate_up_bias,
            down_bias=down_bias,
            layout=layout,
            activation=activation,
        )
        explain_tiles = load("triton", "launch_tiles").explain_tiles
        tiles = explain_tiles(x, dtype, expert_ids.numel(), expert_ids.shape[1], weights)
    return Explanation(
        backend=choice.backend,
        reason=choice.reason,
        path=path,
        compute_dtype=dtype,
        output_dtype=output_dtype,
        saved_bytes=saved_bytes,
        tiles=tiles,
        notes=tuple(_notes(choice, is_callable, is_wanted, save, x, gate_up_proj, dtype)),
    )


def _saved_elements(
    x: Tensor, num_rows: int, width: int, inner_size: int, path: Path, save: Save
) -> int:
    """Fused: x and, unless computed anew, the pre-activation. Composed: what each op reads."""
    if path == "composed":
        return num_rows * (2 * x.shape[1] + inner_size)
    return x.numel() + (num_rows * width if save == "preact" else 0)


def _small_bytes(num_rows: int, num_experts: int, dtype: torch.dtype) -> int:
    """Gates, row maps, counts and offsets."""
    index_bytes = 4
    num_indices = 3 * num_rows + 2 * num_experts + 1
    return num_rows * gate_dtype(dtype).itemsize + num_indices * index_bytes


def _notes(
    choice: Choice,
    is_callable: bool,
    is_wanted: bool,
    save: Save,
    x: Tensor,
    gate_up_proj: Tensor,
    dtype: torch.dtype,
) -> list[str]:
    notes = []
    if choice.is_fallback:
        notes.append(f"slow: {choice.reason}")
    if not is_wanted:
        notes.append("no gradient is wanted, so nothing is kept")
    elif is_callable:
        notes.append("the callable runs under autograd and keeps what it keeps, not counted here")
    elif save == "x":
        notes.append("save='x': the backward repeats the first GEMM")
    if gate_up_proj.dtype != dtype:
        cast = f"from {_name(gate_up_proj.dtype)} to {_name(dtype)}"
        notes.append(f"autocast casts all weights {cast} at each call and keeps the copies")
    if x.dtype != dtype:
        notes.append(f"x is cast from {_name(x.dtype)} to {_name(dtype)}")
    if choice.backend == "cpu" and dtype == torch.float16:
        notes.append("float16 is multiplied in float32: CPUs have no fast float16")
    return notes


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")
