"""Recomputation with the plans of the forward: activation checkpointing counts nothing anew.

A recomputed layer that counted again would exchange more messages, and one that routed otherwise
would send rows which nobody expects.
"""

from contextlib import AbstractContextManager
from contextvars import ContextVar, Token
from dataclasses import dataclass, field

import torch
from torch import Tensor

from piper_kernels.errors import RoutingError


@dataclass(slots=True, eq=False)
class PlanTape:
    """Plans in the order in which a checkpointed region made them.

    Attributes:
        entries: expert ids and plan of each call.
        position: of the next to be replayed; ``None`` while recording.
    """

    entries: list[tuple[Tensor, object]] = field(default_factory=list)
    position: int | None = None

    def record(self, expert_ids: Tensor, plan: object) -> None:
        """Add the plan of a call."""
        if self.position is None:
            self.entries.append((expert_ids, plan))

    def replay(self, expert_ids: Tensor) -> object | None:
        """The plan of the same call in the forward; ``None`` while recording.

        Raises:
            RoutingError: the recomputation is another one than the forward.
        """
        if self.position is None:
            return None
        index, self.position = self.position, self.position + 1
        is_known = index < len(self.entries)
        if not is_known or not torch.equal(self.entries[index][0], expert_ids):
            raise RoutingError(
                f"checkpoint_contexts: call {index + 1} of the recomputation must choose the "
                "experts that the forward chose. Is there randomness that is not replayed "
                "(preserve_rng_state), or did parameters change in between?"
            )
        return self.entries[index][1]


current_tape: ContextVar[PlanTape | None] = ContextVar("current_tape", default=None)


def checkpoint_contexts() -> tuple[AbstractContextManager[None], AbstractContextManager[None]]:
    """The ``context_fn`` of ``torch.utils.checkpoint.checkpoint(..., use_reentrant=False)``.

    Layers inside that share their experts keep the plans of the forward for the recomputation. In
    a Hugging Face model: ``model.gradient_checkpointing_enable({"use_reentrant": False,
    "context_fn": checkpoint_contexts})``.

    Example:
        >>> from torch.utils.checkpoint import checkpoint
        >>> x = torch.ones(2, requires_grad=True)
        >>> y = checkpoint(torch.exp, x, use_reentrant=False, context_fn=checkpoint_contexts)
    """
    tape = PlanTape()
    return _Use(tape, None), _Use(tape, 0)


class _Use(AbstractContextManager[None]):
    """Makes a tape the current one; entered again by schedules that split the backward in two."""

    def __init__(self, tape: PlanTape, position: int | None) -> None:
        self._tape, self._position = tape, position
        self._tokens: list[Token[PlanTape | None]] = []

    def __enter__(self) -> None:
        self._tape.position = self._position
        self._tokens.append(current_tape.set(self._tape))

    def __exit__(self, *error: object) -> None:
        current_tape.reset(self._tokens.pop())
