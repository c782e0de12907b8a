"""Seconds of one decoder layer for one microbatch on one rank, term by term.

Each term is named, so that ``piper plan --explain`` can show what a stage spends its time on. All
products run in 16 bit. Tensor parallelism cuts products and, with sequence parallelism, also the
element-wise work between them.

Pure: no torch, no process group. Letters: T tokens of the microbatch, H hidden_size, E experts, L
local experts, K top_k, R = T * K rows.
"""

import math
from dataclasses import dataclass, field

from piper_kernels.config import Save
from piper_kernels.pipeline.collective_time import Group, all_reduce_s
from piper_kernels.pipeline.device_time import attention_s, gemm_time, traffic_s
from piper_kernels.pipeline.exchange_time import ExchangePrices, ExchangeTime
from piper_kernels.pipeline.layer_work import LayerWork
from piper_kernels.pipeline.plan import Checkpointing
from piper_kernels.pipeline.platform import Device
from piper_kernels.pipeline.timeline import PassTime

Terms = dict[str, float]


@dataclass(frozen=True, kw_only=True, slots=True)
class LayerSetting:
    """How a layer runs.

    Attributes:
        microbatch_size: sequences.
        seq_len: tokens of each.
        ep_size: ranks of the expert group.
        tp_size: ranks that share each token.
        world_size: of the job.
        checkpointing: which activations are recomputed: nothing, the attention square, the layer.
        experts_save: what the experts keep.
        is_attention_fused: whether attention keeps its square on the chip.
        is_sequence_parallel: whether tensor parallelism also cuts element-wise work.
    """

    microbatch_size: int
    seq_len: int
    ep_size: int = 1
    tp_size: int = 1
    world_size: int = 1
    checkpointing: Checkpointing = "none"
    experts_save: Save = "preact"
    is_attention_fused: bool = True
    is_sequence_parallel: bool = True

    @property
    def num_tokens(self) -> int:
        """T."""
        return self.microbatch_size * self.seq_len


@dataclass(frozen=True, kw_only=True, slots=True)
class LayerTime:
    """A layer's terms in seconds.

    Attributes:
        forward: of the forward, without the exchange.
        backward_input: of the input's gradient.
        backward_weight: of the weights' gradients.
        recompute: of what checkpointing computes again in the backward.
        exchange: of tokens, once; ``None`` where nothing is exchanged.
        is_exchange_recomputed: whether the backward exchanges the forward's tokens again.
    """

    forward: Terms
    backward_input: Terms
    backward_weight: Terms
    recompute: Terms = field(default_factory=dict)
    exchange: ExchangeTime | None = None
    is_exchange_recomputed: bool = False

    @property
    def exchange_s(self) -> float:
        """What the exchange of one direction adds."""
        return self.exchange.visible_s if self.exchange else 0.0

    def passes(self) -> tuple[PassTime, PassTime, PassTime]:
        """Forward, gradient of the input, gradient of the weights."""
        times = 1 + self.is_exchange_recomputed
        inputs = sum(self.backward_input.values()) + sum(self.recompute.values())
        return (
            PassTime(compute_s=sum(self.forward.values()), exchange_s=self.exchange_s),
            PassTime(compute_s=inputs, exchange_s=times * self.exchange_s),
            PassTime(compute_s=sum(self.backward_weight.values())),
        )


def layer_time(layer: LayerWork, setting: LayerSetting, prices: ExchangePrices) -> LayerTime:
    """Price a layer.

    Args:
        layer: its sizes.
        setting: how it runs.
        prices: of exchanges on the platform.
    """
    device = prices.platform.device
    forward, inputs, weights = _attention(device, layer, setting)
    attention_core = forward["attention"]
    for part in (_elementwise, _dense, _router, _experts):
        more = part(device, layer, setting, prices)
        for terms, new in zip((forward, inputs, weights), more, strict=True):
            terms |= new
    _add_collectives(layer, setting, prices, forward, inputs)
    recompute: Terms = {}
    if setting.checkpointing == "full":
        recompute = {f"{name} again": seconds for name, seconds in forward.items()}
    elif setting.checkpointing == "selective" and not setting.is_attention_fused:
        recompute = {"attention again": attention_core}
    exchange = None
    if setting.ep_size > 1 and layer.num_experts:
        exchange = prices.price(
            layer,
            ep_size=setting.ep_size,
            tp_size=setting.tp_size,
            num_tokens=setting.num_tokens,
            expert_s=forward["experts gate_up"] + forward["experts down"],
        )
    return LayerTime(
        forward=forward,
        backward_input=inputs,
        backward_weight=weights,
        recompute=recompute,
        exchange=exchange,
        is_exchange_recomputed=setting.checkpointing == "full",
    )


def _cut(size: int, parts: int) -> int:
    return math.ceil(size / parts)


def _product(device: Device, name: str, rows: int, depth: int, columns: int) -> tuple[Terms, ...]:
    """Forward and both gradients of one dense product, times for each."""
    return (
        {name: gemm_time(device, rows, columns, depth).seconds},
        {name: gemm_time(device, rows, depth, columns).seconds},
        {name: gemm_time(device, columns, depth, rows).seconds},
    )


def _merge(parts: list[tuple[Terms, ...]], name: str) -> tuple[Terms, Terms, Terms]:
    """The same name for several products: their sums."""
    first, second, third = (sum(sum(p[i].values()) for p in parts) for i in range(3))
    return {name: first}, {name: second}, {name: third}


def _attention(
    device: Device, layer: LayerWork, setting: LayerSetting
) -> tuple[Terms, Terms, Terms]:
    """Projections, cut over tp but for those that every rank computes whole; then the square."""
    attention, tp, rows = layer.attention, setting.tp_size, setting.num_tokens
    products = []
    for depth, columns in attention.projections:
        # what comes from H is cut by columns, what goes back to H by depth
        if columns == layer.hidden_size:
            products.append(_product(device, "", rows, _cut(depth, tp), columns))
        else:
            products.append(_product(device, "", rows, depth, _cut(columns, tp)))
    products += [_product(device, "", rows, d, c) for d, c in attention.whole_projections]
    terms = _merge(products, "attention projections")
    core = attention_s(
        device,
        num_sequences=setting.microbatch_size,
        seq_len=setting.seq_len,
        num_heads=attention.num_heads / tp,
        qk_dim=attention.qk_dim,
        v_dim=attention.v_dim,
        is_fused=setting.is_attention_fused,
    )
    terms[0]["attention"] = core
    # fused: five products instead of two, as the scores are computed again; else four
    terms[1]["attention"] = core * (2.5 if setting.is_attention_fused else 2.0)
    return terms


def _elementwise(
    device: Device, layer: LayerWork, setting: LayerSetting, prices: ExchangePrices
) -> tuple[Terms, Terms, Terms]:
    """Two norms and two residual sums: 2 * (2 + 3) passes over T * H forward, 2 * (3 + 3) back."""
    share = setting.tp_size if setting.is_sequence_parallel else 1
    passes = 2.0 * setting.num_tokens * layer.hidden_size / share
    return (
        {"norms and residuals": traffic_s(device, 10 * passes, num_launches=4)},
        {"norms and residuals": traffic_s(device, 12 * passes, num_launches=4)},
        {},
    )


def _dense(
    device: Device, layer: LayerWork, setting: LayerSetting, prices: ExchangePrices
) -> tuple[Terms, Terms, Terms]:
    """The network that every token passes, and its activation."""
    if not layer.dense_size:
        return {}, {}, {}
    rows, width = setting.num_tokens, _cut(layer.dense_size, setting.tp_size)
    into = (layer.num_matrices - 1) * width
    terms = _merge(
        [
            _product(device, "", rows, layer.hidden_size, into),
            _product(device, "", rows, width, layer.hidden_size),
        ],
        "dense network",
    )
    terms[0]["activation"] = traffic_s(device, 2.0 * rows * (into + width))
    terms[1]["activation"] = traffic_s(device, 2.0 * rows * (2 * into + width))
    return terms


def _router(
    device: Device, layer: LayerWork, setting: LayerSetting, prices: ExchangePrices
) -> tuple[Terms, Terms, Terms]:
    """Logits of T x E, then about four passes over them in fp32."""
    if not layer.num_experts:
        return {}, {}, {}
    share = setting.tp_size if setting.is_sequence_parallel else 1
    rows, count = _cut(setting.num_tokens, share), layer.num_experts
    terms = _product(device, "router", rows, layer.hidden_size, count)
    between = traffic_s(device, 16.0 * rows * count, num_launches=4)
    terms[0]["router"] += between
    terms[1]["router"] += between
    return terms[0], terms[1], terms[2]


def _experts(
    device: Device, layer: LayerWork, setting: LayerSetting, prices: ExchangePrices
) -> tuple[Terms, Terms, Terms]:
    """Grouped products of the busiest rank, and the moves of rows around them."""
    if not layer.num_experts:
        return {}, {}, {}
    hidden, tp = layer.hidden_size, setting.tp_size
    width = _cut(layer.expert_size, tp)
    into = (layer.num_matrices - 1) * width
    num_local = _cut(layer.num_experts, setting.ep_size)
    rows = setting.num_tokens * layer.top_k * prices.imbalance(layer, setting.ep_size)
    # an expert that is hit has a row at least
    each = max(rows / num_local, 1.0)
    count = min(float(num_local), rows)

    def grouped(m: float, columns: int, depth: int) -> float:
        return gemm_time(device, m, columns, depth, count).seconds

    depth = math.ceil(each)
    moved = 2.0 * hidden * (setting.num_tokens + rows)
    # rows are packed for the exchange and sorted behind it; alone on a rank they are gathered
    packed = 2.0 * hidden * rows * (4 if setting.ep_size > 1 else 0)
    gate_up = grouped(each, into, hidden)
    forward = {
        "experts gate_up": gate_up,
        "experts down": grouped(each, hidden, width),
        "experts moves": traffic_s(device, moved + packed, num_launches=2),
    }
    inputs = {
        "experts down": grouped(each, width, hidden),
        "experts gate_up": grouped(each, hidden, into),
        "experts moves": traffic_s(device, moved + packed, num_launches=2),
    }
    if setting.experts_save == "x":
        inputs["experts gate_up again"] = gate_up
    weights = {
        "experts down": grouped(hidden, width, depth),
        "experts gate_up": grouped(into, hidden, depth),
    }
    return forward, inputs, weights


def _add_collectives(
    layer: LayerWork,
    setting: LayerSetting,
    prices: ExchangePrices,
    forward: Terms,
    inputs: Terms,
) -> None:
    """Tensor parallelism sums T x H behind attention and behind the network, in both directions.

    With sequence parallelism the sum is a reduce-scatter and an all-gather of the same bytes. The
    experts' sums are part of their exchange where there is one.
    """
    if setting.tp_size == 1:
        return
    group = Group(
        size=setting.tp_size, stride=1, world_size=max(setting.world_size, setting.tp_size)
    )
    num_bytes = 2.0 * setting.num_tokens * layer.hidden_size
    has_network = layer.dense_size > 0 or (layer.num_experts > 0 and setting.ep_size == 1)
    seconds = (1 + has_network) * all_reduce_s(prices.platform, group, num_bytes)
    forward["tensor parallel"] = seconds
    inputs["tensor parallel"] = seconds
