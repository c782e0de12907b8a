"""Write a file whole or not at all."""

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

from piper_kernels.errors import ConfigError, instruction


def write_whole(function: str, argument: str, path: Path, write: Callable[[Path], Any]) -> None:
    """Let ``write`` write beside ``path``, then rename: a reader never sees half a file.

    Args:
        function: names the caller in an error.
        argument: where the path came from.
        path: the file.
        write: called with the path to write to, which has the same suffix.

    Raises:
        ConfigError: the system refuses; what ``path`` held is kept.
    """
    aside = path.with_name(f".{path.stem}.{os.getpid()}{path.suffix}")
    try:
        write(aside)
        os.replace(aside, path)
    except OSError as error:
        sentence = instruction(function, argument, "be writable", path, f"{error.strerror}.")
        raise ConfigError(sentence) from None
    finally:
        aside.unlink(missing_ok=True)
