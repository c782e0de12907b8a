"""Seconds of one decoder layer for one microbatch on one rank, term by term.

Each term is named, so that ``piper plan --explain`` can show what a stage spends its time on. All
products run in 16 bit. Tensor parallelism cuts products and, with sequence parallelism, also the
element-wise work between them. Biases and inner norms are left out: they are less than a percent.

Pure: no torch, no process group. Letters: T tokens of the microbatch, H hidden_size, E experts, L
local experts, K top_k, R = T * K rows.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass, field

from piper_kernels.config import Save
from piper_kernels.pipeline.collective_time import Group, all_reduce_s, reduce_scatter_s
from piper_kernels.pipeline.device_time import attention_s, gemm_time, traffic_s
from piper_kernels.pipeline.exchange_time import ExchangePrices, ExchangeTime
from piper_kernels.pipeline.memory_settings import Checkpointing
from piper_kernels.pipeline.model_description import Experts, FeedForward, Layer
from piper_kernels.pipeline.platform import Device
from piper_kernels.pipeline.timeline import PassTime

Terms = dict[str, float]
ThreeTerms = tuple[Terms, Terms, Terms]


@dataclass(frozen=True, kw_only=True, slots=True)
class LayerSetting:
    """How a layer runs.

    Attributes:
        microbatch_size: sequences.
        seq_len: tokens of each.
        ep_size: ranks of the expert group.
        tp_size: ranks that share each token.
        checkpointing: which activations are recomputed: nothing, the attention square, the layer.
        experts_save: what the experts keep.
        is_attention_fused: whether attention keeps its square on the chip.
        is_sequence_parallel: whether tensor parallelism also cuts element-wise work.
    """

    microbatch_size: int
    seq_len: int
    ep_size: int = 1
    tp_size: int = 1
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


def layer_time(
    layer: Layer,
    hidden_size: int,
    setting: LayerSetting,
    prices: ExchangePrices,
    *,
    has_exchange: bool = True,
) -> LayerTime:
    """Price a layer.

    Args:
        layer: its sizes.
        hidden_size: H.
        setting: how it runs.
        prices: of exchanges on the platform.
        has_exchange: ``False`` leaves the exchange out, which takes longest to price.
    """
    work = _Work(layer=layer, hidden_size=hidden_size, setting=setting, prices=prices)
    parts = [work.attention(), work.elementwise(), work.network(), work.collectives()]
    forward, inputs, weights = (
        {name: seconds for part in parts for name, seconds in part[i].items()} for i in range(3)
    )
    recompute: Terms = {}
    if setting.checkpointing == "full":
        recompute = {f"{name} again": seconds for name, seconds in forward.items()}
    elif setting.checkpointing == "selective":
        recompute = {"attention again": forward["attention"]}
    return LayerTime(
        forward=forward,
        backward_input=inputs,
        backward_weight=weights,
        recompute=recompute,
        exchange=work.exchange(forward) if has_exchange else None,
        is_exchange_recomputed=setting.checkpointing == "full",
    )


@dataclass(frozen=True, kw_only=True, slots=True)
class _Work:
    """The parts of one layer; each gives terms of forward, input gradient, weight gradients."""

    layer: Layer
    hidden_size: int
    setting: LayerSetting
    prices: ExchangePrices

    @property
    def device(self) -> Device:
        return self.prices.platform.device

    @property
    def tokens_between(self) -> int:
        """Tokens whose element-wise work this rank does."""
        setting = self.setting
        share = setting.tp_size if setting.is_sequence_parallel else 1
        return _cut(setting.num_tokens, share)

    def attention(self) -> ThreeTerms:
        """Projections, cut over tp but for those that every rank computes whole; the square."""
        attention, setting = self.layer.attention, self.setting
        products = []
        for one in attention.projections(self.hidden_size):
            depth = _cut(one.in_size, setting.tp_size if one.cut == "in" else 1)
            columns = _cut(one.out_size, setting.tp_size if one.cut == "out" else 1)
            products.append((depth, columns))
        terms = self._products("attention projections", products)
        core = attention_s(
            self.device,
            num_sequences=setting.microbatch_size,
            seq_len=setting.seq_len,
            num_heads=attention.num_heads / setting.tp_size,
            qk_dim=attention.qk_dim,
            v_dim=attention.v_dim,
            is_fused=setting.is_attention_fused,
        )
        terms[0]["attention"] = core
        # fused: five products instead of two, as the scores are computed again; else four
        terms[1]["attention"] = core * (2.5 if setting.is_attention_fused else 2.0)
        return terms

    def elementwise(self) -> ThreeTerms:
        """Two norms and two residual sums: 2 * (2 + 3) passes over T * H, 2 * (3 + 3) back."""
        passes = 2.0 * self.tokens_between * self.hidden_size
        return (
            {"norms and residuals": traffic_s(self.device, 10 * passes, num_launches=4)},
            {"norms and residuals": traffic_s(self.device, 12 * passes, num_launches=4)},
            {},
        )

    def network(self) -> ThreeTerms:
        """The dense network, or router, experts and shared experts."""
        experts = self.layer.experts
        if experts is None:
            assert self.layer.dense is not None
            return self._dense("dense network", self.layer.dense)
        parts = [self._router(experts), self._experts(experts)]
        if experts.shared is not None:
            parts.append(self._dense("shared experts", experts.shared.network))
        first, second, third = (
            {k: v for part in parts for k, v in part[i].items()} for i in (0, 1, 2)
        )
        return first, second, third

    def collectives(self) -> ThreeTerms:
        """Tensor parallelism sums T x H behind attention and behind the network, there and back.

        With sequence parallelism the sum is a reduce-scatter and an all-gather of the same bytes,
        and the backward gathers the inputs again, of which only a part was kept. The sums of
        exchanged experts are part of their exchange.
        """
        setting, experts = self.setting, self.layer.experts
        if setting.tp_size == 1:
            return {}, {}, {}
        # the innermost axis: always inside a node
        group = Group(size=setting.tp_size, stride=1, world_size=setting.tp_size)
        num_bytes = 2.0 * setting.num_tokens * self.hidden_size
        is_exchanged = experts is not None and setting.ep_size > 1 and experts.shared is None
        sums = 1 if is_exchanged else 2
        platform = self.prices.platform
        seconds = sums * all_reduce_s(platform, group, num_bytes)
        again = sums * reduce_scatter_s(platform, group, num_bytes)
        back = seconds + again * setting.is_sequence_parallel
        return {"tensor parallel": seconds}, {"tensor parallel": back}, {}

    def exchange(self, forward: Terms) -> ExchangeTime | None:
        """Of the layer's experts, if there are ranks to exchange with."""
        experts, setting = self.layer.experts, self.setting
        if experts is None or setting.ep_size == 1:
            return None
        return self.prices.price(
            experts,
            hidden_size=self.hidden_size,
            ep_size=setting.ep_size,
            tp_size=setting.tp_size,
            num_tokens=setting.num_tokens,
            expert_s=forward["experts gate_up"] + forward["experts down"],
        )

    def _products(self, name: str, products: Sequence[tuple[int, int]]) -> ThreeTerms:
        """Dense products ``(depth, columns)`` of the microbatch's tokens, and both gradients."""
        rows, seconds = self.setting.num_tokens, [0.0, 0.0, 0.0]
        for depth, columns in products:
            seconds[0] += gemm_time(self.device, rows, columns, depth).seconds
            seconds[1] += gemm_time(self.device, rows, depth, columns).seconds
            seconds[2] += gemm_time(self.device, columns, depth, rows).seconds
        return {name: seconds[0]}, {name: seconds[1]}, {name: seconds[2]}

    def _dense(self, name: str, network: FeedForward) -> ThreeTerms:
        """A network that every token passes, and its activation."""
        rows, width = self.setting.num_tokens, _cut(network.intermediate_size, self.setting.tp_size)
        into = (network.num_matrices - 1) * width
        terms = self._products(name, [(self.hidden_size, into), (width, self.hidden_size)])
        act = f"{name} activation"
        terms[0][act] = traffic_s(self.device, 2.0 * rows * (into + width))
        terms[1][act] = traffic_s(self.device, 2.0 * rows * (2 * into + width))
        return terms

    def _router(self, experts: Experts) -> ThreeTerms:
        """Logits of T x E, then about four passes over them in fp32."""
        rows, count = self.tokens_between, experts.num_experts
        between = traffic_s(self.device, 16.0 * rows * count, num_launches=4)
        hidden = self.hidden_size
        return (
            {"router": gemm_time(self.device, rows, count, hidden).seconds + between},
            {"router": gemm_time(self.device, rows, hidden, count).seconds + between},
            {"router": gemm_time(self.device, count, hidden, rows).seconds},
        )

    def _experts(self, experts: Experts) -> ThreeTerms:
        """Grouped products of the busiest rank, and the moves of rows around them."""
        setting, hidden = self.setting, self.hidden_size
        width = _cut(experts.network.intermediate_size, setting.tp_size)
        into = (experts.network.num_matrices - 1) * width
        num_local = _cut(experts.num_experts, setting.ep_size)
        imbalance = self.prices.imbalance(experts, setting.ep_size)
        rows = setting.num_tokens * experts.top_k * imbalance
        # an expert that is hit has a row at least
        each, count = max(rows / num_local, 1.0), min(float(num_local), rows)

        def grouped(m: float, columns: int, depth: int) -> float:
            return gemm_time(self.device, m, columns, depth, count).seconds

        # rows are packed for the exchange and sorted behind it; alone on a rank they are gathered
        passes = setting.num_tokens + rows * (5 if setting.ep_size > 1 else 1)
        moves = traffic_s(self.device, 2.0 * hidden * passes, num_launches=2)
        gate_up = grouped(each, into, hidden)
        forward = {
            "experts gate_up": gate_up,
            "experts down": grouped(each, hidden, width),
            "experts moves": moves,
        }
        inputs = {
            "experts down": grouped(each, width, hidden),
            "experts gate_up": grouped(each, hidden, into),
            "experts moves": moves,
        }
        if setting.experts_save == "x":
            inputs["experts gate_up again"] = gate_up
        weights = {
            "experts down": grouped(hidden, width, math.ceil(each)),
            "experts gate_up": grouped(into, hidden, math.ceil(each)),
        }
        return forward, inputs, weights


def _cut(size: int, parts: int) -> int:
    return math.ceil(size / parts)
