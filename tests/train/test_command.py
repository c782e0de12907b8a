import errno
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from piper_kernels import cli
from piper_kernels.train import closing, command
from piper_kernels.train.flags import settings_toml
from piper_kernels.train.metrics import MetricsFile, read_metrics
from piper_kernels.train.run_folder import RunFolder
from piper_kernels.train.settings import TrainSettings


@pytest.fixture
def arguments(tiny_settings: Callable[..., TrainSettings], tmp_path: Path) -> list[str]:
    """``piper train`` with the tiny settings, from a file, into ``tmp_path/run``."""
    config = tmp_path / "tiny.toml"
    config.write_text(settings_toml(tiny_settings()))
    return ["train", "--config", str(config)]


def test_run_trains_refuses_to_clobber_overwrites_and_resumes(
    arguments: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    metrics = tmp_path / "run" / "metrics.jsonl"
    assert cli.main(arguments) == 0
    shown = capsys.readouterr()
    assert "olmoe, 16,656 parameters, fp32, piper experts, on cpu" in shown.out
    assert "step      4/4" in shown.out
    assert max(map(len, shown.out.splitlines())) <= 100
    first = read_metrics(metrics)

    assert cli.main(arguments) == 2
    message = "piper train: RunFolder: out must be an empty or a new folder, got"
    assert message in capsys.readouterr().err
    assert read_metrics(metrics) == first

    # safe to repeat
    for _ in range(2):
        assert cli.main([*arguments, "--overwrite", "--seed", "1"]) == 0
    again = read_metrics(metrics)
    assert [record.loss for record in again] != [record.loss for record in first]

    # a finished run has no steps left, and closes again
    (tmp_path / "run" / "training.png").unlink()
    assert cli.main([*arguments[:1], "--out", str(tmp_path / "run"), "--resume"]) == 0
    assert read_metrics(metrics) == again
    assert (tmp_path / "run" / "training.png").exists()

    assert cli.main([*arguments, "--resume", "--seed", "2"]) == 2
    assert "resume: seed must stay as in the checkpoint ('1'), got '2'" in capsys.readouterr().err


def test_run_judges_settings_beside_the_checkpoint(
    arguments: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert cli.main(arguments) == 0
    # 8 microbatches suit the default batch, but not this run's
    words = ["train", "--out", str(tmp_path / "run"), "--resume"]
    assert cli.main([*words, "--accumulate", "8"]) == 2
    message = "resume: TrainSettings: batch_size must be divisible by accumulate = 8, got 4"
    assert message in capsys.readouterr().err


@pytest.mark.parametrize("part", ["metrics.jsonl", "summary.json", "model", "training.png"])
def test_run_says_what_it_cannot_write(
    arguments: list[str],
    tmp_path: Path,
    part: str,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    start = RunFolder.start

    def occupy(folder: RunFolder, settings_text: str) -> None:
        start(folder, settings_text)
        # to be written to, and it cannot be: also for root
        (folder.path / part).symlink_to("/proc/none/none")

    monkeypatch.setattr(RunFolder, "start", occupy)
    assert cli.main(arguments) == 2
    shown = capsys.readouterr().err
    assert shown.startswith(
        f"piper train: train: {tmp_path / 'run'} must take the run's files, got "
    )
    assert len(shown.splitlines()) == 1


def test_run_leaves_the_old_run_when_the_new_one_cannot_start(
    arguments: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert cli.main(arguments) == 0
    assert cli.main([*arguments, "--overwrite", "--data", str(tmp_path / "none.txt")]) == 2
    assert "data must be readable" in capsys.readouterr().err
    # 9 of 4 experts: a model that can be built, but not run
    override = ["--model-override", "num_experts=4", "num_experts_per_tok=9"]
    assert cli.main([*arguments, "--overwrite", *override]) == 2
    assert "model must be able to run, got olmoe with" in capsys.readouterr().err
    assert len(read_metrics(tmp_path / "run" / "metrics.jsonl")) == 4


@pytest.mark.parametrize(
    ("extra", "message"),
    [
        (["--resume", "--overwrite"], "--resume and --overwrite must not be given together"),
        (["--resume"], "RunFolder: out must hold a run"),
        (["--batch-size", "0"], "settings: batch_size must be greater than or equal to 1, got 0"),
        (["--device", "cuda:99"], "choose_device: device must be one of this machine's"),
        (
            ["--device", "cpu:"],
            "choose_device: device must be auto, cpu, cuda or cuda:N, got 'cpu:'",
        ),
        (["--out", "/dev/null/run"], "out must be writable, got /dev/null/run (Not a directory)"),
        (["--out", "a" * 300], "(File name too long). Free the disk or choose another --out"),
    ],
)
def test_run_says_what_is_wrong_in_one_line(
    arguments: list[str], extra: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert cli.main([*arguments, *extra]) == 2
    shown = capsys.readouterr().err
    assert shown.startswith("piper train: ")
    assert message in shown
    assert len(shown.splitlines()) == 1


@pytest.mark.parametrize(("owner", "name"), [(MetricsFile, "append"), (closing, "draw_run")])
def test_run_explains_a_full_disk_wherever_it_strikes(
    arguments: list[str],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    owner: Any,
    name: str,
) -> None:
    def full(*_: object) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    with monkeypatch.context() as patch:
        patch.setattr(owner, name, full)
        assert cli.main(arguments) == 2
    shown = capsys.readouterr().err
    assert "must take the run's files, got [Errno 28] No space left on device. Free" in shown
    assert f"go on with: piper train --resume --out {tmp_path / 'run'}" in shown
    assert cli.main(["train", "--out", str(tmp_path / "run"), "--resume"]) == 0


def test_run_names_a_missing_package(
    arguments: list[str], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(command, "_PACKAGES", ("transformers", "no_such_package"))
    assert cli.main(arguments) == 2
    message = "got no no_such_package. Install them with: pip install 'piper-moe[train]'."
    assert message in capsys.readouterr().err


def test_run_refuses_to_be_one_of_many(
    arguments: list[str], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("WORLD_SIZE", "4")
    assert cli.main(arguments) == 2
    assert "WORLD_SIZE must be 1 without a plan, got 4" in capsys.readouterr().err


def test_help_needs_neither_torch_nor_transformers() -> None:
    code = (
        "import sys; from piper_kernels import cli\n"
        "try: cli.main(['train', '--help'])\n"
        "except SystemExit: print(sorted({'torch', 'transformers'} & set(sys.modules)))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr
    assert "--learning-rate X" in done.stdout
    assert done.stdout.splitlines()[-1] == "[]"


def test_run_lets_threads_sleep_unless_told_otherwise(
    arguments: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("GOMP_SPINCOUNT", "OMP_WAIT_POLICY"):
        # set first, so that whatever the command sets is undone
        monkeypatch.setenv(name, "ACTIVE")
        monkeypatch.delenv(name)
    bad = [*arguments, "--batch-size", "3", "--accumulate", "2"]
    monkeypatch.setenv("OMP_WAIT_POLICY", "ACTIVE")
    assert cli.main(bad) == 2
    assert "GOMP_SPINCOUNT" not in os.environ
    monkeypatch.delenv("OMP_WAIT_POLICY")
    assert cli.main(bad) == 2
    assert os.environ["GOMP_SPINCOUNT"] == "1000"
