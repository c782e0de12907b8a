"""The planner: every strategy that can run, those that fit, the fastest of them, and why.

Strategies are first priced by a bound that needs no simulation. They are played out in the order of
their bounds, and only while one could still be among the best or on the Pareto front: the result is
that of playing out all of them.

Pure: no torch, no process group.
"""

import heapq
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from piper_kernels.errors import PlanError
from piper_kernels.pipeline.layer_split import balance_layers
from piper_kernels.pipeline.plan import Exchange, Plan, Predicted
from piper_kernels.pipeline.search_space import SearchSpace, valid_strategies
from piper_kernels.pipeline.step_time import StepModel
from piper_kernels.pipeline.strategy import Strategy

# peak bytes of each pipeline rank, ``[pp]``
PeakBytes = Callable[[Strategy], Sequence[float]]


@dataclass(frozen=True, kw_only=True, slots=True)
class Ranked:
    """A strategy that fits, priced.

    Attributes:
        strategy: how to run.
        step_s: predicted.
        peak_bytes: ``[pp]`` of each pipeline rank.
    """

    strategy: Strategy
    step_s: float
    peak_bytes: tuple[float, ...]

    @property
    def most_bytes(self) -> float:
        """Of the fullest rank."""
        return max(self.peak_bytes)


@dataclass(frozen=True, kw_only=True, slots=True)
class TooLarge:
    """A strategy that does not fit into memory.

    Attributes:
        strategy: how it would run.
        rank: the fullest pipeline rank.
        needed_bytes: there.
        available_bytes: of a GPU.
    """

    strategy: Strategy
    rank: int
    needed_bytes: float
    available_bytes: float


class InfeasiblePlanError(PlanError):
    """No strategy can run: what is violated, by how much, and the nearest change that would fit.

    Attributes:
        reasons: how often each rule excluded something, most frequent first.
        nearest: the strategy closest to fitting, if any can run at all.
    """

    def __init__(
        self, message: str, reasons: Sequence[tuple[str, int]], nearest: TooLarge | None
    ) -> None:
        super().__init__(message)
        self.reasons = tuple(reasons)
        self.nearest = nearest


@dataclass(frozen=True, kw_only=True, slots=True)
class SearchResult:
    """What the search found.

    Attributes:
        best: the fastest that fit, fastest first.
        front: those for which nothing is both smaller and faster, fastest first.
        num_strategies: that can run.
        num_fitting: of them, that fit into memory.
        num_simulated: of them, that had to be played out.
        reasons: how often each rule excluded something, most frequent first.
        nearest: of those that do not fit, the one that lacks least; ``None`` if all fit.
    """

    best: tuple[Ranked, ...]
    front: tuple[Ranked, ...]
    num_strategies: int
    num_fitting: int
    num_simulated: int
    reasons: tuple[tuple[str, int], ...]
    nearest: TooLarge | None


def search(
    steps: StepModel, peak_bytes: PeakBytes, space: SearchSpace, *, num_best: int = 5
) -> SearchResult:
    """Find the fastest strategies that fit.

    Args:
        steps: predicts the step of a strategy.
        peak_bytes: predicts its memory.
        space: of the search.
        num_best: returned at most.

    Raises:
        InfeasiblePlanError: nothing fits, or nothing can run.
        PlanError: the machine description does not reach so many GPUs.
    """
    steps.platform.check_reach(space.num_gpus)
    reasons: Counter[str] = Counter()
    found = _fitting(steps, peak_bytes, space, reasons)
    if not found.fitting:
        raise _infeasible(steps, peak_bytes, space, found, reasons)
    num_fitting = len(found.fitting)
    best, front, num_simulated = _play_out(steps, found.fitting, num_best)
    return SearchResult(
        best=tuple(best),
        front=tuple(front),
        num_strategies=found.num_strategies,
        num_fitting=num_fitting,
        num_simulated=num_simulated,
        reasons=tuple(reasons.most_common()),
        nearest=found.nearest,
    )


def to_plan(steps: StepModel, ranked: Ranked) -> Plan:
    """The plan file of a strategy that was found."""
    step = steps.predict(ranked.strategy)
    predicted = Predicted(
        step_s=step.step_s,
        tokens_per_s=step.tokens_per_s,
        mfu=min(step.mfu, 1.0),
        bubble_share=max(step.timeline.bubble_share, 0.0),
        peak_bytes=tuple(round(size) for size in ranked.peak_bytes),
        cost_per_million_tokens=step.cost_per_million_tokens,
    )
    exchange = exchange_of(steps, ranked.strategy)
    return ranked.strategy.to_plan(steps.model.digest(), exchange, predicted)


def exchange_of(steps: StepModel, strategy: Strategy) -> Exchange:
    """How the strategy's tokens should travel: as the first exchanging layer's traffic says."""
    times = (steps.layer_time(layer, strategy) for layer in dict.fromkeys(steps.model.layers))
    for time in times:
        if time.exchange is not None:
            best = time.exchange.prediction
            return Exchange(algorithm=best.algorithm, num_chunks=best.num_chunks)
    return Exchange()


@dataclass(kw_only=True, slots=True)
class _Found:
    """Strategies that can run, sorted by whether they fit."""

    fitting: list[tuple[float, int, Ranked]]
    nearest: TooLarge | None = None
    num_strategies: int = 0


def _fitting(
    steps: StepModel, peak_bytes: PeakBytes, space: SearchSpace, reasons: Counter[str]
) -> _Found:
    """Check the memory of each strategy; bounds stand in for times."""
    found = _Found(fitting=[])
    available = float(steps.platform.device.usable_bytes)
    for even in valid_strategies(steps.model, steps.platform, space, reasons):
        for strategy in _splits(steps, even):
            found.num_strategies += 1
            peaks = tuple(peak_bytes(strategy))
            most = max(peaks)
            if most <= available:
                bound = steps.bound_s(strategy)
                ranked = Ranked(strategy=strategy, step_s=bound, peak_bytes=peaks)
                found.fitting.append((bound, found.num_strategies, ranked))
                continue
            reasons["memory: the fullest rank exceeds the GPU"] += 1
            if found.nearest is None or most < found.nearest.needed_bytes:
                found.nearest = TooLarge(
                    strategy=strategy,
                    rank=peaks.index(most),
                    needed_bytes=most,
                    available_bytes=available,
                )
    return found


def _splits(steps: StepModel, even: Strategy) -> list[Strategy]:
    """The even split, and that which balances what stages take, if it is another."""
    if even.pp == 1:
        return [even]
    seconds = {
        layer: sum(p.seconds for p in steps.layer_time(layer, even).passes())
        for layer in dict.fromkeys(steps.model.layers)
    }
    head = sum(sum(terms.values()) for terms in steps.head_terms(even))
    split = balance_layers(
        [seconds[layer] for layer in steps.model.layers],
        len(even.layers_per_stage),
        first_s=2 * steps.embedding_s(even),
        last_s=head,
    )
    return (
        [even]
        if split == even.layers_per_stage
        else [
            even,
            replace(even, layers_per_stage=split),
        ]
    )


def _play_out(
    steps: StepModel, fitting: list[tuple[float, int, Ranked]], num_best: int
) -> tuple[list[Ranked], list[Ranked], int]:
    """The best and the front, simulating only what could be one or the other."""
    heapq.heapify(fitting)
    played: list[Ranked] = []
    times: list[float] = []
    while fitting:
        bound, _, ranked = heapq.heappop(fitting)
        in_best = len(times) < num_best or bound < times[num_best - 1]
        is_dominated = any(
            other.step_s <= bound and other.most_bytes <= ranked.most_bytes for other in played
        )
        if not in_best and is_dominated:
            continue
        one = replace(ranked, step_s=steps.seconds(ranked.strategy))
        played.append(one)
        times = sorted([*times, one.step_s])[:num_best]
    played.sort(key=lambda one: (one.step_s, one.most_bytes))
    front: list[Ranked] = []
    for one in played:
        if not front or one.most_bytes < front[-1].most_bytes:
            front.append(one)
    return played[:num_best], front, len(played)


def _infeasible(
    steps: StepModel,
    peak_bytes: PeakBytes,
    space: SearchSpace,
    found: _Found,
    reasons: Counter[str],
) -> InfeasiblePlanError:
    """Word what is violated, and look for the nearest change that fits."""
    gpus, name = f"{space.num_gpus} GPUs of {steps.platform.name}", steps.model.name
    lines = [f"plan: no strategy for {name} on {gpus}."]
    nearest = found.nearest
    if nearest is None:
        lines.append(f"None of the rules lets one run ({sum(reasons.values())} exclusions):")
        lines += [f"- {reason} ({count} times)" for reason, count in reasons.most_common(5)]
    else:
        needed, available = nearest.needed_bytes / 2**30, nearest.available_bytes / 2**30
        lines.append(
            f"{found.num_strategies} can run, none fits. The nearest is {nearest.strategy.name}: "
            f"memory of rank {nearest.rank}: needed {needed:.1f} GiB, "
            f"available {available:.1f} GiB."
        )
    change = _nearest_change(steps, peak_bytes, space)
    lines.append(change or "No single change that was tried would fit.")
    return InfeasiblePlanError("\n".join(lines), reasons.most_common(), nearest)


def _nearest_change(steps: StepModel, peak_bytes: PeakBytes, space: SearchSpace) -> str:
    """The first single change, from the least to the most intrusive, with which something fits."""
    changes: list[tuple[str, SearchSpace]] = []
    if space.fixed:
        changes.append(("without fixed axes", replace(space, fixed={})))
    if len(space.checkpointing) < 3:
        changes.append(
            ("with full checkpointing", replace(space, checkpointing=("none", "selective", "full")))
        )
    if not space.is_optimizer_sharded:
        changes.append(("with a sharded optimizer", replace(space, is_optimizer_sharded=True)))
    if space.optimizer == "adamw":
        changes.append(("with 8-bit AdamW", replace(space, optimizer="adamw_8bit")))
    for factor in (2, 4):
        if space.seq_len % factor == 0:
            shorter = replace(space, seq_len=space.seq_len // factor)
            changes.append((f"with sequences of {shorter.seq_len} tokens", shorter))
    for factor in (2, 4, 8, 16):
        batch = space.global_batch
        larger = replace(space, num_gpus=space.num_gpus * factor, global_batch=batch)
        changes.append((f"on {larger.num_gpus} GPUs", larger))
        grown = replace(larger, global_batch=batch * factor)
        changes.append((f"on {larger.num_gpus} GPUs with a batch of {grown.global_batch}", grown))
    for words, changed in changes:
        if _fits_somewhere(steps, peak_bytes, changed):
            return f"The nearest change that fits: {words}."
    return ""


def _fits_somewhere(steps: StepModel, peak_bytes: PeakBytes, space: SearchSpace) -> bool:
    available = float(steps.platform.device.usable_bytes)
    strategies = valid_strategies(steps.model, steps.platform, space, Counter())
    return any(max(peak_bytes(strategy)) <= available for strategy in strategies)
