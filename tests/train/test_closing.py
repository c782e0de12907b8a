import io
import json
from collections.abc import Callable

import pytest
from rich.console import Console
from transformers import AutoModelForCausalLM

from piper_kernels.errors import DataError
from piper_kernels.train.closing import close_run
from piper_kernels.train.entropy import ngram_entropies
from piper_kernels.train.evaluate import held_out_loss
from piper_kernels.train.progress import MAX_COLUMNS, PlainProgress
from piper_kernels.train.run import build_run, train
from piper_kernels.train.run_folder import RunFolder
from piper_kernels.train.settings import TrainSettings
from piper_kernels.train.stopping import StopRequest


def test_close_run_leaves_tables_picture_sample_and_model(
    tiny_settings: Callable[..., TrainSettings],
) -> None:
    settings = tiny_settings(sample_tokens=20, compare_rounds=2, prompt="The \x1b ")
    folder = RunFolder(settings.out, is_resumed=False, may_overwrite=False)
    folder.start("")
    run = build_run(settings, None)
    stream = io.StringIO()
    console = Console(file=stream, width=MAX_COLUMNS)
    train(run, folder, PlainProgress(console, settings.steps), StopRequest())
    close_run(run, folder, console)
    folder.close()

    shown = stream.getvalue()
    loss = held_out_loss(run.trainer.model, run.held_out, settings)
    trigram = ngram_entropies(run.corpus.train_texts, run.corpus.held_out_texts).trigram
    for part in ("eager", "grouped_mm", "piper", f"{loss:.3f}", f"{trigram:.3f}", "uniform"):
        assert part in shown
    assert max(map(len, shown.splitlines())) <= MAX_COLUMNS
    # what the model makes up cannot steer the terminal
    assert "\x1b" not in shown
    assert folder.sample.read_text().startswith("The \x1b ")
    assert folder.picture.read_bytes().startswith(b"\x89PNG")
    summary = json.loads(folder.summary.read_text())
    assert summary["held_out_nats_per_byte"] == pytest.approx(loss)
    assert summary["ngram_nats_per_byte"]["trigram"] == trigram
    assert [timing["experts"] for timing in summary["timings"]] == ["eager", "grouped_mm", "piper"]
    loaded = AutoModelForCausalLM.from_pretrained(folder.model, experts_implementation="piper")
    assert held_out_loss(loaded, run.held_out, settings) == pytest.approx(loss, rel=1e-6)

    # somebody edits the history
    lines = folder.metrics.read_text().splitlines()
    last = json.loads(lines[-1]) | {"held_out_loss": None}
    folder.metrics.write_text("\n".join([*lines[:-1], json.dumps(last)]) + "\n")
    with pytest.raises(
        DataError, match=r"must end with the held_out_loss of step 4, got none. Res"
    ):
        close_run(run, folder, console)
