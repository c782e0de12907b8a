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

# beyond this, saving memory costs more than it is worth
FRONT_SLACK = 1.25

# peak bytes of each pipeline rank, ``[pp]``
PeakBytes = Callable[[Strategy], Sequence[float]]
# bytes that the largest of them cannot be below
LeastBytes = Callable[[Strategy], float]
_TOO_LARGE = "memory: the fullest rank exceeds the GPU"


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
        front: at most ``FRONT_SLACK`` times slower than the best, and nothing is both smaller and
            faster; fastest first.
        num_seen: strategies whose memory was looked at; all others are slower than the front.
        num_simulated: of them, those that had to be played out.
        reasons: how often each rule excluded something, most frequent first.
    """

    best: tuple[Ranked, ...]
    front: tuple[Ranked, ...]
    num_seen: int
    num_simulated: int
    reasons: tuple[tuple[str, int], ...]


def search(
    steps: StepModel,
    peak_bytes: PeakBytes,
    space: SearchSpace,
    *,
    least_bytes: LeastBytes | None = None,
    num_best: int = 5,
) -> SearchResult:
    """Find the fastest strategies that fit.

    Args:
        steps: predicts the step of a strategy.
        peak_bytes: predicts its memory.
        space: of the search.
        least_bytes: bytes that the largest of ``peak_bytes`` cannot be below; saves time.
        num_best: returned at most.

    Raises:
        InfeasiblePlanError: nothing fits, or nothing can run.
        PlanError: the machine description does not reach so many GPUs.
    """
    steps.platform.check_reach(space.num_gpus)
    reasons: Counter[str] = Counter()
    found = _best_first(steps, peak_bytes, least_bytes, space, num_best, reasons)
    if not found.played:
        raise _infeasible(steps, peak_bytes, space, found, reasons)
    played = sorted(found.played, key=lambda one: (one.step_s, one.most_bytes))
    return SearchResult(
        best=tuple(played[:num_best]),
        front=_front(played),
        num_seen=found.num_seen,
        num_simulated=len(played),
        reasons=tuple(reasons.most_common()),
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
    """What the search has seen so far.

    Attributes:
        played: strategies that fit and were played out.
        times: of the fastest of them, rising.
        nearest: of those that do not fit, the one that lacks least.
        num_seen: strategies looked at beyond their first bound.
    """

    played: list[Ranked]
    times: list[float]
    nearest: TooLarge | None = None
    num_seen: int = 0

    def could_matter(self, bound_s: float, most_bytes: float, num_best: int) -> bool:
        """Whether one that takes ``bound_s`` or more can be among the best, or on the front."""
        if len(self.times) < num_best or bound_s < self.times[-1]:
            return True
        if bound_s > FRONT_SLACK * self.times[0]:
            return False
        return not any(
            one.step_s <= bound_s and one.most_bytes <= most_bytes for one in self.played
        )


def _best_first(
    steps: StepModel,
    peak_bytes: PeakBytes,
    least_bytes: LeastBytes | None,
    space: SearchSpace,
    num_best: int,
    reasons: Counter[str],
) -> _Found:
    """Look at strategies in the order of their bounds: first a coarse one, then a closer one."""
    strategies = valid_strategies(steps.model, steps.platform, space, reasons)
    # (bound, order, strategy, whether the bound is the closer one)
    heap = [(steps.coarse_bound_s(s), i, s, False) for i, s in enumerate(strategies)]
    heapq.heapify(heap)
    found, order = _Found(played=[], times=[]), len(heap)
    splits: dict[object, tuple[int, ...]] = {}
    available = float(steps.platform.device.usable_bytes)
    hopeless: list[tuple[float, Strategy]] = []
    while heap:
        bound, _, strategy, is_close = heapq.heappop(heap)
        if not found.could_matter(bound, 0.0, num_best):
            break
        if is_close:
            _look_at(steps, peak_bytes, strategy, bound, found, num_best, reasons)
            continue
        if least_bytes is not None and least_bytes(strategy) > available:
            hopeless.append((bound, strategy))
            continue
        for one in _splits(steps, strategy, splits):
            order += 1
            heapq.heappush(heap, (max(bound, steps.bound_s(one)), order, one, True))
    if found.played:
        reasons[_TOO_LARGE] += len(hopeless)
    else:
        # nothing fits: which one lacks least decides what is said
        for bound, strategy in hopeless:
            _look_at(steps, peak_bytes, strategy, bound, found, num_best, reasons)
    return found


def _look_at(
    steps: StepModel,
    peak_bytes: PeakBytes,
    strategy: Strategy,
    bound_s: float,
    found: _Found,
    num_best: int,
    reasons: Counter[str],
) -> None:
    """Check one strategy's memory, and play it out if it fits and can matter."""
    available = float(steps.platform.device.usable_bytes)
    peaks = tuple(peak_bytes(strategy))
    most = max(peaks)
    found.num_seen += 1
    if most > available:
        reasons[_TOO_LARGE] += 1
        if found.nearest is None or most < found.nearest.needed_bytes:
            found.nearest = TooLarge(
                strategy=strategy,
                rank=peaks.index(most),
                needed_bytes=most,
                available_bytes=available,
            )
        return
    if found.could_matter(bound_s, most, num_best):
        seconds = steps.seconds(strategy)
        found.played.append(Ranked(strategy=strategy, step_s=seconds, peak_bytes=peaks))
        found.times = sorted([*found.times, seconds])[:num_best]


def _front(played: Sequence[Ranked]) -> tuple[Ranked, ...]:
    """Of strategies sorted by time, those that nothing beats in time and memory."""
    front: list[Ranked] = []
    for one in played:
        is_quick = one.step_s <= FRONT_SLACK * played[0].step_s
        if is_quick and (not front or one.most_bytes < front[-1].most_bytes):
            front.append(one)
    return tuple(front)


def _splits(
    steps: StepModel, even: Strategy, seen: dict[object, tuple[int, ...]]
) -> list[Strategy]:
    """The even split, and that which balances what stages take, if it is another."""
    if even.pp == 1:
        return [even]
    num_stages = len(even.layers_per_stage)
    key = (num_stages, even.ep, even.tp, even.microbatch_size, even.checkpointing)
    if key not in seen:
        head = sum(sum(terms.values()) for terms in steps.head_terms(even))
        lookup = 2 * steps.embedding_s(even)
        seconds = steps.layer_seconds(even)
        seen[key] = balance_layers(seconds, num_stages, first_s=lookup, last_s=head)
    if seen[key] == even.layers_per_stage:
        return [even]
    return [even, replace(even, layers_per_stage=seen[key])]


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
            f"{found.num_seen} can run, none fits. The nearest is {nearest.strategy.name}: "
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
    try:
        steps.platform.check_reach(space.num_gpus)
    except PlanError:
        return False
    available = float(steps.platform.device.usable_bytes)
    strategies = valid_strategies(steps.model, steps.platform, space, Counter())
    return any(max(peak_bytes(strategy)) <= available for strategy in strategies)
