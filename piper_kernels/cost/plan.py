"""FLOPs and compulsory bytes of every op as pure functions of its sizes: the plan.

Letters: T num_tokens, H hidden_size, I intermediate_size, E num_experts, K top_k, R = T*K num_rows.

*Compulsory* bytes are the distinct addresses that a launch reads and writes, each counted once: no
implementation of that launch can move less. FLOPs are those of matrix products and weighted sums, 2
per multiply-add; element-wise work is not counted, since no machine is bound by it.

Example:
    The forward of one layer of Qwen3-30B-A3B on 32768 tokens in bf16, kept for training:

    >>> sizes = ExpertsSizes(
    ...     num_tokens=32768, hidden_size=2048, intermediate_size=768, num_experts=128, top_k=8
    ... )
    >>> cost = experts_forward_cost(sizes, keeps_preact=True)
    >>> f"{cost.flops / 1e12:.2f} TFLOP, {cost.bytes / 1e9:.2f} GB"
    '2.47 TFLOP, 5.24 GB'
"""

from piper_kernels.cost.sizes import (
    EXPERT_ID_BYTES,
    GATE_BYTES,
    INDEX_BYTES,
    Cost,
    ExpertsSizes,
)


def permute_cost(sizes: ExpertsSizes) -> Cost:
    """Copy each token to its K rows: T*H in, R*H out, and the row map."""
    moved = (sizes.num_tokens + sizes.num_rows) * sizes.hidden_size * sizes.element_bytes
    return Cost(0, moved + sizes.num_rows * INDEX_BYTES)


def unpermute_cost(sizes: ExpertsSizes) -> Cost:
    """Gate-weighted sum of each token's K rows: R*H in, T*H out, slot map and gates."""
    moved = (sizes.num_tokens + sizes.num_rows) * sizes.hidden_size * sizes.element_bytes
    maps = sizes.num_rows * (INDEX_BYTES + GATE_BYTES)
    return Cost(2 * sizes.num_rows * sizes.hidden_size, moved + maps)


def route_cost(sizes: ExpertsSizes) -> Cost:
    """Router logits and top-k: x and the router's weight in; fp32 logits, ids and gates out."""
    tokens, experts = sizes.num_tokens, sizes.num_experts
    read = (tokens + experts) * sizes.hidden_size * sizes.element_bytes
    written = tokens * experts * GATE_BYTES + sizes.num_rows * (EXPERT_ID_BYTES + GATE_BYTES)
    return Cost(2 * tokens * experts * sizes.hidden_size, read + written)


def grouped_gemm_cost(
    num_rows: int, in_size: int, out_size: int, num_hit_experts: int, element_bytes: int = 2
) -> Cost:
    """``[R, in] x [E, out, in] -> [R, out]``: rows, the weights of experts hit, and the result.

    Example:
        >>> grouped_gemm_cost(num_rows=4, in_size=8, out_size=2, num_hit_experts=3)
        Cost(flops=128, bytes=176)
    """
    elements = num_rows * (in_size + out_size) + num_hit_experts * in_size * out_size
    return Cost(2 * num_rows * in_size * out_size, elements * element_bytes)


def grouped_gemm_wgrad_cost(
    num_rows: int, in_size: int, out_size: int, num_experts: int, element_bytes: int = 2
) -> Cost:
    """``[R, out] x [R, in] -> [E, out, in]``: all E gradients are written, empty ones as zeros."""
    elements = num_rows * (in_size + out_size) + num_experts * in_size * out_size
    return Cost(2 * num_rows * in_size * out_size, elements * element_bytes)


def _gate_up_cost(sizes: ExpertsSizes, *, keeps_preact: bool, writes_act: bool) -> Cost:
    """The first projection with its rows gathered on load and the activation in its epilogue."""
    tokens, rows = sizes.num_tokens, sizes.num_rows
    hidden, width = sizes.hidden_size, sizes.preact_size
    elements = tokens * hidden + sizes.hit_experts * width * hidden
    elements += rows * width * keeps_preact + rows * sizes.intermediate_size * writes_act
    return Cost(2 * rows * width * hidden, elements * sizes.element_bytes + rows * INDEX_BYTES)


def experts_forward_launches(sizes: ExpertsSizes, *, keeps_preact: bool) -> dict[str, Cost]:
    """The fused forward, launch by launch (facts of the plan: gather on load, no R*H input copy).

    Args:
        sizes: T, H, I, E, K, dtype width.
        keeps_preact: training with ``save="preact"``; inference and ``save="x"`` write none.

    Returns:
        ``gate_up`` (gather, GEMM, activation), ``down`` (GEMM), ``combine`` (weighted sum over K).
    """
    return {
        "gate_up": _gate_up_cost(sizes, keeps_preact=keeps_preact, writes_act=True),
        "down": grouped_gemm_cost(
            sizes.num_rows,
            sizes.intermediate_size,
            sizes.hidden_size,
            sizes.hit_experts,
            sizes.element_bytes,
        ),
        "combine": unpermute_cost(sizes),
    }


def experts_backward_launches(
    sizes: ExpertsSizes,
    *,
    has_preact: bool = True,
    needs_x: bool = True,
    needs_weights: bool = True,
) -> dict[str, Cost]:
    """The fused backward, launch by launch; the gates' gradient costs no launch of its own.

    Args:
        sizes: T, H, I, E, K, dtype width.
        has_preact: ``False`` (``save="x"``) computes the pre-activation anew first.
        needs_x: whether x wants a gradient.
        needs_weights: whether the expert weights want one; ``False`` for frozen experts.

    Returns:
        ``gate_up`` if recomputed, ``grad_preact``, then ``grad_down``, ``grad_gate_up`` (weights),
        ``grad_rows`` and ``grad_x``, as far as they are needed.
    """
    tokens, rows, element = sizes.num_tokens, sizes.num_rows, sizes.element_bytes
    hidden, inter, width = sizes.hidden_size, sizes.intermediate_size, sizes.preact_size
    launches: dict[str, Cost] = {}
    if not has_preact:
        launches["gate_up"] = _gate_up_cost(sizes, keeps_preact=True, writes_act=False)
    # grad_y and W_down in, pre-activation in and its gradient out; the weighted activation, which
    # grad_down needs, is written on the way
    elements = tokens * hidden + sizes.hit_experts * hidden * inter
    elements += rows * (2 * width + inter * needs_weights)
    maps = rows * (INDEX_BYTES + 2 * GATE_BYTES)
    launches["grad_preact"] = Cost(2 * rows * hidden * inter, elements * element + maps)
    if needs_weights:
        launches["grad_down"] = _gathered_wgrad_cost(sizes, gathered=hidden, dense=inter)
        launches["grad_gate_up"] = _gathered_wgrad_cost(sizes, gathered=hidden, dense=width)
    if needs_x:
        launches["grad_rows"] = grouped_gemm_cost(rows, width, hidden, sizes.hit_experts, element)
        moved = (rows + tokens) * hidden * element
        launches["grad_x"] = Cost(rows * hidden, moved + rows * INDEX_BYTES)
    return launches


def _gathered_wgrad_cost(sizes: ExpertsSizes, *, gathered: int, dense: int) -> Cost:
    """A weight gradient one operand of which is gathered by token: that one is T rows, not R."""
    elements = sizes.num_tokens * gathered + sizes.num_rows * dense
    elements += sizes.num_experts * gathered * dense
    moved = elements * sizes.element_bytes + sizes.num_rows * INDEX_BYTES
    return Cost(2 * sizes.num_rows * gathered * dense, moved)


def experts_forward_cost(sizes: ExpertsSizes, *, keeps_preact: bool) -> Cost:
    """Sum of :func:`experts_forward_launches`."""
    return sum(experts_forward_launches(sizes, keeps_preact=keeps_preact).values(), Cost(0, 0))


def experts_backward_cost(
    sizes: ExpertsSizes,
    *,
    has_preact: bool = True,
    needs_x: bool = True,
    needs_weights: bool = True,
) -> Cost:
    """Sum of :func:`experts_backward_launches`.

    Example:
        >>> sizes = ExpertsSizes(
        ...     num_tokens=32768, hidden_size=2048, intermediate_size=768, num_experts=128, top_k=8
        ... )
        >>> f"{experts_backward_cost(sizes).bytes / 1e9:.2f} GB"
        '9.13 GB'
    """
    launches = experts_backward_launches(
        sizes, has_preact=has_preact, needs_x=needs_x, needs_weights=needs_weights
    )
    return sum(launches.values(), Cost(0, 0))
