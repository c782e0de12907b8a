"""What functional/ and its backends (cpu, triton) hand to one another. Data only.

A backend offers, in ``<backend>/experts.py``, two plain functions without autograd::

    experts_forward(x, gates, permutation, weights, *, needs_preact) -> (y, preact | None)
    experts_backward(grad_y, x, gates, permutation, weights, preact | None, *, needs)
        -> ExpertsGrads

``preact`` is the first projection's output after its bias and before the activation, ``[R, 2I]``
(``[R, I]`` ungated) in expert-sorted order; ``experts_backward`` computes it anew when it gets
``None``. The smaller ops have raw functions too, each in the backend's file of its name::

    permute.permute_forward(x, permutation) -> rows
    permute.permute_backward(grad_rows, permutation) -> grad_x
    unpermute.unpermute_forward(rows, gates, permutation) -> y
    unpermute.unpermute_backward(grad_y, rows, gates, permutation) -> (grad_rows, grad_gates)
    grouped_gemm.grouped_gemm(rows, weight, expert_offsets, *, bias, is_transposed) -> out
    grouped_gemm.grouped_gemm_wgrad(grad_out, rows, expert_offsets, *, is_transposed) -> grad_weight

Letters: T num_tokens, K top_k, R = T*K rows, E num_experts, H hidden_size,
I intermediate_size.
"""

from dataclasses import dataclass

from torch import Tensor

from piper_kernels.config import Activation, WeightLayout


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class ExpertsWeights:
    """The expert weights of one layer, and how to read them.

    Attributes:
        gate_up_proj: ``[E, 2I, H]``, or as ``layout`` says; any strides.
        down_proj: ``[E, H, I]``, or as ``layout`` says; any strides.
        gate_up_bias: ``[E, 2I]`` (``[E, I]`` ungated; interleaved like the weight) or ``None``.
        down_bias: ``[E, H]`` or ``None``.
        layout: transposed, interleaved, gated.
        activation: what happens between the projections.
    """

    gate_up_proj: Tensor
    down_proj: Tensor
    gate_up_bias: Tensor | None
    down_bias: Tensor | None
    layout: WeightLayout
    activation: Activation

    @property
    def num_experts(self) -> int:
        """E."""
        return self.gate_up_proj.shape[0]

    @property
    def hidden_size(self) -> int:
        """H."""
        return self.down_proj.shape[2 if self.layout.is_transposed else 1]

    @property
    def intermediate_size(self) -> int:
        """I."""
        return self.down_proj.shape[1 if self.layout.is_transposed else 2]

    @property
    def preact_size(self) -> int:
        """2I if gated, I if not."""
        return self.layout.preact_size(self.intermediate_size)


@dataclass(frozen=True, kw_only=True, slots=True)
class ExpertsNeeds:
    """Which gradients the caller wants. Work is skipped for the others."""

    x: bool
    gates: bool
    gate_up_proj: bool
    down_proj: bool
    gate_up_bias: bool
    down_bias: bool


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class ExpertsGrads:
    """Gradients in the shape, layout and dtype of what they belong to; ``None`` where not needed.

    ``gates`` is ``[T, K]`` fp32 (fp64 for fp64 x), 0 at sentinel slots. An expert without rows gets
    exact zeros.
    """

    x: Tensor | None
    gates: Tensor | None
    gate_up_proj: Tensor | None
    down_proj: Tensor | None
    gate_up_bias: Tensor | None
    down_bias: Tensor | None
