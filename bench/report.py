"""Records as a table for 100 columns and as a picture."""

from collections.abc import Sequence
from pathlib import Path

from rich.console import Console
from rich.table import Table

from bench.record import Environment, Record


def make_console() -> Console:
    """A console that is 100 columns wide wherever it prints."""
    return Console(width=100, highlight=False)


def print_environment(environment: Environment, console: Console) -> None:
    """Print where the numbers below come from, and whether others were busy."""
    console.print(f"{environment.machine}, {environment.num_threads} threads, {environment.date}")
    versions = f"torch {environment.torch}, transformers {environment.transformers}"
    console.print(f"{versions}, commit {environment.commit}")
    if environment.is_noisy:
        console.print(f"noisy: load average {environment.load} before the run began")


def _share(fraction: float | None) -> str:
    return "-" if fraction is None else f"{fraction:.0%}"


def _roofs(record: Record) -> str:
    """What the machine gave in the same rounds."""
    gemm = f"dense GEMM {record.roof_gflops:.1f} GFLOP/s"
    read = record.read_gb_per_s
    return f"roofs: {gemm}" + ("" if read is None else f", reading {read:.2f} GB/s")


def print_case(title: str, records: Sequence[Record], console: Console) -> None:
    """Print one case: a line for each variant, and the roofs below."""
    caption = _roofs(records[0]) if records else "nothing was timed"
    table = Table(title=title, title_justify="left", caption=caption, caption_justify="left")
    table.add_column("variant", no_wrap=True)
    headers = ("time us", "p20 - p80 us", "GFLOP/s", "of GEMM", "of read", "speed-up [95 %]")
    for header in headers:
        table.add_column(header, justify="right", no_wrap=True)
    for record in records:
        speedup = f"{record.speedup:.2f} [{record.speedup_low:.2f}, {record.speedup_high:.2f}]"
        table.add_row(
            record.variant,
            f"{record.time_us:.0f}",
            f"{record.p20_us:.0f} - {record.p80_us:.0f}",
            f"{record.gflops:.1f}",
            _share(record.roof_fraction),
            _share(record.read_fraction),
            "baseline" if record.variant == record.baseline else speedup,
        )
    console.print(table)


def plot_speedups(path: Path, records: Sequence[Record], variant: str) -> None:
    """Draw the speed-up of one variant over the fastest rival against T, one line per case.

    Args:
        path: a PNG, written anew.
        records: of one run.
        variant: whose speed-ups are drawn.
    """
    import matplotlib
    from matplotlib.figure import Figure

    lines: dict[str, list[Record]] = {}
    for record in records:
        if record.variant == variant:
            label = f"{record.op} {record.mode} {record.shape} {record.dtype} {record.routing}"
            lines.setdefault(label, []).append(record)
    # a figure of its own: no global state, no display
    figure = Figure(figsize=(10, 6), layout="constrained")
    axes = figure.subplots()
    colors = matplotlib.colormaps["tab20"]
    for number, (label, points) in enumerate(sorted(lines.items())):
        points = sorted(points, key=lambda record: record.T)
        middle = [record.speedup for record in points]
        low = [record.speedup - record.speedup_low for record in points]
        high = [record.speedup_high - record.speedup for record in points]
        axes.errorbar(
            [record.T for record in points],
            middle,
            yerr=(low, high),
            marker="o",
            capsize=3,
            color=colors(number % colors.N),
            label=label,
        )
    axes.axhline(1.0, color="black", linewidth=0.8)
    axes.set_xscale("log", base=2)
    axes.set_xlabel("tokens T")
    axes.set_ylabel(f"speed-up of {variant} over the fastest rival")
    if records:
        first = records[0]
        axes.set_title(f"{first.machine}, torch {first.torch}, {first.commit}, {first.date}")
    if lines:
        figure.legend(loc="outside lower center", fontsize="x-small", ncols=2)
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=120)
