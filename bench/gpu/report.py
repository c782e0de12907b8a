"""Results as JSON, a Markdown page and pictures; and the targets on a Hopper GPU. Plain text."""

from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any

from bench.gpu.contestants import HUGGING_FACE, LIGER, PIPER
from bench.gpu.part_log import Row, write_json
from bench.shapes import QWEN3_30B
from bench.targets import Target, exit_status, summary_line

Results = dict[str, Any]
RESULTS, PAGE = "gpu.json", "gpu.md"
TARGET_TOKENS = 32768
BAD = ("failed", "wrong", "stopped")


def rows_of(results: Results, part: str) -> list[Row]:
    """Rows of a part; none if it did not run."""
    return list(results["parts"].get(part, {}).get("rows", []))


def list_targets(results: Results) -> list[Target]:
    """What a Hopper GPU is held to, at Qwen3-30B-A3B's layer with 32768 tokens. Pure."""
    roofs = [row["tflops"] for row in rows_of(results, "roofs") if "tflops" in row]
    dense = max(roofs, default=None)
    timed = {
        (row["mode"], row["variant"]): row
        for row in rows_of(results, "sweep")
        if row.get("status") == "ok"
        and (row.get("shape"), row.get("T")) == (QWEN3_30B.name, TARGET_TOKENS)
    }

    def share(mode: str) -> float | None:
        row = timed.get((mode, PIPER))
        return row["tflops"] / dense if row and dense else None

    def speedup(mode: str, rival: str) -> float | None:
        row = timed.get((mode, rival))
        return row.get("piper_speedup") if row else None

    targets = [
        Target("forward over the dense bf16 GEMM rate", 0.60, share("forward")),
        Target("forward+backward over the dense GEMM rate", 0.50, share("forward_backward")),
    ]
    for rival, words, threshold in ((HUGGING_FACE, "grouped_mm", 1.5), (LIGER, "Liger", 1.0)):
        for mode in ("forward", "forward_backward"):
            name = f"{mode.replace('_', '+')}: speed-up over {words}"
            targets.append(Target(name, threshold, speedup(mode, rival)))
    return targets


def _cell(value: Any) -> str:
    if value is None:
        return "-"
    if isinstance(value, float):
        return f"{value:.3g}" if abs(value) < 1000 else f"{value:.0f}"
    return str(value).replace("|", "/").replace("\n", " ")


def table(headers: Sequence[str], rows: Iterable[Sequence[Any]]) -> list[str]:
    """A Markdown table.

    Example:
        >>> table(["a", "b"], [[1, 0.5]])
        ['| a | b |', '|---|---|', '| 1 | 0.5 |']
    """
    lines = ["| " + " | ".join(headers) + " |", "|" + "---|" * len(headers)]
    return lines + ["| " + " | ".join(map(_cell, row)) + " |" for row in rows]


# title, part, then (heading, key of the row) of each column
SECTIONS = (
    ("Roofs", "roofs", (("roof", "item"), ("TFLOP/s", "tflops"), ("GB/s", "gb_per_s"))),
    (
        "Layers",
        "sweep",
        (
            ("shape", "shape"),
            ("T", "T"),
            ("mode", "mode"),
            ("who", "variant"),
            ("status", "status"),
            ("us", "time_us"),
            ("TFLOP/s", "tflops"),
            ("of dense GEMM", "of_dense"),
            ("Piper's speed-up", "piper_speedup"),
            ("", "detail"),
        ),
    ),
    (
        "One layer of the paper's models",
        "models",
        (
            ("layer", "item"),
            ("E here", "E"),
            ("E of the model", "num_experts_of_the_model"),
            ("TFLOP/s", "tflops"),
            ("of dense GEMM", "of_dense"),
            ("MFU", "mfu"),
            ("paper, MI250X node, TFLOP/s", "published_mi250x_tflops"),
            ("status", "status"),
            ("", "detail"),
        ),
    ),
    (
        "Checks",
        "checks",
        (("check", "item"), ("status", "status"), ("s", "seconds"), ("", "detail")),
    ),
    (
        "Kernels compiled beforehand",
        "compiling",
        (
            ("what", "item"),
            ("status", "status"),
            ("kernels", "num_compiled"),
            ("errors", "num_errors"),
            ("s", "seconds"),
            ("", "detail"),
        ),
    ),
)


def markdown_page(results: Results) -> str:
    """The whole page. Pure."""
    head = next(iter(rows_of(results, "environment")), {})
    skipped = {"item", "status", "detail", "seconds"}
    lines = ["# bench.gpu", ""]
    if results["is_dry_run"]:
        lines += ["A dry run on the CPU: no number in it means anything.", ""]
    facts = [(name, value) for name, value in head.items() if name not in skipped]
    lines += [*table(["environment", ""], facts), ""]
    parts = [
        (name, part["status"], part["seconds"], part["detail"])
        for name, part in results["parts"].items()
    ]
    lines += [*table(["part", "status", "s", ""], parts), "", "## Targets", ""]
    targets = [
        (target.name, target.threshold, target.measured, "met" if target.is_met else "missed")
        for target in list_targets(results)
    ]
    lines += table(["what", ">=", "measured", ""], targets)
    for title, part, columns in SECTIONS:
        # the sweep's items hold rows of their own
        rows = [row for row in rows_of(results, part) if part != "sweep" or "variant" in row]
        cells = [[row.get(key) for _, key in columns] for row in rows]
        lines += ["", f"## {title}", "", *table([heading for heading, _ in columns], cells)]
    return "\n".join(lines) + "\n"


def write_report(folder: Path, results: Results) -> None:
    """Write gpu.json, gpu.md and, if matplotlib is there, the pictures."""
    write_json(folder / RESULTS, results)
    (folder / PAGE).write_text(markdown_page(results), encoding="utf-8")
    try:
        from matplotlib.figure import Figure
    except ImportError:
        return
    sweep = [
        row for row in rows_of(results, "sweep") if row.get("status") == "ok" and "tflops" in row
    ]
    _bars(
        folder / "gpu_layers.png",
        Figure,
        sweep,
        lambda row: f"{row['shape']} T={row['T']} {row['mode']}",
        lambda row: row["variant"],
    )
    models = [row for row in rows_of(results, "models") if "tflops" in row]
    _bars(folder / "gpu_models.png", Figure, models, lambda r: r["model"], lambda r: r["mode"])


def _bars(
    path: Path,
    figure_class: Any,
    rows: Sequence[Row],
    group: Callable[[Row], str],
    label: Callable[[Row], str],
) -> None:
    """TFLOP/s as bars, one group for each case and one colour for each label."""
    if not rows:
        return
    groups = list(dict.fromkeys(map(group, rows)))
    labels = list(dict.fromkeys(map(label, rows)))
    figure = figure_class(figsize=(10, 1 + 0.7 * len(groups)), layout="constrained")
    axes = figure.subplots()
    height = 0.8 / len(labels)
    for number, name in enumerate(labels):
        mine = [row for row in rows if label(row) == name]
        places = [groups.index(group(row)) + number * height for row in mine]
        axes.barh(places, [row["tflops"] for row in mine], height, label=name)
    axes.set_yticks([place + 0.4 - height / 2 for place in range(len(groups))], groups)
    axes.invert_yaxis()
    axes.set_xlabel("TFLOP/s")
    figure.legend(loc="outside lower center", ncols=4, fontsize="small")
    figure.savefig(path, dpi=100)


def print_summary(results: Results, folder: Path, *, is_strict: bool) -> int:
    """Print what counts and return the exit status.

    Returns:
        1 if a part was lost, a check failed or a contestant was wrong, or a target was missed
        although missing counts; 2 if there was no device to begin with; else 0.
    """
    if results["parts"]["environment"]["status"] != "ok":
        return 2
    bad = [
        f"{name}: {part['status']}, {part['detail']}"
        for name, part in results["parts"].items()
        if part["status"] in BAD
    ]
    for part in ("compiling", "roofs", "checks", "models"):
        bad += _bad_rows(part, results)
    # a rival that is wrong or breaks is a finding; Piper's own is a failure
    bad += [line for line in _bad_rows("sweep", results) if f" {PIPER}" in line or " T=" in line]
    for line in bad:
        print(f"FAILED {line}")
    num_checks = sum(row["status"] == "ok" for row in rows_of(results, "checks"))
    print(f"checks passed: {num_checks}; written: {folder}/{RESULTS}, {PAGE} and pictures")
    targets = list_targets(results)
    if not results["is_dry_run"]:
        for target in targets:
            verdict = "met" if target.is_met else "missed"
            print(f"{verdict}: {target.name} >= {target.threshold}: {_cell(target.measured)}")
        print(summary_line(targets))
    return 1 if bad else exit_status(targets, is_strict=is_strict)


def _bad_rows(part: str, results: Results) -> list[str]:
    return [
        f"{part}: {row.get('item', '')} {row.get('variant', '')}: {row.get('detail', '')}"
        for row in rows_of(results, part)
        if row.get("status") in BAD
    ]
