"""What a pipeline schedule is made of: passes of one microbatch through one stage.

Pure: no torch, no process group.
"""

from collections import Counter
from dataclasses import dataclass
from typing import Literal, NamedTuple

# forward; whole backward; gradient of the input; gradient of the weights
Pass = Literal["F", "B", "I", "W"]


class Action(NamedTuple):
    """One pass of one microbatch through one stage.

    Example:
        >>> str(Action(2, "F", 0))
        '2F0'
    """

    stage: int
    kind: Pass
    microbatch: int

    def __str__(self) -> str:
        return f"{self.stage}{self.kind}{self.microbatch}"


class Step(NamedTuple):
    """What a rank does at once: one action, or two that may overlap (DualPipeV).

    Example:
        >>> str(Step((Action(0, "F", 1), Action(3, "B", 0))))
        '(0F1;3B0)OVERLAP_F_B'
    """

    actions: tuple[Action, ...]

    def __str__(self) -> str:
        names = ";".join(map(str, self.actions))
        return names if len(self.actions) == 1 else f"({names})OVERLAP_F_B"


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class Schedule:
    """What every rank of a pipeline does, in order. Idle time is not part of it.

    Attributes:
        name: of the schedule.
        num_ranks: ranks of the pipeline (PP).
        num_microbatches: M.
        stage_to_rank: ``[num_stages]`` which rank runs each stage.
        steps: for each rank what it does, in order.
    """

    name: str
    num_ranks: int
    num_microbatches: int
    stage_to_rank: tuple[int, ...]
    steps: tuple[tuple[Step, ...], ...]

    @property
    def num_stages(self) -> int:
        """Stages of the model: ranks times stages a rank."""
        return len(self.stage_to_rank)

    def stages_of(self, rank: int) -> tuple[int, ...]:
        """The stages that a rank runs, in model order."""
        return tuple(s for s, owner in enumerate(self.stage_to_rank) if owner == rank)


class Writer:
    """One rank's list in the making; it counts microbatches for each stage and kind."""

    def __init__(self) -> None:
        self.steps: list[Step] = []
        # weight gradients that are still owed, oldest first
        self.owed: list[tuple[int, int]] = []
        self._next: Counter[tuple[int, str]] = Counter()

    def forward(self, stage: int) -> None:
        """The next forward of ``stage``."""
        self._add(self._take(stage, "F"))

    def backward(self, stage: int, *, is_split: bool = False) -> None:
        """The next backward of ``stage``, whole or only its input gradient."""
        action = self._take(stage, "I" if is_split else "B")
        if is_split:
            self.owed.append((stage, action.microbatch))
        self._add(action)

    def overlap(self, forward_stage: int, backward_stage: int) -> None:
        """A forward and a whole backward at once."""
        self._add(self._take(forward_stage, "F"), self._take(backward_stage, "B"))

    def weights(self, stage: int | None = None) -> None:
        """The oldest weight gradient that is owed (by ``stage``, if given); nothing if none is."""
        owed = [pair for pair in self.owed if stage in (None, pair[0])]
        if owed:
            self.owed.remove(owed[0])
            self._add(Action(owed[0][0], "W", owed[0][1]))

    def _take(self, stage: int, kind: Pass) -> Action:
        """The next microbatch of a stage and kind; both kinds of backward share one count."""
        key = (stage, "F" if kind == "F" else "B")
        self._next[key] += 1
        return Action(stage, kind, self._next[key] - 1)

    def _add(self, *actions: Action) -> None:
        self.steps.append(Step(actions))
