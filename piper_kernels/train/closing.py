"""What a finished run leaves: tables, a picture, a sample of text, and the model itself."""

import json
from collections.abc import Sequence
from dataclasses import asdict
from typing import Any

from rich.console import Console
from rich.panel import Panel
from rich.text import Text

from piper_kernels.errors import DataError, instruction
from piper_kernels.train.compare import Timing, compare_experts
from piper_kernels.train.entropy import NgramEntropies, ngram_entropies
from piper_kernels.train.metrics import read_metrics
from piper_kernels.train.picture import draw_run
from piper_kernels.train.run import Run
from piper_kernels.train.run_folder import RunFolder
from piper_kernels.train.sample import continue_text, held_out_prompt
from piper_kernels.train.tables import loss_table, timing_table


def close_run(run: Run, folder: RunFolder, console: Console) -> None:
    """Save the model, draw the picture, write a sample, compare the experts, print the tables.

    Raises:
        BackendError: if two experts implementations disagree on the trained model.
        DataError: if somebody took the last evaluation out of ``metrics.jsonl``.
    """
    settings, corpus = run.settings, run.corpus
    records = read_metrics(folder.metrics)
    loss = records[-1].held_out_loss
    requirement = f"end with the held_out_loss of step {run.trainer.step}"
    value, remedy = "none", "Restore the file, or start anew with --overwrite."
    if loss is None:
        message = instruction("close_run", str(folder.metrics), requirement, value, remedy)
        raise DataError(message)
    entropies = ngram_entropies(corpus.train_texts, corpus.held_out_texts)
    model: Any = run.trainer.model
    model.save_pretrained(folder.model)
    title = (
        f"{model.config.model_type}, {records[-1].tokens:,} tokens, held out {loss:.3f} nats/byte"
    )
    draw_run(folder.picture, records, entropies, run.trainer.counter.layers, title)
    if settings.sample_tokens > 0:
        _write_sample(run, folder, console)
    console.print(loss_table(entropies, loss, run.held_out.scored_bytes))
    timings: list[Timing] = []
    if settings.compare_rounds > 0:
        # the batch that the next step would have drawn
        windows = run.trainer.sampler.windows(run.trainer.samples_drawn, settings.microbatch_size)
        timings = compare_experts(model, windows, settings)
        console.print(timing_table(timings))
    summary = _summary(run, entropies, loss, timings)
    folder.summary.write_text(json.dumps(summary, indent=1) + "\n", encoding="utf-8")
    for what, path in (("picture", folder.picture), ("model", folder.model)):
        console.print(f"{what:<8} {path}", highlight=False, soft_wrap=True)


def _write_sample(run: Run, folder: RunFolder, console: Console) -> None:
    settings, corpus = run.settings, run.corpus
    prompt = settings.prompt or held_out_prompt(corpus.held_out_texts[0])
    written = continue_text(
        run.trainer.model, corpus.tokens, prompt, settings.sample_tokens, settings
    )
    folder.sample.write_text(prompt + written, encoding="utf-8")
    text = Text.assemble((_printable(prompt), "dim"), _printable(written))
    console.print(Panel(text, title="sample: a prompt (dim), and what the model goes on with"))


def _printable(text: str) -> str:
    """No escape sequence that the model makes up may reach the terminal."""
    return "".join(c if c.isprintable() or c == "\n" else "\N{REPLACEMENT CHARACTER}" for c in text)


def _summary(
    run: Run, entropies: NgramEntropies, loss: float, timings: Sequence[Timing]
) -> dict[str, Any]:
    return {
        "steps": run.trainer.step,
        "held_out_nats_per_byte": loss,
        "held_out_bytes": run.held_out.scored_bytes,
        "ngram_nats_per_byte": asdict(entropies),
        "text_sha256": run.corpus.sha256,
        "model_digest": run.model_digest,
        "timings": [asdict(timing) for timing in timings],
    }
