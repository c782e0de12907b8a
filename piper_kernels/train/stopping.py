"""A polite end: Ctrl-C or SIGTERM lets the step finish and a checkpoint be written."""

import signal
from types import FrameType
from typing import Any, Self


class StopRequest:
    """While open, the first SIGINT or SIGTERM is noted; a second one interrupts at once.

    Attributes:
        is_made: whether a signal has come.
    """

    _SIGNALS = (signal.SIGINT, signal.SIGTERM)

    def __init__(self) -> None:
        self.is_made = False
        self._before: dict[signal.Signals, Any] = {}

    def __enter__(self) -> Self:
        self._before = {number: signal.signal(number, self._note) for number in self._SIGNALS}
        return self

    def __exit__(self, *error: object) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)

    def _note(self, number: int, frame: FrameType | None) -> None:
        if self.is_made:
            raise KeyboardInterrupt
        self.is_made = True
