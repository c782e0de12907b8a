"""Reads sizes out of a Hugging Face config and says which key is missing or wrong.

Pure: no torch, no process group, no transformers.
"""

from collections.abc import Mapping
from typing import Any, cast

from piper_kernels.errors import ConfigError, instruction, require
from piper_kernels.pipeline.model_description import ELEMENT_BYTES, Dtype


class ConfigReader:
    """Typed look-ups in a config; every error names the file and the key.

    Example:
        >>> ConfigReader({"hidden_size": 8}, "config.json").size("hidden_size")
        8
        >>> ConfigReader({}, "config.json").size("hidden_size")
        Traceback (most recent call last):
        ...
        piper_kernels.errors.ConfigError: config.json: hidden_size must be given, got nothing. \
Add it: the class defaults of a family are another model's.
    """

    def __init__(self, config: Mapping[str, Any], source: str) -> None:
        """Look up in ``config``; ``source`` (a file's name) begins every error."""
        self.config = config
        self.source = source

    def size(self, *names: str, default: int | None = None, least: int = 1) -> int:
        """An integer under the first of ``names`` that is given and not null.

        Args:
            names: of the key, the usual one first.
            default: if none is given; ``None``: one must be.
            least: smallest that makes sense.

        Raises:
            ConfigError: naming the key and the value.
        """
        name, value = self._find(names)
        if value is None and default is not None:
            return default
        if value is None:
            remedy = "Add it: the class defaults of a family are another model's."
            raise ConfigError(instruction(self.source, names[0], "be given", "nothing", remedy))
        is_size = isinstance(value, int) and not isinstance(value, bool) and value >= least
        require(is_size, self.source, name, f"be an integer >= {least}", repr(value))
        return int(value)

    def flag(self, name: str, *, default: bool) -> bool:
        """A boolean under ``name``.

        Raises:
            ConfigError: it is something else.
        """
        _, value = self._find((name,))
        value = default if value is None else value
        require(isinstance(value, bool), self.source, name, "be true or false", repr(value))
        return bool(value)

    def sizes(self, name: str) -> tuple[int, ...]:
        """A list of integers under ``name``; empty if not given.

        Raises:
            ConfigError: it is something else.
        """
        _, value = self._find((name,))
        value = [] if value is None else value
        is_list = isinstance(value, list | tuple) and all(type(one) is int for one in value)
        require(is_list, self.source, name, "be a list of integers", repr(value))
        return tuple(value)

    def dtype(self) -> Dtype:
        """The parameters' type: ``dtype``, or ``torch_dtype`` in older files; bfloat16 if none.

        Raises:
            ConfigError: the planner knows no such type.
        """
        name, value = self._find(("dtype", "torch_dtype"))
        value = "bfloat16" if value is None else str(value).removeprefix("torch.")
        require(
            value in ELEMENT_BYTES,
            self.source,
            name,
            f"be one of {', '.join(ELEMENT_BYTES)}",
            repr(value),
        )
        return cast(Dtype, value)

    def _find(self, names: tuple[str, ...]) -> tuple[str, Any]:
        """The first of ``names`` that is given and not null, with its value."""
        for name in names:
            value = self.config.get(name)
            if value is not None:
                return name, value
        return names[0], None
