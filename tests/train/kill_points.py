"""Trains, is killed, and resumes, in forked processes that share one import of torch.

Run as a script: ``kill_points.py FOLDER CASES ARGUMENTS``, with CASES a JSON list of
``[fault, number]`` and ARGUMENTS those of ``piper train``. One run without a fault goes into
``FOLDER/whole``. Each case trains into ``FOLDER/<fault>-<number>``; the fault strikes at that call;
then the run resumes. The last line is a JSON list of ``[fate, resumed]``: the exit status of the
two processes, or minus the signal that ended them.
"""

import json
import os
import resource
import signal
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

from piper_kernels import cli
from piper_kernels.train.loop import Trainer


def strike(fault: str, number: int) -> None:
    """Arrange that call ``number`` of something meets its fault."""
    calls = 0

    def before(original: Callable[..., Any], act: Callable[[], None]) -> Callable[..., Any]:
        def wrapped(*args: Any, **kwargs: Any) -> Any:
            nonlocal calls
            calls += 1
            if calls == number:
                act()
            return original(*args, **kwargs)

        return wrapped

    def kill() -> None:
        os.kill(os.getpid(), signal.SIGKILL)

    def interrupt() -> None:
        os.kill(os.getpid(), signal.SIGINT)

    def fill_disk() -> None:
        # the kernel stops every file at 20 kB; a checkpoint is larger
        signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
        resource.setrlimit(resource.RLIMIT_FSIZE, (20_000, 20_000))

    if fault == "kill-step":
        Trainer.train_step = before(Trainer.train_step, kill)
    elif fault == "interrupt-step":
        Trainer.train_step = before(Trainer.train_step, interrupt)
    elif fault == "full-disk-step":
        Trainer.train_step = before(Trainer.train_step, fill_disk)
    else:
        name = fault.removeprefix("kill-")
        setattr(os, name, before(getattr(os, name), kill))


def forked(action: Callable[[], int]) -> int:
    """Run ``action`` in a process of its own; its exit status, or minus the signal it died of."""
    process = os.fork()
    if process == 0:
        quiet = os.open(os.devnull, os.O_WRONLY)
        os.dup2(quiet, 1)
        os._exit(action())
    _, status = os.waitpid(process, 0)
    return os.waitstatus_to_exitcode(status)


def main(folder: Path, cases: list[tuple[str, int]], arguments: list[str]) -> None:
    # loads and warms up everything once, before forking
    assert cli.main(["train", *arguments, "--out", str(folder / "whole")]) == 0
    fates = []
    for fault, number in cases:
        words = ["train", *arguments, "--out", str(folder / f"{fault}-{number}")]

        def train(fault: str = fault, number: int = number, words: list[str] = words) -> int:
            strike(fault, number)
            return cli.main(words)

        fate = forked(train)
        resumed = forked(lambda words=words: cli.main([*words, "--resume"]))
        fates.append([fate, resumed])
    print(json.dumps(fates))


if __name__ == "__main__":
    main(Path(sys.argv[1]), json.loads(sys.argv[2]), json.loads(sys.argv[3]))
