"""How long n chunks take that pass through stages which share resources.

A stage of a chunk starts when the stages before it have ended and its resources (the NICs, the node
fabric, the GPU) are free. Among those that could start first, the earliest stage goes first, so
dispatch feeds the experts before combine drains them. With a resource for each stage this is the
pipeline formula: all stages once, plus n - 1 times the longest.

Pure: no torch, no process group.
"""

from collections.abc import Sequence
from dataclasses import dataclass

from piper_kernels.errors import require


@dataclass(frozen=True, kw_only=True, slots=True)
class Stage:
    """One stage of one chunk.

    Attributes:
        name: unique among the stages.
        seconds: for one chunk.
        resources: what it occupies all the while.
        after: stages of the same chunk that must have ended.
    """

    name: str
    seconds: float
    resources: tuple[str, ...]
    after: tuple[str, ...] = ()


@dataclass(frozen=True, kw_only=True, slots=True)
class Slice:
    """When one stage of one chunk runs."""

    chunk: int
    stage: str
    start_s: float
    end_s: float


def schedule_chunks(stages: Sequence[Stage], num_chunks: int) -> tuple[Slice, ...]:
    """Run every stage of every chunk as early as it can; in order of start.

    Args:
        stages: of one chunk; a stage comes after those that it waits for.
        num_chunks: at least 1.

    Raises:
        ConfigError: no chunk, or a stage that waits for one not before it.

    Example:
        Transfer 3 s, then spread 1 s, in 2 chunks: 3 + 3 + 1 s.

        >>> stages = (Stage(name="II", seconds=3, resources=("nic",)),
        ...           Stage(name="III", seconds=1, resources=("node",), after=("II",)))
        >>> schedule_chunks(stages, 2)[-1].end_s
        7.0
    """
    require(num_chunks >= 1, "schedule_chunks", "num_chunks", "be at least 1", num_chunks)
    known: set[str] = set()
    for stage in stages:
        early = sorted(set(stage.after) - known)
        requirement = "come after the stages it waits for"
        require(not early, "schedule_chunks", stage.name, requirement, f"{early} later or missing")
        known.add(stage.name)
    free_s = {resource: 0.0 for stage in stages for resource in stage.resources}
    ended_s: dict[tuple[int, str], float] = {}
    # chunks are alike, so each stage takes them in turn
    turn = {stage.name: 0 for stage in stages}
    done: list[Slice] = []
    while len(done) < num_chunks * len(stages):
        ready = []
        for place, stage in enumerate(stages):
            chunk = turn[stage.name]
            before = [ended_s.get((chunk, name)) for name in stage.after]
            if chunk < num_chunks and None not in before:
                free = [free_s[resource] for resource in stage.resources]
                start = max([0.0, *free, *(end for end in before if end is not None)])
                ready.append((start, place, chunk))
        start, place, chunk = min(ready)
        stage = stages[place]
        end = start + stage.seconds
        ended_s[chunk, stage.name] = end
        turn[stage.name] += 1
        free_s.update(dict.fromkeys(stage.resources, end))
        done.append(Slice(chunk=chunk, stage=stage.name, start_s=start, end_s=end))
    return tuple(done)


def makespan(slices: Sequence[Slice]) -> float:
    """Seconds until all have ended."""
    return max((piece.end_s for piece in slices), default=0.0)
