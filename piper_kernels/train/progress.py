"""What a run shows while it trains: a live display on a terminal, plain lines elsewhere."""

from datetime import timedelta
from typing import Protocol, Self

from rich.console import Console, Group
from rich.live import Live
from rich.panel import Panel
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from piper_kernels.train.metrics import StepRecord

MAX_COLUMNS = 100
_MAX_LAYERS = 12
_BAR_COLUMNS = 24


class Progress(Protocol):
    """Something that is told of every step. A context manager."""

    def __enter__(self) -> Self:
        """Begin to show."""

    def __exit__(self, *error: object) -> None:
        """Show the last state and stop."""

    def update(self, record: StepRecord) -> None:
        """Take note of a step."""

    def note(self, text: str) -> None:
        """Show one line that stays."""


class Pace:
    """Speed and remaining time, from the steps seen so far.

    Args:
        num_steps: steps of the whole run.

    Example:
        >>> pace = Pace(10)
        >>> for step in (1, 2):
        ...     pace.add(StepRecord(step=step, loss=1.0, balance_loss=None, learning_rate=0.1,
        ...         grad_norm=1.0, tokens=100 * step, step_s=0.5, expert_counts=[[4, 4]]))
        >>> pace.tokens_per_s, pace.remaining_s
        (200.0, 4.0)
    """

    # so many steps are averaged
    WINDOW = 20

    def __init__(self, num_steps: int) -> None:
        self._num_steps = num_steps
        self._recent: list[StepRecord] = []
        self._tokens_before = 0

    def add(self, record: StepRecord) -> None:
        """Take note of a step."""
        self._recent.append(record)
        if len(self._recent) > self.WINDOW:
            self._tokens_before = self._recent.pop(0).tokens
        elif len(self._recent) == 1:
            # tokens per step do not change in a run
            self._tokens_before = record.tokens - record.tokens // record.step

    @property
    def tokens_per_s(self) -> float:
        """Tokens trained on per second, over the last ``WINDOW`` steps."""
        return (self._recent[-1].tokens - self._tokens_before) / self._seconds

    @property
    def remaining_s(self) -> float:
        """Seconds until the last step, evaluations and checkpoints not counted."""
        steps_left = self._num_steps - self._recent[-1].step
        return steps_left * self._seconds / len(self._recent)

    @property
    def _seconds(self) -> float:
        return sum(record.step_s for record in self._recent)


class PlainProgress:
    """A line about every 20th of the run, and at each evaluation: for files and pipes."""

    def __init__(self, console: Console, num_steps: int) -> None:
        self._console = console
        self._num_steps = num_steps
        self._every = max(1, num_steps // 20)
        self._pace = Pace(num_steps)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        return None

    def update(self, record: StepRecord) -> None:
        """Take note of a step; print it if it is time."""
        self._pace.add(record)
        is_last = record.step == self._num_steps
        if record.step % self._every == 0 or record.held_out_loss is not None or is_last:
            self._console.print(step_line(record, self._pace, self._num_steps), highlight=False)

    def note(self, text: str) -> None:
        """Show one line that stays."""
        self._console.print(text, highlight=False)


class LiveProgress:
    """A panel that is redrawn in place: bar, losses, speed, time left, expert balance."""

    def __init__(self, console: Console, num_steps: int, layers: list[int]) -> None:
        self._num_steps = num_steps
        self._layers = layers
        self._pace = Pace(num_steps)
        self._held_out: float | None = None
        self._live = Live(console=console, refresh_per_second=4)

    def __enter__(self) -> Self:
        self._live.__enter__()
        return self

    def __exit__(self, *error: object) -> None:
        self._live.__exit__(None, None, None)

    def update(self, record: StepRecord) -> None:
        """Take note of a step."""
        self._pace.add(record)
        if record.held_out_loss is not None:
            self._held_out = record.held_out_loss
        self._live.update(self._panel(record))

    def note(self, text: str) -> None:
        """Show one line that stays."""
        self._live.console.print(text, highlight=False)

    def _panel(self, record: StepRecord) -> Panel:
        bar = Table.grid(padding=(0, 1), expand=True)
        bar.add_column(width=16)
        bar.add_column(ratio=1)
        bar.add_column(justify="right", width=18)
        bar.add_row(
            f"step {record.step}/{self._num_steps}",
            ProgressBar(total=self._num_steps, completed=record.step),
            f"{_clock(self._pace.remaining_s)} left",
        )
        numbers = Table.grid(padding=(0, 3))
        held_out = "-" if self._held_out is None else f"{self._held_out:.3f}"
        numbers.add_row(
            f"loss [bold]{record.loss:.3f}[/]",
            f"held out [bold]{held_out}[/] nats/byte",
            f"[bold]{self._pace.tokens_per_s:,.0f}[/] tokens/s",
            f"lr {record.learning_rate:.1e}",
            f"grad {record.grad_norm:.2f}",
        )
        content = Group(bar, numbers, Text(), expert_balance(record, self._layers))
        return Panel(content, title="piper train", width=_width(self._live.console))


def open_progress(console: Console, num_steps: int, layers: list[int]) -> Progress:
    """A live display if ``console`` is a terminal, else plain lines."""
    if console.is_terminal:
        return LiveProgress(console, num_steps, layers)
    return PlainProgress(console, num_steps)


def make_console() -> Console:
    """A console of at most ``MAX_COLUMNS`` columns; exactly that many when not on a terminal."""
    console = Console()
    columns = min(MAX_COLUMNS, console.width) if console.is_terminal else MAX_COLUMNS
    return Console(width=columns)


def step_line(record: StepRecord, pace: Pace, num_steps: int) -> str:
    """One step as a line of at most ``MAX_COLUMNS`` columns."""
    held_out = "" if record.held_out_loss is None else f"  held out {record.held_out_loss:.3f}"
    return (
        f"step {record.step:>6}/{num_steps}  loss {record.loss:.3f}"
        f"  {pace.tokens_per_s:>9,.0f} tokens/s  busiest {max(record.imbalance):.2f}x"
        f"  {_clock(pace.remaining_s)} left{held_out}"
    )


def expert_balance(record: StepRecord, layers: list[int]) -> Group:
    """Per layer, the busiest expert's rows over the mean, as a number and a bar.

    A model of many layers shows the least balanced ones.
    """
    title = "expert balance: busiest expert over the mean (1.0 is even)"
    if len(layers) > _MAX_LAYERS:
        title = f"{title}, the {_MAX_LAYERS} least even of {len(layers)} layers"
    worst = sorted(zip(record.imbalance, layers, strict=True), reverse=True)[:_MAX_LAYERS]
    table = Table.grid(padding=(0, 2))
    num_experts = len(record.expert_counts[0])
    for imbalance, layer in sorted(worst, key=lambda pair: pair[1]):
        bar = ProgressBar(total=num_experts, completed=imbalance, width=_BAR_COLUMNS)
        table.add_row(f"layer {layer}", f"{imbalance:.2f}", bar)
    return Group(Text(title, style="dim"), table)


def _width(console: Console) -> int:
    return min(MAX_COLUMNS, console.width)


def _clock(seconds: float) -> str:
    return str(timedelta(seconds=round(seconds)))
