"""The ledger of an unfused experts layer: what transformers' grouped_mm launches.

Read in transformers 5.24, ``integrations/moe.py``, ``grouped_mm_experts_forward``, and in the
backward that autograd derives from it: a gated layer without biases, gates in the model's dtype.
Its GEMMs get Piper's tiles, so that both layers are modelled alike. Bytes of the element-wise
launches are those of the tensors that they read and write.
Letters: T num_tokens, H hidden_size, I intermediate_size, K top_k, R num_rows.
"""

from piper_kernels.cost.gemm import grouped_gemm_traffic
from piper_kernels.cost.layer import LayerTiles
from piper_kernels.cost.moves import gather_rereads
from piper_kernels.cost.ragged import RaggedRows, Tiles
from piper_kernels.cost.sizes import EXPERT_ID_BYTES, ExpertsSizes
from piper_kernels.cost.traffic import NOTHING_LOST, Memory, Traffic, plain
from piper_kernels.cost.wgrad import Operand, wgrad_traffic


class _Tensors:
    """Bytes of the layer's tensors."""

    def __init__(self, sizes: ExpertsSizes) -> None:
        rows, element = sizes.num_rows, sizes.element_bytes
        self.tokens = sizes.num_tokens * sizes.hidden_size * element
        self.rows = rows * sizes.hidden_size * element
        self.act = rows * sizes.intermediate_size * element
        self.gates = rows * element
        self.index = rows * EXPERT_ID_BYTES


def _gemm(
    sizes: ExpertsSizes,
    rows: RaggedRows,
    tiles: Tiles,
    in_size: int,
    out_size: int,
    memory: Memory,
) -> Traffic:
    return grouped_gemm_traffic(
        rows,
        tiles,
        in_size=in_size,
        out_size=out_size,
        element_bytes=sizes.element_bytes,
        memory=memory,
    )


def unfused_forward_ledger(
    sizes: ExpertsSizes, rows: RaggedRows, tiles: LayerTiles, *, memory: Memory = NOTHING_LOST
) -> dict[str, Traffic]:
    """The launches of the forward, in order.

    Args:
        sizes: of a gated layer.
        rows: which rows each expert has, from which tokens.
        tiles: for its GEMMs.
        memory: the cache.
    """
    t = _Tensors(sizes)
    hidden, inter = sizes.hidden_size, sizes.intermediate_size
    row_bytes = hidden * sizes.element_bytes
    gather = plain(t.tokens + t.index + t.rows)
    reread = gather_rereads(rows, row_bytes=row_bytes, written_bytes=row_bytes, memory=memory)
    return {
        # ids in; sorted ids and the permutation out
        "sort": plain(3 * t.index),
        "token_of_row": plain(2 * t.index),
        "gather": gather + Traffic(issued=t.rows - t.tokens, reread=reread),
        "gather_gates": plain(t.index + 2 * t.gates),
        "histogram": plain(t.index),
        "gate_up": _gemm(sizes, rows, tiles.gate_up, hidden, sizes.preact_size, memory),
        "silu": plain(2 * t.act),
        "times_up": plain(3 * t.act),
        "down": _gemm(sizes, rows, tiles.down, inter, hidden, memory),
        "times_gate": plain(2 * t.rows + t.gates, flops=rows.num_valid * hidden),
        # arange out, permutation in, inverse out
        "inverse": plain(3 * t.index),
        "to_slots": plain(2 * t.rows + t.index),
        "sum_over_k": plain(t.rows + t.tokens, flops=rows.num_valid * hidden),
    }


def unfused_backward_ledger(
    sizes: ExpertsSizes, rows: RaggedRows, tiles: LayerTiles, *, memory: Memory = NOTHING_LOST
) -> dict[str, Traffic]:
    """The launches of the backward, in order: gradients of x, gates and both weights.

    Args:
        sizes: of a gated layer.
        rows: which rows each expert has, from which tokens.
        tiles: for its GEMMs.
        memory: the cache.
    """
    t = _Tensors(sizes)
    hidden, inter, width = sizes.hidden_size, sizes.intermediate_size, sizes.preact_size
    element = sizes.element_bytes

    def weight_grad(grad_size: int, x_size: int, tile: Tiles) -> Traffic:
        operands = Operand(grad_size), Operand(x_size)
        return wgrad_traffic(rows, *operands, tile, element_bytes=element, memory=memory)

    return {
        # the gradient of sum_over_k is a view of grad_y; indexing's gradient adds into zeros
        "zero_slots": plain(t.rows),
        "to_slots_backward": plain(t.tokens + 2 * t.rows + t.index),
        "times_gate_backward": plain(2 * t.rows + t.gates, flops=rows.num_valid * hidden),
        "gate_products": plain(3 * t.rows, flops=rows.num_valid * hidden),
        "gate_sums": plain(t.rows + t.gates, flops=rows.num_valid * hidden),
        "grad_act": _gemm(sizes, rows, tiles.grad_act, hidden, inter, memory),
        "grad_down": weight_grad(hidden, inter, tiles.grad_down),
        "times_up_backward": plain(6 * t.act),
        "silu_backward": plain(3 * t.act),
        "join_halves": plain(4 * t.act),
        "grad_rows": _gemm(sizes, rows, tiles.grad_x, width, hidden, memory),
        "grad_gate_up": weight_grad(width, hidden, tiles.grad_gate_up),
        "gather_gates_backward": plain(t.index + 3 * t.gates),
        "zero_x": plain(t.tokens),
        # sorted by token, then added: each token is read and written once
        "gather_backward": plain(t.rows + 3 * t.index + 2 * t.tokens),
    }


def unfused_kept_bytes(sizes: ExpertsSizes) -> dict[str, int]:
    """What autograd keeps of it, x included although its owner has it too.

    Example:
        >>> sizes = ExpertsSizes(
        ...     num_tokens=4, hidden_size=8, intermediate_size=2, num_experts=2, top_k=1
        ... )
        >>> sum(unfused_kept_bytes(sizes).values())
        360
    """
    t = _Tensors(sizes)
    return {
        "x": t.tokens,
        "gathered_x": t.rows,
        "preact": 2 * t.act,
        "silu": t.act,
        "act": t.act,
        "down_rows": t.rows,
        "gates": t.gates,
        # token_of_row, permutation, inverse
        "indices": 3 * t.index,
    }
