"""What the choice of tiles may depend on: the key of the tuning cache. Pure.

Tokens enter as rows per expert, rounded up to one of few buckets, so a new number of tokens does
not lead to new tuning. Letters: H hidden_size, I intermediate_size, E num_experts, K top_k,
R = T*K num_rows.
"""

from dataclasses import dataclass
from typing import Literal, get_args

from piper_kernels.config import WeightLayout
from piper_kernels.triton.tiles import Op

Gemm = Literal["gate_up", "down", "grad_act", "grad_x", "grad_gate_up", "grad_down"]
GEMMS: tuple[Gemm, ...] = get_args(Gemm)
FORWARD_GEMMS: tuple[Gemm, ...] = ("gate_up", "down")
BACKWARD_GEMMS: tuple[Gemm, ...] = ("grad_act", "grad_x", "grad_gate_up", "grad_down")
# their epilogues apply the activation
_GEMMS_WITH_ACTIVATION = ("gate_up", "grad_act")

# average rows of an expert; the default tiles change at the first four only
BUCKET_EDGES = (16, 32, 64, 96, 128, 256, 512, 1024, 2048, 4096)
_BEYOND = 2 * BUCKET_EDGES[-1]


def op_of(gemm: Gemm) -> Op:
    """The kernel that computes a GEMM of the layer.

    Example:
        >>> op_of("grad_down"), op_of("grad_x")
        ('wgrad', 'grad_x')
    """
    return "wgrad" if gemm in ("grad_gate_up", "grad_down") else gemm  # type: ignore[return-value]


def rows_bucket(num_rows: int, num_experts: int) -> int:
    """The average rows of an expert, rounded up to a bucket's upper edge.

    Args:
        num_rows: R.
        num_experts: E.

    Returns:
        The edge; 8192 stands for everything above 4096.

    Example:
        >>> rows_bucket(1000 * 8, 128), rows_bucket(1010 * 8, 128), rows_bucket(10**9, 8)
        (64, 64, 8192)
    """
    return next((edge for edge in BUCKET_EDGES if num_rows <= edge * num_experts), _BEYOND)


@dataclass(frozen=True, kw_only=True, slots=True)
class LayerKey:
    """One layer, one dtype, one bucket of rows.

    Attributes:
        dtype: e.g. ``"bfloat16"``.
        num_experts: E.
        hidden_size: H.
        intermediate_size: I.
        top_k: K.
        layout: how the weights are stored.
        activation: the activation's function.
        rows_per_expert: of :func:`rows_bucket`.
        is_clamped: the activation has a limit.
    """

    dtype: str
    num_experts: int
    hidden_size: int
    intermediate_size: int
    top_k: int
    layout: WeightLayout
    activation: str
    rows_per_expert: int
    is_clamped: bool = False

    def text(self, gemm: Gemm) -> str:
        """The key of one GEMM in the cache file.

        Example:
            >>> key = LayerKey(
            ...     dtype="bfloat16", num_experts=128, hidden_size=2048, intermediate_size=768,
            ...     top_k=8, layout=WeightLayout(), activation="silu", rows_per_expert=256,
            ... )
            >>> key.text("gate_up")
            'gate_up bfloat16 E128 H2048 I768 K8 rows256 gated silu'
            >>> key.text("down")
            'down bfloat16 E128 H2048 I768 K8 rows256 gated'
        """
        layout = self.layout
        flags = {
            "gated": layout.is_gated,
            "interleaved": layout.is_interleaved,
            "transposed": layout.is_transposed,
            self.activation: gemm in _GEMMS_WITH_ACTIVATION,
            "clamped": self.is_clamped and gemm in _GEMMS_WITH_ACTIVATION,
        }
        sizes = (
            f"E{self.num_experts} H{self.hidden_size} I{self.intermediate_size} K{self.top_k} "
            f"rows{self.rows_per_expert}"
        )
        return " ".join([gemm, self.dtype, sizes, *(name for name, on in flags.items() if on)])
