"""Peak memory of every pipeline rank under a strategy, quick enough for a search.

What is alive together follows from the schedule: for each rank the states that could be its peak
are found once, and then weighed with the bytes of its stages.

Pure: no torch, no process group. Letters: P ranks, M microbatches.
"""

import functools
from dataclasses import dataclass

from piper_kernels.pipeline.exchange_time import ExchangePrices
from piper_kernels.pipeline.layer_kinds import LayerKinds
from piper_kernels.pipeline.memory_settings import (
    ActivationRules,
    MemorySettings,
    OptimizerRules,
)
from piper_kernels.pipeline.model_description import ModelDescription
from piper_kernels.pipeline.schedule import ScheduleName, make_schedule, stage_owners
from piper_kernels.pipeline.schedule_actions import Step
from piper_kernels.pipeline.schedule_orders import num_rounds
from piper_kernels.pipeline.stage_memory import StageMemory, stage_memory
from piper_kernels.pipeline.strategy import Strategy


@dataclass(frozen=True, slots=True)
class LiveState:
    """A moment of one rank that could be its peak.

    Attributes:
        counts: live microbatches of each of the rank's stages.
        acting: which of these stages works.
        is_forward: forward, or a backward with all that it needs besides.
    """

    counts: tuple[int, ...]
    acting: int
    is_forward: bool


def live_states(
    name: ScheduleName, num_ranks: int, num_microbatches: int, num_local: int
) -> tuple[tuple[LiveState, ...], ...]:
    """For each rank the moments that could be its peak.

    Beyond 4 P microbatches nothing new happens (but under GPipe, which is known in closed form), so
    no longer schedule is looked at.

    Example:
        >>> [state.counts for state in live_states("1f1b", 2, 100, 1)[0] if not state.is_forward]
        [(2,)]
    """
    if name == "gpipe":
        both = tuple(LiveState((num_microbatches,), 0, forward) for forward in (True, False))
        return (both,) * num_ranks
    is_regular = name != "interleaved_1f1b" or num_microbatches % num_ranks == 0
    count = min(num_microbatches, 4 * num_ranks) if is_regular else num_microbatches
    assert num_microbatches % num_rounds(num_ranks, num_microbatches) == 0 or is_regular
    return _states_of(name, num_ranks, count, num_local)


@functools.lru_cache(maxsize=256)
def _states_of(
    name: ScheduleName, num_ranks: int, num_microbatches: int, num_local: int
) -> tuple[tuple[LiveState, ...], ...]:
    schedule = make_schedule(name, num_ranks, num_microbatches, num_local)
    return tuple(
        _largest(steps, schedule.stages_of(rank)) for rank, steps in enumerate(schedule.steps)
    )


def _largest(steps: tuple[Step, ...], stages: tuple[int, ...]) -> tuple[LiveState, ...]:
    """States of one rank that no other state exceeds in every count."""
    counts, seen = [0] * len(stages), set()
    for action in (action for step in steps for action in step.actions):
        place = stages.index(action.stage)
        if action.kind == "F":
            counts[place] += 1
        seen.add(LiveState(tuple(counts), place, action.kind == "F"))
        if action.kind in ("B", "W"):
            counts[place] -= 1

    def exceeds(a: LiveState, b: LiveState) -> bool:
        alike = (a.acting, a.is_forward) == (b.acting, b.is_forward)
        return a != b and alike and all(x >= y for x, y in zip(a.counts, b.counts, strict=True))

    return tuple(one for one in seen if not any(exceeds(other, one) for other in seen))


class RankMemory:
    """Predicts the memory of strategies of one model; equal stages are priced once.

    Args:
        model: to train.
        prices: know how uneven the experts' rows are.
    """

    def __init__(self, model: ModelDescription, prices: ExchangePrices) -> None:
        self.model = model
        self.prices = prices
        self._layers = LayerKinds(model)
        self._stages: dict[object, dict[object, StageMemory]] = {}

    def settings(self, strategy: Strategy) -> MemorySettings:
        """The memory model's settings of a strategy."""
        experts = next((one.experts for one in self.model.layers if one.experts), None)
        imbalance = self.prices.imbalance(experts, strategy.ep) if experts else 1.0
        return MemorySettings(
            seq_len=strategy.seq_len,
            microbatch_size=strategy.microbatch_size,
            dp=strategy.dp,
            ep=strategy.ep,
            tp=strategy.tp,
            checkpointing=strategy.checkpointing,
            activations=ActivationRules(
                attention="flash" if strategy.is_attention_fused else "half",
                is_sequence_parallel=strategy.is_sequence_parallel,
                save=strategy.experts_save,
                imbalance=max(imbalance, 1.0),
            ),
            optimizer=OptimizerRules(
                kind=strategy.optimizer, is_sharded=strategy.is_optimizer_sharded
            ),
        )

    def stages(self, strategy: Strategy) -> list[StageMemory]:
        """``[num_stages]`` memory of each stage on one of its ranks."""
        s, found = strategy, []
        sizes = (s.microbatch_size, s.seq_len, s.dp, s.ep, s.tp, s.checkpointing, s.experts_save)
        rest = (s.optimizer, s.is_optimizer_sharded, s.is_attention_fused, s.is_sequence_parallel)
        # hashing settings each time would take longer than the look-up
        known = self._stages.setdefault((sizes, rest), {})
        for layers in self._layers.stages(strategy.layers_per_stage):
            key = (layers.counts, layers.is_first, layers.is_last)
            if key not in known:
                own = range(layers.first, layers.end)
                known[key] = stage_memory(self.model, own, self.settings(strategy))
            found.append(known[key])
        return found

    def live(self, strategy: Strategy) -> tuple[int, ...]:
        """``[pp]`` most microbatches that each pipeline rank keeps, its stages together."""
        num_local = len(strategy.layers_per_stage) // strategy.pp
        count = strategy.num_microbatches
        states = live_states(strategy.schedule, strategy.pp, count, num_local)
        return tuple(max(sum(one.counts) for one in rank) for rank in states)

    def peak_bytes(self, strategy: Strategy) -> tuple[float, ...]:
        """``[pp]`` peak of each pipeline rank.

        Raises:
            PlanError: layers that are not the model's, or a schedule that cannot run.
        """
        stages, pp = self.stages(strategy), strategy.pp
        num_local = len(stages) // pp
        states = live_states(strategy.schedule, pp, strategy.num_microbatches, num_local)
        owners = _owned(strategy.schedule, pp, num_local)
        peaks = []
        for rank in range(pp):
            mine = [stages[stage] for stage in owners[rank]]
            fixed = sum(one.static_bytes + one.communication_bytes for one in mine)
            peaks.append(fixed + max(_state_bytes(state, mine) for state in states[rank]))
        return tuple(peaks)


def _state_bytes(state: LiveState, stages: list[StageMemory]) -> float:
    kept = sum(n * one.activation_bytes for n, one in zip(state.counts, stages, strict=True))
    acting = stages[state.acting]
    return kept + (acting.workspace_bytes if state.is_forward else acting.transient_bytes)


@functools.lru_cache(maxsize=64)
def _owned(name: ScheduleName, num_ranks: int, num_local: int) -> tuple[tuple[int, ...], ...]:
    """For each rank its stages."""
    owners = stage_owners(name, num_ranks, num_local)
    return tuple(
        tuple(s for s, owner in enumerate(owners) if owner == rank) for rank in range(num_ranks)
    )
