"""experts: the whole expert computation of one layer, from routed tokens to their weighted sum."""

from torch import Tensor

from piper_kernels.config import SWIGLU, Activation, WeightLayout
from piper_kernels.permutation import Permutation
from piper_kernels.reference.activation import activation as apply_activation
from piper_kernels.reference.grouped_gemm import grouped_gemm
from piper_kernels.reference.permute import permute
from piper_kernels.reference.unpermute import unpermute


def experts(
    x: Tensor,
    expert_ids: Tensor,
    gates: Tensor,
    gate_up_proj: Tensor,
    down_proj: Tensor,
    *,
    layout: WeightLayout | None = None,
    activation: Activation = SWIGLU,
    gate_up_bias: Tensor | None = None,
    down_bias: Tensor | None = None,
) -> Tensor:
    """``y[t] = sum_k gates[t,k] * down_e(act(gate_up_e(x[t])))``, e = ``expert_ids[t,k]``.

    Args:
        x: ``[T, H]``.
        expert_ids: ``[T, K]`` int64; ids ``>= E`` are sentinels and contribute nothing.
        gates: ``[T, K]`` fp32 (fp64 with fp64 x).
        gate_up_proj: ``[E, 2I, H]``, or as ``layout`` says.
        down_proj: ``[E, H, I]``, or as ``layout`` says.
        layout: how the weights are stored; default: Hugging Face's halves.
        activation: what happens in between.
        gate_up_bias: ``[E, 2I]`` (``[E, I]`` ungated) or ``None``.
        down_bias: ``[E, H]`` or ``None``.

    Returns:
        ``[T, H]`` in x's dtype.
    """
    layout = layout or WeightLayout()
    permutation = Permutation.from_expert_ids(expert_ids, gate_up_proj.shape[0])
    offsets = permutation.expert_offsets
    rows = permute(x, permutation)
    preact = grouped_gemm(
        rows, gate_up_proj, offsets, bias=gate_up_bias, is_transposed=layout.is_transposed
    )
    act = apply_activation(preact, activation, layout)
    out = grouped_gemm(act, down_proj, offsets, bias=down_bias, is_transposed=layout.is_transposed)
    return unpermute(out, gates, permutation)
