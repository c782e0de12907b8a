"""The ledger of one experts layer as Piper runs it: every launch, forward and backward.

Letters: T num_tokens, H hidden_size, I intermediate_size, K top_k, R num_rows.
"""

from typing import Protocol

from piper_kernels.cost.gemm import (
    add_shares_traffic,
    gate_up_traffic,
    grad_act_traffic,
    grouped_gemm_traffic,
)
from piper_kernels.cost.moves import (
    grouped_sum_traffic,
    sum_over_rows_traffic,
    tile_schedule_traffic,
)
from piper_kernels.cost.ragged import RaggedRows, Tiles, num_tiles
from piper_kernels.cost.sizes import GATE_BYTES, INDEX_BYTES, ExpertsSizes
from piper_kernels.cost.traffic import NOTHING_LOST, Memory, Traffic, plain
from piper_kernels.cost.wgrad import Operand, wgrad_traffic


class LayerTiles(Protocol):
    """The tiles of every GEMM; ``triton.tiles.ExpertsTiles`` has them."""

    @property
    def gate_up(self) -> Tiles:
        """First projection."""

    @property
    def down(self) -> Tiles:
        """Second projection."""

    @property
    def grad_act(self) -> Tiles:
        """Back through the second projection and the activation."""

    @property
    def grad_x(self) -> Tiles:
        """Back through the first projection."""

    @property
    def grad_gate_up(self) -> Tiles:
        """Gradient of the first weight."""

    @property
    def grad_down(self) -> Tiles:
        """Gradient of the second weight."""


def experts_forward_ledger(
    sizes: ExpertsSizes,
    rows: RaggedRows,
    tiles: LayerTiles,
    *,
    keeps_preact: bool,
    bias_bytes: int = 0,
    memory: Memory = NOTHING_LOST,
) -> dict[str, Traffic]:
    """The launches of the forward, in order.

    Args:
        sizes: H, I, dtype width, layout; T, E and K as in ``rows``.
        rows: which rows each expert has, from which tokens.
        tiles: how each GEMM is cut.
        keeps_preact: for a backward.
        bias_bytes: of one element of the biases, 0 without.
        memory: the cache.

    Example:
        >>> from types import SimpleNamespace
        >>> tile = SimpleNamespace(block_m=16, block_n=16, group_m=1, num_xcds=1, split_rows=None)
        >>> tiles = SimpleNamespace(gate_up=tile, down=tile)
        >>> rows = RaggedRows.from_expert_ids([[0]], num_experts=1)
        >>> sizes = ExpertsSizes(
        ...     num_tokens=1, hidden_size=16, intermediate_size=8, num_experts=1, top_k=1
        ... )
        >>> ledger = experts_forward_ledger(sizes, rows, tiles, keeps_preact=False)
        >>> ledger["gate_up"].compulsory  # entry 8, offset 4, token 4, x 32, weight 512, act 16
        576
    """
    gate_up = gate_up_traffic(
        sizes,
        rows,
        tiles.gate_up,
        keeps_preact=keeps_preact,
        bias_bytes=bias_bytes,
        memory=memory,
    )
    down = grouped_gemm_traffic(
        rows,
        tiles.down,
        in_size=sizes.intermediate_size,
        out_size=sizes.hidden_size,
        element_bytes=sizes.element_bytes,
        bias_bytes=bias_bytes,
        memory=memory,
    )
    combine = sum_over_rows_traffic(
        rows, hidden_size=sizes.hidden_size, has_gates=True, element_bytes=sizes.element_bytes
    )
    schedule = tile_schedule_traffic(rows)
    return {"tile_schedule": schedule, "gate_up": gate_up, "down": down, "combine": combine}


def experts_backward_ledger(
    sizes: ExpertsSizes,
    rows: RaggedRows,
    tiles: LayerTiles,
    *,
    has_preact: bool = True,
    needs_x: bool = True,
    needs_weights: bool = True,
    needs_gates: bool = True,
    bias_bytes: int = 0,
    memory: Memory = NOTHING_LOST,
) -> dict[str, Traffic]:
    """The launches of the backward, in order, as far as they are needed.

    Args:
        sizes: H, I, dtype width, layout; T, E and K as in ``rows``.
        rows: which rows each expert has, from which tokens.
        tiles: how each GEMM is cut.
        has_preact: ``False`` computes it anew.
        needs_x: x wants a gradient.
        needs_weights: weights and biases want one.
        needs_gates: gates want one.
        bias_bytes: of one element of the biases, 0 without.
        memory: the cache.
    """
    hidden, inter, width = sizes.hidden_size, sizes.intermediate_size, sizes.preact_size
    element = sizes.element_bytes
    ledger = {"tile_schedule": tile_schedule_traffic(rows)}
    if not has_preact:
        ledger["gate_up"] = gate_up_traffic(
            sizes,
            rows,
            tiles.gate_up,
            keeps_preact=True,
            writes_act=False,
            bias_bytes=bias_bytes,
            memory=memory,
        )
    needs_preact_grad = needs_x or needs_weights
    if needs_preact_grad or needs_gates:
        ledger["grad_act"] = grad_act_traffic(
            sizes,
            rows,
            tiles.grad_act,
            needs_preact_grad=needs_preact_grad,
            needs_scaled_act=needs_weights,
            needs_gates=needs_gates,
            memory=memory,
        )
    if needs_gates:
        ledger["zero_grad_gates"] = plain(rows.num_rows * GATE_BYTES)
        ledger["grad_gates"] = add_shares_traffic(
            sizes,
            rows,
            tiles.grad_act.block_m,
            num_tiles(inter, tiles.grad_act.block_n),
            bias_bytes=bias_bytes,
        )
    if needs_x:
        ledger["grad_rows"] = grouped_gemm_traffic(
            rows,
            tiles.grad_x,
            in_size=width,
            out_size=hidden,
            element_bytes=element,
            memory=memory,
        )
        ledger["grad_x"] = sum_over_rows_traffic(
            rows, hidden_size=hidden, has_gates=False, element_bytes=element
        )
    if needs_weights:
        ledger |= _weight_grads(sizes, rows, tiles, bias_bytes, memory)
    return ledger


def _weight_grads(
    sizes: ExpertsSizes, rows: RaggedRows, tiles: LayerTiles, bias_bytes: int, memory: Memory
) -> dict[str, Traffic]:
    """Gradients of both weights, and of the biases if there are any."""
    hidden, inter, width = sizes.hidden_size, sizes.intermediate_size, sizes.preact_size
    element = sizes.element_bytes
    tokens = Operand(hidden, is_gathered=True)

    def weight_grad(grad: Operand, x: Operand, tile: Tiles) -> Traffic:
        return wgrad_traffic(rows, grad, x, tile, element_bytes=element, memory=memory)

    ledger = {
        "grad_gate_up": weight_grad(Operand(width), tokens, tiles.grad_gate_up),
        "grad_down": weight_grad(tokens, Operand(inter), tiles.grad_down),
    }
    if bias_bytes:
        for name, cols, is_gathered in (("gate_up", width, False), ("down", hidden, True)):
            ledger[f"grad_{name}_bias"] = grouped_sum_traffic(
                rows,
                num_cols=cols,
                is_gathered=is_gathered,
                element_bytes=element,
                out_bytes=bias_bytes,
            )
    return ledger


def kept_bytes(sizes: ExpertsSizes, *, keeps_preact: bool = True) -> dict[str, int]:
    """What the forward keeps for the backward, x included although its owner has it too.

    Nothing of size R * H is among it.

    Example:
        >>> sizes = ExpertsSizes(
        ...     num_tokens=4, hidden_size=8, intermediate_size=2, num_experts=2, top_k=1
        ... )
        >>> kept_bytes(sizes)
        {'x': 64, 'preact': 32, 'gates': 16, 'maps': 68}
    """
    rows = sizes.num_rows
    return {
        "x": sizes.num_tokens * sizes.hidden_size * sizes.element_bytes,
        "preact": rows * sizes.preact_size * sizes.element_bytes * keeps_preact,
        "gates": rows * GATE_BYTES,
        # row_to_slot, slot_to_row, row_to_token, expert_counts, expert_offsets
        "maps": (3 * rows + 2 * sizes.num_experts + 1) * INDEX_BYTES,
    }


def total(ledger: dict[str, Traffic]) -> Traffic:
    """The sum of a ledger's launches."""
    return sum(ledger.values(), Traffic())
