"""The command: overview, version, unknown words, errors as one line, exit status."""

import argparse
import importlib
import io
import subprocess
import sys
import types
from collections.abc import Callable

import pytest

from piper_kernels import __version__, cli
from piper_kernels.cli import COMMANDS, main
from piper_kernels.errors import ConfigError


@pytest.mark.parametrize("words", [[], ["-h"], ["--help"]])
def test_main_shows_an_overview(words: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    assert main(words) == 0
    shown = capsys.readouterr().out
    assert shown.startswith("usage: piper")
    assert all(name in shown and text in shown for name, (_, text) in COMMANDS.items())


@pytest.mark.parametrize("word", ["-V", "--version"])
def test_main_shows_its_version(word: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main([word]) == 0
    assert capsys.readouterr().out == f"piper {__version__}\n"


def test_main_suggests_the_nearest_command(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["docter"]) == 2
    shown = capsys.readouterr()
    assert shown.err == "piper: unknown command 'docter'. Did you mean 'doctor'?\n"
    assert shown.out == ""


def plant(monkeypatch: pytest.MonkeyPatch, run: Callable[[argparse.Namespace], int]) -> None:
    """Make ``piper planted --size N`` call ``run``."""
    module = types.ModuleType("planted", "Planted for a test.")
    module.configure = lambda parser: parser.add_argument("--size", type=int, default=1)  # type: ignore[attr-defined]
    module.run = run  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "planted", module)
    monkeypatch.setitem(cli.COMMANDS, "planted", ("planted", "a test's command"))


def test_main_hands_the_words_to_the_command(monkeypatch: pytest.MonkeyPatch) -> None:
    plant(monkeypatch, lambda arguments: arguments.size)
    assert main(["planted", "--size", "7"]) == 7


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--sise", "7"], "unknown argument --sise. Did you mean --size?"),
        (["seven"], "unknown argument seven. See `piper planted --help`."),
    ],
)
def test_main_refuses_unknown_arguments_with_the_nearest_known_one(
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    words: list[str],
    message: str,
) -> None:
    plant(monkeypatch, lambda arguments: 0)
    with pytest.raises(SystemExit, match="2"):
        main(["planted", *words])
    assert message in capsys.readouterr().err


def test_main_explains_a_command(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    plant(monkeypatch, lambda arguments: 0)
    with pytest.raises(SystemExit, match="0"):
        main(["planted", "--help"])
    shown = capsys.readouterr().out
    assert shown.startswith("usage: piper planted")
    assert "Planted for a test." in shown


def test_main_prints_our_errors_as_one_line(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def run(arguments: argparse.Namespace) -> int:
        raise ConfigError("train: lr must be > 0, got 0.")

    plant(monkeypatch, run)
    assert main(["planted"]) == 2
    assert capsys.readouterr().err == "piper planted: train: lr must be > 0, got 0.\n"


def test_main_lets_other_errors_through(monkeypatch: pytest.MonkeyPatch) -> None:
    def run(arguments: argparse.Namespace) -> int:
        raise ZeroDivisionError("a fault of ours")

    plant(monkeypatch, run)
    with pytest.raises(ZeroDivisionError, match="a fault of ours"):
        main(["planted"])


def test_main_ends_quietly_when_interrupted(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def run(arguments: argparse.Namespace) -> int:
        raise KeyboardInterrupt

    plant(monkeypatch, run)
    assert main(["planted"]) == 130
    assert capsys.readouterr().err == "piper planted: interrupted\n"


def test_overview_loads_no_command() -> None:
    code = "import sys; from piper_kernels.cli import main; main([]); print('torch' in sys.modules)"
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=True
    )
    assert done.stdout.splitlines()[-1] == "False"


def test_python_m_is_the_command() -> None:
    done = subprocess.run(
        [sys.executable, "-m", "piper_kernels", "--version"],
        capture_output=True,
        text=True,
        timeout=60,
        check=True,
    )
    assert done.stdout == f"piper {__version__}\n"


def test_commands_that_are_here_offer_configure_and_run() -> None:
    module = importlib.import_module(COMMANDS["doctor"][0])
    parser = argparse.ArgumentParser()
    module.configure(parser)
    assert callable(module.run)


def test_main_prints_on_a_terminal_without_the_character(monkeypatch: pytest.MonkeyPatch) -> None:
    raw = io.BytesIO()
    stream = io.TextIOWrapper(raw, encoding="ascii")
    monkeypatch.setattr(sys, "stdout", stream)
    assert cli.main(["--version"]) == 0
    print("caf\u00e9")
    stream.flush()
    assert raw.getvalue().splitlines()[-1] == b"caf?"
