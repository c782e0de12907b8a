"""Seconds of one optimizer step: stages from layers, the schedule played out, MFU and cost.

Pure: no torch, no process group. Letters: H hidden_size, M microbatches.
"""

from dataclasses import dataclass

from piper_kernels.errors import PlanError, require
from piper_kernels.pipeline.collective_time import Group, all_reduce_s, send_s
from piper_kernels.pipeline.device_time import gemm_time, traffic_s
from piper_kernels.pipeline.exchange_time import ExchangePrices
from piper_kernels.pipeline.layer_kinds import LayerKinds, StageLayers
from piper_kernels.pipeline.layer_time import LayerSetting, LayerTime, Terms, layer_time
from piper_kernels.pipeline.memory_settings import OptimizerKind
from piper_kernels.pipeline.model_description import Layer, ModelDescription
from piper_kernels.pipeline.strategy import Strategy
from piper_kernels.pipeline.timeline import (
    PassTime,
    StageTime,
    Timeline,
    simulate,
    step_bound_s,
    step_seconds,
)

# bytes read and written for each parameter by one update: gradient 2, weight 2, master copy 4 + 4,
# and the moments there and back
UPDATE_BYTES: dict[OptimizerKind, int] = {
    "adamw": 28,
    "adamw_8bit": 16,
    "sgd": 12,
    "sgd_momentum": 20,
}


@dataclass(frozen=True, kw_only=True, slots=True)
class StepTime:
    """A predicted step.

    Attributes:
        stages: ``[num_stages]``.
        timeline: of all ranks.
        step_s: of the step.
        tokens_per_s: of the job.
        mfu: model FLOPs over what the GPUs could do.
        cost_per_million_tokens: ``None`` if the platform has no price.
    """

    stages: tuple[StageTime, ...]
    timeline: Timeline
    step_s: float
    tokens_per_s: float
    mfu: float
    cost_per_million_tokens: float | None


def model_flops(model: ModelDescription, num_tokens: float, seq_len: int) -> float:
    """FLOPs of a training step, recomputation not counted.

    6 for each token and active weight (forward 2, backward 4), the head included, the embedding
    not, since it is looked up; and three times the causal half of the attention square.

    Args:
        model: a decoder.
        num_tokens: of the step.
        seq_len: of its sequences.
    """
    weights = sum(model.layer_parameters(i).active for i in range(model.num_layers))
    weights += model.vocab_size * model.hidden_size
    attentions = [layer.attention for layer in model.layers]
    square = sum(seq_len * float(a.num_heads * (a.qk_dim + a.v_dim)) for a in attentions)
    return num_tokens * (6.0 * weights + 3.0 * square)


class StepModel:
    """Predicts steps of one model on one platform; each layer setting is priced once.

    Args:
        model: to train.
        prices: of exchanges on the platform to run on.
    """

    def __init__(self, model: ModelDescription, prices: ExchangePrices) -> None:
        self.model = model
        self.prices = prices
        self.platform = prices.platform
        self._times: dict[tuple[object, ...], LayerTime] = {}
        self._stages: dict[tuple[object, ...], dict[tuple[object, ...], StageTime]] = {}
        self.layers = LayerKinds(model)
        parameters = [model.layer_parameters(i) for i in range(model.num_layers)]
        self._replicated = _prefix_sums([each.replicated for each in parameters])
        self._experts = _prefix_sums([each.experts for each in parameters])

    def predict(self, strategy: Strategy) -> StepTime:
        """Play a step out.

        Raises:
            PlanError: the layers are not the model's, or the schedule cannot run.
        """
        stages = self.stage_times(strategy)
        timeline = simulate(strategy.actions, stages)
        return self._step_time(strategy, stages, timeline, timeline.step_s)

    def seconds(self, strategy: Strategy) -> float:
        """``predict(strategy).step_s``, quicker."""
        return step_seconds(strategy.actions, self.stage_times(strategy))

    def bound_s(self, strategy: Strategy) -> float:
        """Seconds that the step cannot go below, without playing it out."""
        stages = self.stage_times(strategy)
        return step_bound_s(strategy.schedule, strategy.pp, strategy.num_microbatches, stages)

    def coarse_bound_s(self, strategy: Strategy) -> float:
        """A lower bound that is quick: the layers' computation, shared evenly by all ranks."""
        counts = self.layers.stage(0, self.model.num_layers).counts
        passes = [
            self._kind_time(k, strategy, has_exchange=False).passes() for k in range(len(counts))
        ]
        each = [sum(one.seconds for one in three) for three in passes]
        work = sum(n * seconds for n, seconds in zip(counts, each, strict=True))
        return strategy.num_microbatches * work / strategy.pp

    def layer_time(self, layer: Layer, strategy: Strategy) -> LayerTime:
        """One layer under a strategy."""
        return self._kind_time(self.layers.kinds.index(layer), strategy)

    def _kind_time(self, kind: int, strategy: Strategy, *, has_exchange: bool = True) -> LayerTime:
        """One layer of a kind; hashing a layer each time would take longer than the look-up."""
        s = strategy
        sizes = (kind, s.microbatch_size, s.seq_len, s.ep, s.tp, s.checkpointing, s.experts_save)
        key = (*sizes, s.is_attention_fused, s.is_sequence_parallel, has_exchange)
        if key not in self._times:
            setting = LayerSetting(
                microbatch_size=s.microbatch_size,
                seq_len=s.seq_len,
                ep_size=s.ep,
                tp_size=s.tp,
                checkpointing=s.checkpointing,
                experts_save=s.experts_save,
                is_attention_fused=s.is_attention_fused,
                is_sequence_parallel=s.is_sequence_parallel,
            )
            layer, hidden_size = self.layers.kinds[kind], self.model.hidden_size
            self._times[key] = layer_time(
                layer, hidden_size, setting, self.prices, has_exchange=has_exchange
            )
        return self._times[key]

    def layer_seconds(self, strategy: Strategy) -> list[float]:
        """``[num_layers]`` forward and backward of each layer."""
        seconds = [
            sum(p.seconds for p in self._kind_time(kind, strategy).passes())
            for kind in range(len(self.layers.kinds))
        ]
        return [seconds[kind] for kind in self.layers.numbers]

    def stage_times(self, strategy: Strategy) -> list[StageTime]:
        """``[num_stages]`` seconds of each stage."""
        given, num_layers = sum(strategy.layers_per_stage), self.model.num_layers
        requirement = f"be the model's {num_layers} layers in all"
        fits = given == num_layers
        require(fits, "plan", "layers_per_stage", requirement, given, error=PlanError)
        count = len(self.layers.kinds)
        kinds = [self._kind_time(kind, strategy).passes() for kind in range(count)]
        s = strategy
        mesh = (s.pp, s.dp, s.ep, s.tp, s.microbatch_size, s.seq_len, s.checkpointing)
        rest = (s.experts_save, s.optimizer, s.is_optimizer_sharded, s.is_attention_fused)
        # schedules and numbers of microbatches share their stages
        seen = self._stages.setdefault((mesh, rest, s.is_sequence_parallel), {})
        stages = []
        for layers in self.layers.stages(strategy.layers_per_stage):
            # stages of the same layers are equal: most are
            key = (layers.counts, layers.is_first, layers.is_last)
            if key not in seen:
                seen[key] = self._stage(strategy, kinds, layers)
            stages.append(seen[key])
        return stages

    def _stage(
        self,
        strategy: Strategy,
        kinds: list[tuple[PassTime, PassTime, PassTime]],
        layers: StageLayers,
    ) -> StageTime:
        """Some layers, with the embedding before or the head behind them."""
        compute, exchange = [0.0, 0.0, 0.0], [0.0, 0.0, 0.0]
        for passes, count in zip(kinds, layers.counts, strict=True):
            for i, each in enumerate(passes):
                compute[i] += count * each.compute_s
                exchange[i] += count * each.exchange_s
        if layers.is_first:
            lookup = self.embedding_s(strategy)
            compute[0] += lookup
            compute[2] += lookup
        if layers.is_last:
            for i, terms in enumerate(self.head_terms(strategy)):
                compute[i] += sum(terms.values())
        forward, inputs, weights = (
            PassTime(compute_s=c, exchange_s=e) for c, e in zip(compute, exchange, strict=True)
        )
        return StageTime(
            forward=forward,
            backward_input=inputs,
            backward_weight=weights,
            send_s=0.0 if layers.is_last else self.boundary_s(strategy),
            finish_s=sum(self.finish_terms(strategy, layers).values()),
        )

    def embedding_s(self, strategy: Strategy) -> float:
        """Look up, or scatter back, T rows of H."""
        tokens = strategy.microbatch_size * strategy.seq_len
        return traffic_s(self.platform.device, 4.0 * tokens * self.model.hidden_size)

    def head_terms(self, strategy: Strategy) -> tuple[Terms, Terms, Terms]:
        """Logits over the vocabulary, and the loss: three passes in fp32, two on the way back."""
        device, hidden = self.platform.device, self.model.hidden_size
        rows = strategy.microbatch_size * strategy.seq_len
        columns = -(-self.model.vocab_size // strategy.tp)
        logits = 4.0 * rows * columns
        return (
            {
                "head": gemm_time(device, rows, columns, hidden).seconds,
                "loss": traffic_s(device, 3 * logits, num_launches=3),
            },
            {
                "head": gemm_time(device, rows, hidden, columns).seconds,
                "loss": traffic_s(device, 2 * logits, num_launches=2),
            },
            {"head": gemm_time(device, columns, hidden, rows).seconds},
        )

    def boundary_s(self, strategy: Strategy) -> float:
        """Seconds from one stage to the next: T * H in 16 bit, cut over tensor parallelism."""
        tokens = strategy.microbatch_size * strategy.seq_len
        num_bytes = 2.0 * tokens * self.model.hidden_size / strategy.tp
        return send_s(self.platform, strategy.stage_width, strategy.world_size, num_bytes)

    def finish_terms(self, strategy: Strategy, layers: StageLayers) -> Terms:
        """What a stage does once a step: reduce gradients in 16 bit, update its parameters."""
        is_first, is_last = layers.is_first, layers.is_last
        replicated = self._replicated[layers.end] - self._replicated[layers.first]
        experts = self._experts[layers.end] - self._experts[layers.first]
        model, world_size = self.model, strategy.world_size
        vocabulary = model.vocab_size * model.hidden_size
        replicated += vocabulary * (is_first + is_last)
        dense, local = replicated / strategy.tp, experts / (strategy.tp * strategy.ep)
        replicas = strategy.dp * strategy.ep
        all_ranks = Group(size=replicas, stride=strategy.tp, world_size=world_size)
        copies = Group(size=strategy.dp, stride=strategy.ep * strategy.tp, world_size=world_size)
        terms = {
            "reduce dense gradients": all_reduce_s(self.platform, all_ranks, 2 * dense),
            "reduce expert gradients": all_reduce_s(self.platform, copies, 2 * local),
        }
        if model.has_tied_embeddings and strategy.pp > 1 and (is_first or is_last):
            stride = (strategy.pp - 1) * strategy.stage_width
            pair = Group(size=2, stride=stride, world_size=world_size)
            shared = 2.0 * vocabulary / strategy.tp
            terms["reduce tied embedding"] = all_reduce_s(self.platform, pair, shared)
        if strategy.is_optimizer_sharded:
            dense, local = dense / replicas, local / strategy.dp
        update = UPDATE_BYTES[strategy.optimizer] * (dense + local)
        terms["optimizer"] = traffic_s(self.platform.device, update)
        return terms

    def _step_time(
        self, strategy: Strategy, stages: list[StageTime], timeline: Timeline, step_s: float
    ) -> StepTime:
        tokens = strategy.tokens_per_step
        flops = model_flops(self.model, tokens, strategy.seq_len)
        peak = self.platform.device.peak_flops_per_s * strategy.world_size
        price = self.platform.price_per_gpu_hour
        cost = None
        if price is not None:
            cost = price * strategy.world_size * step_s / 3600 / tokens * 1e6
        return StepTime(
            stages=tuple(stages),
            timeline=timeline,
            step_s=step_s,
            tokens_per_s=tokens / step_s,
            mfu=flops / (peak * step_s),
            cost_per_million_tokens=cost,
        )


def _prefix_sums(values: list[int]) -> list[int]:
    sums = [0]
    for value in values:
        sums.append(sums[-1] + value)
    return sums
